"""Two kinds of import contract that import-linter does not bring: a name's only place, and the standard library alone.

Root ``pyproject.toml`` uses them beside import-linter's own; ``lint-imports`` checks all of them.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from importlinter import Contract, ContractCheck, fields, output
from importlinter.application import contract_utils

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grimp import ImportGraph

LOADERS = {"import_module", "__import__", "find_spec"}


def dotted(node: ast.expr) -> str:
    """The dotted name that a chain of attributes spells, or nothing.

    >>> dotted(ast.parse("torch.distributed.all_reduce", mode="eval").body)
    'torch.distributed.all_reduce'
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Every dotted name that a module imports, spells out, or loads by a string, with its line.

    >>> list(names_in("from torch import distributed"))
    [(1, 'torch'), (1, 'torch.distributed')]
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in LOADERS:
            strings = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            yield from ((node.lineno, value) for value in strings if isinstance(value, str))


def modules_of(package: str) -> Iterator[tuple[str, Path]]:
    """Each module of a package and its file, found without importing anything."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is not importable"
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            tail = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in tail if part != "__init__")]), path


class OnlyPlaceContract(Contract):
    """``thing`` is named in the modules of ``places`` (and below them) and nowhere else in ``packages``."""

    type_name = "only_place"

    thing: Any = fields.StringField()
    packages: Any = fields.ListField(subfield=fields.StringField())
    places: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002  # import-linter's signature
        """Read the source, since the import graph knows outside packages by their first name only."""
        found = []
        for package in self.packages:
            for module, path in modules_of(package):
                if not any(f"{module}.".startswith(f"{place}.") for place in self.places):
                    found += [
                        f"{module}:{line} names {name}"
                        for line, name in names_in(path.read_text())
                        if f"{name}.".startswith(f"{self.thing}.")
                    ]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """One line a place."""
        _print_found(check.metadata)


class StandardLibraryContract(Contract):
    """``package`` imports the standard library and itself, but for ``ignore_imports``."""

    type_name = "standard_library"

    package: Any = fields.StringField()
    ignore_imports: Any = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002  # as above
        """Look at every import of the package's modules in the graph."""
        warnings = contract_utils.remove_ignored_imports(
            graph=graph,
            ignore_imports=self.ignore_imports,
            unmatched_alerting=contract_utils.AlertLevel.ERROR,
        )
        package = self.package
        found = []
        for module in sorted({package} | graph.find_descendants(package)):
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                root = imported.split(".")[0]
                if root not in sys.stdlib_module_names and not f"{imported}.".startswith(f"{package}."):
                    found.append(f"{module} imports {imported}")
        return ContractCheck(kept=not found, warnings=warnings, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """One line an import."""
        _print_found(check.metadata)


def _print_found(metadata: dict[str, Any]) -> None:
    for line in metadata["found"]:
        output.print_error(line, bold=False)
        output.new_line()
