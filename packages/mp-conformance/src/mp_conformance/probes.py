"""How does a device add? Found out by numerical testing alone, then checked against an emulation on random products.

The order comes from ``addition_trees``. Kept bits, truncation and subnormals are found as in the published studies of
tensor cores (Fasi et al., PeerJ Computer Science 7:e330).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.addition_trees import describe, evaluate, first_three, reveal_tree
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_conformance.addition_trees import Tree
    from mp_reference.spec.formats import FloatFormat

__all__ = ["Finding", "find_out", "require_probed"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(kw_only=True)
class Finding:
    """What the probe found about the matrix product of one format on one device.

    ``differing`` of ``compared`` random products, tiny ones among them, differ from the emulation named by ``row``, and
    from those of ``also``, which these formats do not tell from it; ``row`` is empty where no known accumulator agrees,
    and then ``order`` and the other fields describe a new one.
    """

    device: str
    format: str
    terms: int
    order: str = ""
    fan_in: int = 2
    accumulates_in: str = ""
    kept_bits: int = 0
    truncates: bool = False
    subnormal_inputs: bool = True
    subnormal_outputs: bool = True
    row: str = ""
    also: list[str] = field(default_factory=list)
    compared: int = 0
    differing: int = 0
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The finding as text."""
        match = ", or ".join((self.row, *self.also)) or "none of the known ones; a new row would hold the above"
        bits = f"{self.kept_bits} bits below the largest term, {'cut off' if self.truncates else 'rounded'}"
        subnormals = f"inputs {_kept(self.subnormal_inputs)}, outputs {_kept(self.subnormal_outputs)}"
        return [
            f"{self.format} matrix product on {self.device}, {_SIDE} x {self.terms} by {self.terms} x {_SIDE}",
            f"  order        {self.order}",
            f"  accumulator  {self.accumulates_in}, {bits}",
            f"  subnormals   {subnormals}",
            f"  row          {match}",
            f"  verified     {self.differing} of {self.compared} random products differ",
            *(f"  note         {note}" for note in self.notes),
        ]


def _kept(flag: bool) -> str:
    return "kept" if flag else "flushed to zero"


_SIDE = 48
"""Rows and columns of every product: libraries take other kernels, and other orders, for other shapes."""

_SCALES: dict[str, tuple[float, float]] = {  # huge and unit, so that 31 units never count beside the huge term
    "fp16": (2.0**15, 2.0**-14),
    "bf16": (2.0**60, 1.0),
    "fp32": (2.0**60, 1.0),
}


def require_probed(fmt: FloatFormat) -> None:
    """Refuse a format whose own results cannot show how they were added, or that no array holds.

    Raises:
        ValueError: ``fmt`` is none of those that can be probed.

    Source: this project.
    """
    if fmt.name not in _SCALES:
        raise ValueError(
            f"{fmt.name} cannot be probed by products whose results are {fmt.name}, too; choose among "
            f"{', '.join(_SCALES)}"
        )


