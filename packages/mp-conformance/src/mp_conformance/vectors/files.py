"""Golden vector files: write them with the exact oracle, read them, check them, ask a subject with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance import oracle
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from pathlib import Path

    from mp_reference.spec.formats import FloatFormat

__all__ = ["Vectors", "check", "described", "names", "read", "write"]

Array = np.ndarray[Any, np.dtype[Any]]

_ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "sqrt": 1, "fma": 3, "cast": 1}
_ROUNDINGS = ("nearest-even", "toward-zero", "toward-positive", "toward-negative", "nearest-away", "to-odd")
_FLAG_BITS = {"inexact": 1, "underflow": 2, "overflow": 4, "infinite": 8, "invalid": 16}
_ROWS = 400


@dataclass(frozen=True)
class Vectors:
    """One file.

    Args:
        name: ``fp16_add``, ``fp32_to_bf16_toward-zero`` and the like.
        operation: add, sub, mul, div, sqrt, fma or cast.
        source: the format of the operands.
        target: the format of the results.
        rounding: the rounding mode.
        operands: arrays of the operands' dtype.
        results: array of the results' dtype.
        flags: the flags' bits, or None where the file has none.
    """

    name: str
    operation: str
    source: str
    target: str
    rounding: str
    operands: tuple[Array, ...]
    results: Array
    flags: Array | None


def names() -> list[str]:
    """The files that the package holds.

    Source: what ``write`` writes.

    >>> "fp16_add" in names()
    True
    """
    return sorted(_name(*plan) for plan in _planned())


def described(name: str) -> tuple[str, str, str, str]:
    """What a file is about, from its name alone.

    Args:
        name: one of ``names()``.

    Returns:
        Operation, source format, target format, rounding mode.

    Raises:
        ValueError: no file has this name.

    Source: what ``write`` writes.

    >>> described("fp32_to_bf16_to-odd")
    ('cast', 'fp32', 'bf16', 'to-odd')
    """
    plan = next((plan for plan in _planned() if _name(*plan) == name), None)
    if plan is None:
        raise ValueError(f"vectors {name!r} are not among {', '.join(names())}")
    return plan


def _planned() -> list[tuple[str, str, str, str]]:
    """(operation, source, target, rounding) of every file."""
    plans = [(op, f, f, "nearest-even") for f in ("fp16", "bf16", "fp32") for op in _ARITY if op != "cast"]
    plans += [("add", "fp16", "fp16", mode) for mode in _ROUNDINGS[1:]]
    plans += [("cast", "fp32", target, "nearest-even") for target in FORMATS if target not in ("fp32", "tf32")]
    plans += [("cast", "fp32", target, mode) for target in ("fp16", "bf16") for mode in _ROUNDINGS[1:]]
    return plans


def _name(operation: str, source: str, target: str, rounding: str) -> str:
    stem = f"{source}_to_{target}" if operation == "cast" else f"{source}_{operation}"
    return stem if rounding == "nearest-even" else f"{stem}_{rounding}"


def _operands(operation: str, source: FloatFormat, target: FloatFormat) -> tuple[Array, ...]:
    """Repeatable operands: every pair of special values, then seeded ones near the target's edges."""
    rng = np.random.Generator(np.random.PCG64(20261129))
    unsigned = {2: np.uint16, 4: np.uint32}[source.dtype.itemsize]
    top, field = (1 << (source.bits - 1)) - 1, 1 << source.mantissa_bits
    codes = [
        0,
        1,
        field - 1,
        field,
        field + 1,
        top - field,
        top - field + 1,
        (source.bias << source.mantissa_bits),
        top,
    ]
    special = np.array([code | sign for code in codes for sign in (0, top + 1)])
    count = _ARITY[operation]
    grid = np.stack(np.meshgrid(*([special] * min(count, 2)), indexing="ij"), -1).reshape(-1, min(count, 2))
    columns = [grid[:, 0], grid[:, -1], np.roll(grid[:, 0], 5)][:count] if count > 1 else [special]
    spare = source.mantissa_bits - target.mantissa_bits
    drawn = [rng.integers(0, 2 * (top + 1), _ROWS) for _ in range(count)]
    if spare > 1:  # a cast: half of the drawn values lie on a tie of the target or beside one
        tie = (drawn[0] >> spare << spare) | (1 << (spare - 1))
        drawn[0] = np.where(np.arange(_ROWS) % 2 == 0, tie + rng.integers(-1, 2, _ROWS), drawn[0])
    return tuple(
        np.concatenate([column, extra]).astype(unsigned).view(source.dtype)
        for column, extra in zip(columns, drawn, strict=True)
    )


