"""Every code block of README, CONTRIBUTING and docs runs, and prints what the page says it prints."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
LANGUAGES = {"python", "text", "sh", "mermaid", "toml"}
NOX = "python -m pip install nox && python -m nox -s "


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and the line it opens at."""

    language: str
    text: str
    line: int
    follows: str  # the language of the block right before it, with only blank lines between, or nothing


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    end = 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        directly = found and not page[end : match.start()].strip()
        line = page.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], match[2], line, found[-1].language if directly else ""))
        end = match.end()
    return found


def python_program(page: str) -> tuple[str, str]:
    """All Python blocks of a page as one program, and the output that the page promises block by block."""
    program, promised = [], []
    for block in blocks(page):
        if block.language == "python":
            program.append(f"{block.text}\nprint('<end of block>')")
            promised.append("")
        elif block.language == "text" and block.follows == "python":
            promised[-1] = block.text
    return "\n".join(program), "<end of block>\n".join([*promised, ""])


def assert_prints(got: str, promised: str) -> None:
    """Compare block by block; a block without a ``text`` block after it may print anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    pairs = zip(got.split("<end of block>\n"), promised.split("<end of block>\n"), strict=True)
    for number, (block_got, block_promised) in enumerate(pairs):
        if block_promised:
            fits = doctest.OutputChecker().check_output(block_promised, block_got, flags)
            assert fits, f"block {number} printed\n{block_got}\nbut the page promises\n{block_promised}"


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    program, promised = python_program(page.read_text())
    if program:
        result = run(program, tmp_path)
        assert result.returncode == 0, result.stderr[-3000:]
        assert_prints(result.stdout, promised)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_names_a_language_that_the_tests_know(page: Path) -> None:
    unknown = [(block.line, block.language) for block in blocks(page.read_text()) if block.language not in LANGUAGES]
    assert not unknown, f"{page.name}: give these blocks one of {sorted(LANGUAGES)}"


def shell_lines() -> list[tuple[str, str]]:
    """Each command that a page shows, with its page; a line that ends in a backslash goes on in the next."""
    return [
        (page.relative_to(ROOT).as_posix(), line)
        for page in PAGES
        for block in blocks(page.read_text())
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def nox_sessions() -> set[str]:
    listed = subprocess.run([sys.executable, "-m", "nox", "--list", "-f", ROOT / "noxfile.py"], cwd=ROOT,
                            capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    return set(re.findall(r"^[*-] (\w+)", listed.stdout, re.MULTILINE))


def test_every_nox_session_that_a_page_shows_exists() -> None:
    shown = {name for _, line in shell_lines() for name in re.findall(r"nox(?:.*?) -s (\w+)", line)}
    assert shown
    assert shown <= nox_sessions()


def test_the_readme_has_its_two_commands_on_one_line_each_and_ci_runs_the_second() -> None:
    readme = [line for page, line in shell_lines() if page == "README.md" and line.startswith(NOX)]
    assert readme == [f"{NOX}quickstart", f"{NOX}conformance"]
    assert f'grep -E -m 1 "^{NOX}conformance$" README.md' in (ROOT / ".ci/run").read_text()


def test_every_install_line_is_one_command_with_the_constraints_in_front() -> None:
    lines = [line for _, line in shell_lines() if "pip install" in line and "-e " in line]
    assert lines
    for line in lines:
        assert line.split()[:6] == ["python", "-m", "pip", "install", "-c", "constraints.txt"]
        assert re.findall(r"-e (\S+)", line) == [
            f"packages/mp-{name}" for name in ("reference", "torch", "conformance")
        ]


SUITE = re.compile(r"^mp-conformance(?!.*--max-examples)")
"""The whole suite, which CI asks through nox, or another device's, which needs the device."""


def test_every_option_of_the_suite_that_a_page_shows_exists() -> None:
    program = "from mp_conformance.cli import main; main(['run', '--help'])"
    helped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    shown = {option for _, line in shell_lines() if SUITE.search(line) for option in re.findall(r" (--[a-z-]+)", line)}
    assert shown
    assert {option for option in shown if option not in helped.stdout} == set()


QUICK = [
    (page, line)
    for page, line in shell_lines()
    if not re.search(r"\bnox\b|pip install|git clone", line) and not SUITE.search(line)
]


@pytest.mark.parametrize(("page", "line"), QUICK, ids=[line[:60] for _, line in QUICK])
def test_a_shell_line_of_a_page_runs(page: str, line: str, tmp_path: Path) -> None:
    """Those that install or ask a nox session are CI's own; every other line runs here, in a scratch folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "true", "MPLBACKEND": "agg", "RUNS": str(tmp_path)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                            capture_output=True, text=True, timeout=400, check=False)  # fmt: skip
    assert result.returncode == 0, f"{page}: {line}\n{result.stdout[-1500:]}{result.stderr[-3000:]}"


def test_the_guarantees_of_the_readme_are_made_from_the_claims() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", "from mp_conformance import guarantees_table; print(guarantees_table())"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    readme = (ROOT / "README.md").read_text()
    stated = readme.split("<!-- guarantees -->")[1].split("<!-- end of guarantees -->")[0]
    assert stated.strip() == printed.stdout.strip(), "paste what guarantees_table() prints"


def test_a_wrong_promise_is_reported() -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    program, promised = python_program(page)
    with pytest.raises(AssertionError, match="promises"):
        assert_prints(run(program, ROOT).stdout, promised)


def test_every_link_inside_the_repository_leads_somewhere() -> None:
    dead = []
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose)
        inside = [target for target in targets if "://" not in target]
        dead += [f"{page.relative_to(ROOT)} -> {target}" for target in inside if not (page.parent / target).exists()]
    assert not dead