def find_out(
    matmul: Callable[[Array, Array], Array], fmt: FloatFormat, device: str, terms: int = 32, seed: int = 0
) -> Finding:
    """Probe a matrix product.

    Args:
        matmul: (m x k, k x n) of ``fmt.dtype`` -> (m x n), the device's.
        fmt: fp16, bf16 or fp32.
        device: for the report.
        terms: the length k that is probed; at most 32.
        seed: of the random products.

    Returns:
        The finding.

    Raises:
        ValueError: another format.

    Source: the module's docstring.
    """
    require_probed(fmt)
    found = Finding(device=device, format=fmt.name, terms=terms)

    def sums(x: Array) -> Array:
        rows = np.zeros((-(-len(x) // _SIDE) * _SIDE, x.shape[1]), np.float32)
        rows[: len(x)] = x
        ones = np.ones((x.shape[1], _SIDE), np.float32).astype(fmt.dtype)
        parts = [matmul(part, ones)[:, 0] for part in np.split(rows.astype(fmt.dtype), len(rows) // _SIDE)]
        return np.concatenate(parts)[: len(x)].astype(np.float64)

    _subnormals(matmul, fmt, found)
    huge, unit = _SCALES[fmt.name]
    if fmt.name == "fp16" and found.subnormal_inputs and found.subnormal_outputs:
        unit = 2.0**-17  # 31 of them stay below what even 26 kept bits reach
    try:
        tree = reveal_tree(sums, terms, huge, unit)
    except ValueError as reason:
        found.order = "not a tree of rounded additions"
        found.notes.append(str(reason))
        tree = None
    if tree is not None:
        found.order, found.fan_in = describe(tree), _fan_in(tree)
    _accumulator(sums, found, (0, 1, 2) if tree is None else first_three(tree))
    _match(matmul, fmt, found, tree, terms, seed)
    return found


def _fan_in(tree: Tree) -> int:
    return 1 if isinstance(tree, int) else max(len(tree), *(_fan_in(branch) for branch in tree))


def _accumulator(sums: Callable[[Array], Array], found: Finding, places: tuple[int, int, int]) -> None:
    """Width by a small term between a large one and its negative; truncation by one and a half of its last units."""

    def survives(shift: int, factor: float = 1.0, lift: int = 0) -> float:
        row = np.zeros((1, 32))
        row[0, places] = 2.0**lift, factor * 2.0 ** (lift - shift), -(2.0**lift)
        return float(sums(row)[0])

    reach = max((shift for shift in range(1, 15) if survives(shift) != 0), default=0)
    if reach == 14:  # the small term would leave the range of fp16: lift both, 2**14 beside 2**(14 - shift)
        reach = max((shift for shift in range(14, 40) if survives(shift, lift=14) != 0), default=14)
    found.kept_bits = reach
    found.accumulates_in = "fp32" if reach >= 21 else "fp16" if 9 <= reach <= 13 else f"{reach + 1} bits"
    found.truncates = survives(reach, 1.5, lift=14) == survives(reach, lift=14)


def _subnormals(matmul: Callable[[Array, Array], Array], fmt: FloatFormat, found: Finding) -> None:
    """One subnormal factor with a normal product; two normal factors with a subnormal product."""

    def survives(left: float, right: float) -> bool:
        a, b = np.zeros((_SIDE, 32), np.float32), np.zeros((32, _SIDE), np.float32)
        a[:, 0], b[0] = left, right
        return bool((matmul(a.astype(fmt.dtype), b.astype(fmt.dtype)) != 0).all())

    found.subnormal_inputs = survives(fmt.min_normal / 2, 2.0**12)
    found.subnormal_outputs = survives(fmt.min_normal, 0.25)


def _match(
    matmul: Callable[[Array, Array], Array], fmt: FloatFormat, found: Finding, tree: Tree | None, terms: int, seed: int
) -> None:
    """Compare random products with the recovered tree, then with the known rows; keep the one that differs least."""
    rng = np.random.Generator(np.random.PCG64(seed))
    problems = [_random_problem(rng, fmt, terms, cancelling) for cancelling in (False, True)]
    problems += _tiny_problems(rng, fmt, terms)
    actual = [np.asarray(matmul(a, b)) for a, b in problems]
    found.compared = sum(x.size for x in actual)
    apart = {}
    for name, emulate in _candidates(fmt, tree, found):
        expected = [_as_result(emulate(a, b), actual[0].dtype) for a, b in problems]
        apart[name] = [_differing(x, y) for x, y in zip(actual, expected, strict=True)]
    if _differing(np.asarray(matmul(*problems[1])), actual[1]):
        found.notes.append("two calls with the same operands differ")
    nearest = min(apart, key=lambda name: sum(apart[name]))
    found.differing = sum(apart[nearest])
    if found.differing == 0:
        found.row, *found.also = (name for name in apart if not any(apart[name]))
    else:
        where = " (tiny numbers alone differ)" if not any(apart[nearest][:2]) else ""
        found.notes.append(f"nearest known row: {nearest}{where}")


def _random_problem(rng: np.random.Generator, fmt: FloatFormat, terms: int, cancelling: bool) -> tuple[Array, Array]:
    """Where it cancels, the second half of each sum is the first half's negative in another order."""
    a, b = rng.standard_normal((_SIDE, terms)), rng.standard_normal((terms, _SIDE))
    if cancelling:
        half, order = terms // 2, rng.permutation(terms // 2)
        a[:, half : 2 * half], b[half : 2 * half] = -a[:, order], b[order]
    return a.astype(np.float32).astype(fmt.dtype), b.astype(np.float32).astype(fmt.dtype)


def _tiny_problems(rng: np.random.Generator, fmt: FloatFormat, terms: int) -> list[tuple[Array, Array]]:
    """Subnormal factors with results in the normal range, and normal factors with subnormal results."""
    lowest = 1 - fmt.bias
    problems = []
    for left, right in ((lowest - 2, 8), (lowest // 2, lowest - lowest // 2 - 4)):
        a, b = rng.standard_normal((_SIDE, terms)), rng.standard_normal((terms, _SIDE))
        problems.append((np.ldexp(a, left).astype(np.float32).astype(fmt.dtype), np.ldexp(b, right).astype(np.float32)))
    return [(a, b.astype(fmt.dtype)) for a, b in problems]


def _as_result(x: Array, dtype: np.dtype[Any]) -> Array:
    """A library rounds a wider accumulator to the result's format once, at the end."""
    import mp_reference as mp

    narrower = x.dtype.itemsize > dtype.itemsize
    return (
        np.asarray(mp.cast(x, next(f for f in FORMATS.values() if f.dtype == dtype))) if narrower else x.astype(dtype)
    )


def _differing(actual: Array, expected: Array) -> int:
    apart = actual.view(np.uint8) != expected.view(np.uint8)
    zero = (actual == 0) & (expected == 0)  # the sign of a sum that cancels altogether is open
    return int((apart.reshape(*actual.shape, -1).any(-1) & ~zero).sum())


def _candidates(
    fmt: FloatFormat, tree: Tree | None, found: Finding
) -> list[tuple[str, Callable[[Array, Array], Array]]]:
    import mp_reference as mp
    from mp_reference.spec.accumulators import pairwise, sequential
    from mp_reference.spec.tensor_cores import ARCHITECTURES

    def along(fused: bool) -> Callable[[Array, Array], Array]:
        return lambda a, b: _along_tree(tree, a, b, fmt, fused, found)

    def by(accumulator: Any) -> Callable[[Array, Array], Array]:
        return lambda a, b: np.asarray(mp.matmul(a, b, accumulator=accumulator))

    rows: list[tuple[str, Callable[[Array, Array], Array]]] = []
    plain = [sequential(FORMATS["fp32"], fused=True), sequential(FORMATS["fp32"]), pairwise(FORMATS["fp32"])]
    flushed = [side for side in ("inputs", "outputs") if not getattr(found, f"subnormal_{side}")]
    if tree is not None and _fan_in(tree) == 2 and (flushed or describe(tree) not in ("sequential", "pairwise")):
        order = "the order above" if describe(tree).startswith("as ") else describe(tree)
        tail = f", subnormal {' and '.join(flushed)} flushed" if flushed else ""
        rows += [(f"{order}, in fp32, fused{tail}", along(True)), (f"{order}, in fp32{tail}", along(False))]
    rows += [(row.name, by(row)) for row in plain]
    if fmt.bits == 16:
        low = [sequential(fmt, fused=True), sequential(fmt)]
        rows += [(row.name, by(row)) for row in low]
        units = [_unit(name, result, fmt) for name in ARCHITECTURES for result in ("fp32", "fp16")]
        rows += [(unit.name, by(unit)) for unit in units if unit is not None]
    rows.append(("exact, rounded once", by("exact")))
    return rows


def _unit(name: str, result: str, fmt: FloatFormat) -> Any:
    """The row of spec.tensor_cores, or None where the unit does not multiply the format to such a result."""
    import mp_reference as mp

    try:
        unit = mp.tensor_core(name, result=result)
        mp.matmul(np.ones((1, 1), fmt.dtype), np.ones((1, 1), fmt.dtype), accumulator=unit)
    except (ValueError, TypeError):
        return None
    return unit


def _along_tree(tree: Tree | None, a: Array, b: Array, fmt: FloatFormat, fused: bool, found: Finding) -> Array:
    assert tree is not None
    import mp_reference as mp

    def flushed(x: Array, below: float, kept: bool) -> Array:
        return x if kept else np.where(np.abs(x) < below, np.copysign(0, x), x).astype(x.dtype)

    a, b = (flushed(x.astype(np.float32), fmt.min_normal, found.subnormal_inputs) for x in (a, b))
    products = a.astype(np.float64)[:, None, :] * b.astype(np.float64).T[None, :, :]

    def step(total: Array, place: int) -> Array:
        left, right = np.broadcast_arrays(a[:, place, None], b[place])
        return np.asarray(mp.fma(left, right, total))

    def settle(x: Array) -> Array:
        return flushed(x, FORMATS["fp32"].min_normal, found.subnormal_outputs)

    total = evaluate(tree, products, step if fused else None, settle)
    return np.asarray(mp.cast(flushed(total, fmt.min_normal, found.subnormal_outputs), fmt))