def _text(operation: str, source: FloatFormat, target: FloatFormat, rounding: str) -> str:
    operands = _operands(operation, source, target)
    flags: list[frozenset[str]] | None = None
    if operation == "cast":
        operands = (np.where(np.isnan(operands[0]) & (not target.has_nan), source.dtype.type(0), operands[0]),)
        results = oracle.cast(operands[0], target, rounding)
    else:
        results = oracle.arithmetic(operation, operands, target, rounding)
        flags = oracle.flags(operation, operands, target, rounding)
    columns = "operands result" + (" flags (1 inexact 2 underflow 4 overflow 8 infinite 16 invalid)" if flags else "")
    lines = [
        f"# origin: mp_reference.numerics.exact (fractions, rounded by integer division); {operation} {source.name} -> "
        f"{target.name}, {rounding}",
        f"# columns: {columns}; a NaN result stands for any NaN",
    ]
    widths = [-(-source.bits // 4)] * len(operands) + [-(-target.bits // 4)]
    table = [oracle.code_of(x) for x in (*operands, results)]
    for index in range(operands[0].size):
        cells = [f"{int(column[index]):0{width}x}" for column, width in zip(table, widths, strict=True)]
        cells += [f"{sum(_FLAG_BITS[flag] for flag in flags[index]):02x}"] if flags else []
        lines.append(" ".join(cells))
    return "\n".join(lines) + "\n"


def write(folder: Path) -> list[str]:
    """Write every golden file.

    Args:
        folder: where; it must exist.

    Returns:
        The names written.

    Source: the exact oracle.
    """
    written = []
    for operation, source, target, rounding in _planned():
        name = _name(operation, source, target, rounding)
        text = _text(operation, FORMATS[source], FORMATS[target], rounding)
        (folder / f"{name}.txt").write_text(text, encoding="ascii")
        written.append(name)
    return written


def read(name: str, text: str | None = None) -> Vectors:
    """Parse one file.

    Args:
        name: one of ``names()``.
        text: the file's content, where it does not come from the package.

    Returns:
        Operands, results and flags as arrays.

    Raises:
        ValueError: no such file, or a line with another number of columns.

    Source: the file's first line.

    >>> vectors = read("fp16_add")
    >>> vectors.operation, vectors.operands[0].dtype.name, vectors.flags is not None
    ('add', 'float16', True)
    """
    operation, source, target, rounding = described(name)
    if text is None:
        text = files("mp_conformance.vectors").joinpath(f"{name}.txt").read_text(encoding="ascii")
    count = _ARITY[operation]
    flagged = operation != "cast"
    rows = [_cells(name, number, line, count + 1 + flagged) for number, line in _lines(text)]
    codes = np.array(rows, np.int64).reshape(-1, count + 1 + flagged)
    return Vectors(
        name, operation, source, target, rounding,
        tuple(_as(codes[:, i], FORMATS[source]) for i in range(count)), _as(codes[:, count], FORMATS[target]),
        codes[:, count + 1] if flagged else None,
    )  # fmt: skip


def _as(codes: Array, fmt: FloatFormat) -> Array:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[fmt.dtype.itemsize]
    return codes.astype(unsigned).view(fmt.dtype)


def _lines(text: str) -> list[tuple[int, str]]:
    """The lines that hold data, each with its number in the file."""
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]


def _cells(name: str, number: int, line: str, width: int) -> list[int]:
    cells = line.split()
    if len(cells) != width:
        raise ValueError(f"{name}, line {number}: {len(cells)} columns, {width} belong there")
    try:
        return [int(cell, 16) for cell in cells]
    except ValueError as reason:
        raise ValueError(f"{name}, line {number}: {line!r} is not hexadecimal throughout") from reason


def check(folder: Path | None = None) -> dict[str, str]:
    """Where files differ from what the oracle writes today.

    Args:
        folder: another simulator's files under the same names, as many as there are; the package's own, all of them,
            unless given.

    Returns:
        Name -> line, what it holds and what the oracle gives, for each file that differs; any NaN stands for a NaN.

    Raises:
        ValueError: the folder holds no file of a known name.

    Source: the exact oracle.

    >>> check()
    {}
    """
    place = folder or files("mp_conformance.vectors")
    wrong = {}
    present = [name for name in names() if place.joinpath(f"{name}.txt").is_file()]
    if folder and not present:
        raise ValueError(f"{folder} holds no golden file; their names are {', '.join(names())}, each with .txt")
    for name in names() if folder is None else present:
        where = "is missing"
        if name in present:
            where = _difference(name, place.joinpath(f"{name}.txt").read_bytes().decode("ascii", errors="replace"))
        if where:
            wrong[name] = where
    return wrong


def _difference(name: str, text: str) -> str:
    operation, source, target, rounding = described(name)
    held, given = _lines(text), _lines(_text(operation, FORMATS[source], FORMATS[target], rounding))
    for (number, line), (_, right) in zip(held, given, strict=False):
        if line.split() != right.split() and not _same(name, number, line, right):
            return f"line {number} holds {line!r}, the oracle gives {right!r}"
    return "" if len(held) == len(given) else f"{len(held)} lines of data, {len(given)} belong there"


def _same(name: str, number: int, line: str, right: str) -> bool:
    """Whether two lines differ by leading zeros, case or the choice of a NaN alone."""
    operation, _, target, _ = described(name)
    count = _ARITY[operation]
    wanted = _cells(name, number, right, len(right.split()))
    try:
        cells = _cells(name, number, line, len(wanted))
    except ValueError:
        return False
    results = [
        oracle.value_of_code(row[count] & ((1 << FORMATS[target].bits) - 1), FORMATS[target]) for row in (cells, wanted)
    ]
    both_nan = all(math.isnan(value) for value in results)
    return [*cells[:count], *cells[count + 1 :]] == [*wanted[:count], *wanted[count + 1 :]] and (
        both_nan or cells[count] == wanted[count]
    )
