"""The repository as a whole: versions, licences, public names, size of modules and functions."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["mp_reference", "mp_torch", "mp_conformance"]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text()) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
MODULES = sorted(ROOT.glob("packages/*/src/**/*.py"))

LONG_MODULES: dict[str, str] = {  # path under packages/ -> the reason for more than 400 lines
    "mp-reference/src/mp_reference/numerics/elementary.py": "one table of functions, each with its bound beside it",
    "mp-reference/src/mp_reference/numerics/exact.py": "the oracle may share no code with any other module",
}
LONG_FUNCTIONS: dict[str, str] = {}  # path::name -> the reason for more than 40 lines of code


def short(path: Path) -> str:
    return path.relative_to(ROOT / "packages").as_posix()


def test_versions_are_in_lockstep() -> None:
    versions = {name: project["project"]["version"] for name, project in PROJECTS.items()}
    versions |= {package: importlib.import_module(package).__version__ for package in PACKAGES}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    versions["CHANGELOG"] = newest[1]
    assert len(set(versions.values())) == 1, versions


def test_packages_pin_each_other_to_their_own_version() -> None:
    for name, project in PROJECTS.items():
        version = project["project"]["version"]
        siblings = [need for need in project["project"]["dependencies"] if need.startswith("mp-")]
        assert all(need.endswith(f"=={version}") for need in siblings), (name, siblings)


def test_each_package_is_typed_licensed_and_needs_python_3_11() -> None:
    for name, project in PROJECTS.items():
        assert project["project"]["license"] == "MIT"
        assert project["project"]["requires-python"] == ">=3.11"
        assert project["build-system"]["build-backend"] == "hatchling.build"
        assert (ROOT / "packages" / name / "src" / name.replace("-", "_") / "py.typed").exists()


def test_the_root_project_file_holds_tool_settings_only() -> None:
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"tool"}


def test_constraints_pin_every_dependency_and_are_sorted() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert all("==" in line for line in lines)
    assert lines == sorted(lines, key=str.lower)
    needed = set()
    for project in PROJECTS.values():
        extras = project["project"].get("optional-dependencies", {}).values()
        for need in [*project["project"]["dependencies"], *(item for extra in extras for item in extra)]:
            match = re.match(r"[\w-]+", need)
            assert match is not None
            needed.add(match[0].lower().replace("_", "-"))
    elsewhere = {"jax"}  # an extra subject of the claims, which CI does not ask
    assert {name for name in needed if not name.startswith("mp-")} <= pinned | elsewhere


def public_names() -> list[tuple[str, str]]:
    return [
        (package, name) for package in PACKAGES for name in getattr(importlib.import_module(package), "__all__", ())
    ]


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def test_a_menu_has_at_most_twelve_names_besides_errors_and_the_reference_its_promised_ones() -> None:
    modules = {package: importlib.import_module(package) for package in PACKAGES}
    sizes = {
        package: len([name for name in getattr(module, "__all__", ()) if not is_error(getattr(module, name))])
        for package, module in modules.items()
    }
    assert 0 < sizes["mp_torch"] <= 12, sizes
    assert 0 < sizes["mp_conformance"] <= 12, sizes
    assert 0 < sizes["mp_reference"] <= 34, sizes  # twelve formats, and the operations on them


@pytest.mark.parametrize(("package", "name"), public_names(), ids=[".".join(pair) for pair in public_names()])
def test_a_public_name_is_documented_with_an_example(package: str, name: str) -> None:
    value: Any = getattr(importlib.import_module(package), name)
    if inspect.ismodule(value):  # a callable module: its function of the same name
        value = getattr(value, name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        value = type(value)  # a row, such as FP16: its class is the document
    documentation = inspect.getdoc(value) or ""
    assert documentation, f"{package}.{name} has no docstring"
    assert is_error(value) or ">>>" in documentation, f"{package}.{name} has no example in its docstring"


def test_the_names_for_type_checkers_are_those_of_the_lazy_menu() -> None:
    reference = importlib.import_module("mp_reference")
    tree = ast.parse(Path(inspect.getfile(reference)).read_text())
    checked = {
        alias.asname: (node.module or "").removeprefix("mp_reference.")
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert checked == reference._MENU


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines that hold code: no docstring, no blank line, no comment."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len({line for node in body for part in ast.walk(node) if (line := getattr(part, "lineno", 0))})


def test_a_module_of_more_than_400_lines_and_a_function_of_more_than_40_have_a_reason() -> None:
    """The report is in the failure: the longest first."""
    modules = {short(path): len(path.read_text().splitlines()) for path in MODULES}
    functions = {
        f"{short(path)}::{node.name}": code_lines(node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    too_long = {name: size for name, size in modules.items() if size > 400 and name not in LONG_MODULES}
    too_long |= {name: size for name, size in functions.items() if size > 40 and name not in LONG_FUNCTIONS}
    assert not too_long, "split these, or give the reason in this file: " + ", ".join(
        f"{name} {size}" for name, size in sorted(too_long.items(), key=lambda item: -item[1])
    )
    stale = (set(LONG_MODULES) - {n for n, s in modules.items() if s > 400}) | (
        set(LONG_FUNCTIONS) - {n for n, s in functions.items() if s > 40}
    )
    assert not stale, f"these are short now, take their reasons out: {sorted(stale)}"


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    pattern = re.compile(r"/(?:work|root|tmp|home|Users)/[A-Za-z.]")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if path.suffix in {".py", ".md", ".toml", ".txt", ".sh", ".cpp", ""} and path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def is_unfinished(function: ast.FunctionDef) -> bool:
    """A body of nothing but ``...`` or ``pass``, or one that raises ``NotImplementedError``."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    empty = bool(body) and all(isinstance(node, ast.Pass) or ast.unparse(node) == "..." for node in body)
    return empty or "raise NotImplementedError" in ast.unparse(function)


def test_no_module_of_the_packages_is_a_stub() -> None:
    """Empty bodies belong to protocols and abstract methods; unfinished places have no mark, since there are none."""
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b")
    found = []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        scopes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.Module)]
        found += [
            f"{short(path)}:{function.lineno} {function.name}"
            for scope in scopes
            if not (isinstance(scope, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in scope.bases))
            for function in scope.body
            if isinstance(function, ast.FunctionDef) and is_unfinished(function)
            if not any("abstract" in ast.unparse(decorator) for decorator in function.decorator_list)
        ]
        lines = enumerate(path.read_text().splitlines(), 1)
        found += [f"{short(path)}:{number}: {line.strip()}" for number, line in lines if marks.search(line)]
    assert not found
