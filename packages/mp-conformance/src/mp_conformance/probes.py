"""How does a device add? Found out by numerical testing alone, then checked against an emulation on random products.

A huge term, its negative and units elsewhere: units that were added to the huge term before it was cancelled are lost,
the others are counted. For every pair of places that count is the size of the smallest subtree holding both, which
fixes the whole tree of additions (FPRev; Xie et al., arXiv 2411.00442). Kept bits, truncation and subnormals are found
as in the published studies of tensor cores (Fasi et al., PeerJ Computer Science 7:e330).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_reference.spec.formats import FloatFormat

__all__ = ["Finding", "Tree", "describe", "evaluate", "find_out", "reveal_tree"]

Array = np.ndarray[Any, np.dtype[Any]]
Tree = int | tuple["Tree", ...]
"""A place, or the trees that one addition brings together; more than two are added at once."""


def reveal_tree(sums: Callable[[Array], Array], terms: int, huge: float, unit: float) -> Tree:
    """The tree of additions behind a sum.

    Args:
        sums: float64 (rows x terms) -> float64 (rows,): one sum a row, computed by what is tested.
        terms: how many terms.
        huge: so large that adding all units to it changes nothing.
        unit: counted where it survives.

    Returns:
        Nested tuples of places.

    Raises:
        ValueError: the counts contradict each other, so the order is not the same in every call.

    Source: Xie et al., FPRev, arXiv 2411.00442 (2024).

    >>> reveal_tree(lambda x: ((x[:, 0] + x[:, 1]).astype("f4") + x[:, 2]).astype("f4"), 3, 2.0**60, 1.0)
    ((0, 1), 2)
    """
    if terms == 1:
        return 0
    pairs = [(i, j) for i in range(terms) for j in range(i + 1, terms)]
    x = np.full((len(pairs), terms), unit)
    for row, (i, j) in enumerate(pairs):
        x[row, i], x[row, j] = huge, -huge
    counted = np.asarray(sums(x), np.float64) / unit
    size = np.zeros((terms, terms), np.int64)
    for (i, j), count in zip(pairs, counted, strict=True):
        if not (np.isfinite(count) and 0 <= count <= terms - 2 and count == round(count)):
            raise ValueError(
                f"places {i} and {j} leave {count!r} units of {terms - 2}; the sum does not absorb units as a tree of "
                "rounded additions would: choose another huge value or unit"
            )
        size[i, j] = size[j, i] = terms - round(count)
    return _grown(tuple(range(terms)), size)


def _grown(places: tuple[int, ...], size: Array) -> Tree:
    if len(places) == 1:
        return places[0]
    groups: list[list[int]] = []
    for place in places:
        home = next((group for group in groups if size[group[0], place] < len(places)), None)
        if home is None:
            groups.append([place])
        else:
            home.append(place)
    if len(groups) == 1:
        raise ValueError(f"places {places} never come together; the sum's order changes from call to call")
    return tuple(_grown(tuple(group), size) for group in groups)


def describe(tree: Tree) -> str:
    """An order in words.

    Args:
        tree: from ``reveal_tree``.

    Returns:
        ``sequential``, ``pairwise``, ``blocks of 8 added at once, in sequence``, or the nested places.

    Source: this project.

    >>> describe((((0, 1), 2), 3)), describe(((0, 1), (2, 3))), describe(((0, 1, 2, 3), 4, 5, 6, 7))
    ('sequential', 'pairwise', 'blocks of 4 added at once, in sequence')
    """
    terms = sorted(_leaves(tree))
    if tree == _chain(terms):
        return "sequential"
    if _sorted(tree) == _sorted(_chain(terms[::-1])):
        return "sequential, from the last term to the first"
    if _sorted(tree) == _sorted(_halves(terms)):
        return "pairwise"
    blocks = _blocks(tree)
    if blocks and len(blocks) > 1 and len(set(map(len, blocks[:-1]))) == 1 and len(blocks[0]) > 1:
        return f"blocks of {len(blocks[0])} added at once, in sequence"
    for width in (2, 4, 8, 16, 32):
        if _sorted(tree) == _sorted(_lanes(len(terms), width)):
            return f"{width} lanes, each in sequence, then the lanes pairwise"
    return f"as {tree}"


def _leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for branch in tree for leaf in _leaves(branch)]


def _sorted(tree: Tree) -> Tree:
    if isinstance(tree, int):
        return tree
    return tuple(sorted((_sorted(branch) for branch in tree), key=lambda branch: min(_leaves(branch))))


def _chain(terms: list[int]) -> Tree:
    tree: Tree = terms[0]
    for term in terms[1:]:
        tree = (tree, term)
    return tree


def _halves(terms: list[int]) -> Tree:
    if len(terms) == 1:
        return terms[0]
    half = -(-len(terms) // 2)
    return (_halves(terms[:half]), _halves(terms[half:]))


def _lanes(count: int, width: int) -> Tree:
    if count < width:
        return _chain(list(range(count)))
    whole = count // width * width
    tree = [_chain(list(range(lane, whole, width))) for lane in range(width)]
    while len(tree) > 1:
        tree = [(tree[i], tree[i + 1]) for i in range(0, len(tree), 2)]
    return _chain_onto(tree[0], list(range(whole, count)))


def _chain_onto(tree: Tree, terms: list[int]) -> Tree:
    for term in terms:
        tree = (tree, term)
    return tree


def _blocks(tree: Tree) -> list[list[int]]:
    """The runs of leaves that each come in at once along the spine of a chain; empty if it is none."""
    if isinstance(tree, int):
        return [[tree]]
    inner = [branch for branch in tree if not isinstance(branch, int)]
    if len(inner) > 1:
        return []
    mine = [branch for branch in tree if isinstance(branch, int)]
    if not inner:
        return [mine]
    before = _blocks(inner[0])
    return [*before, mine] if before else []


def evaluate(tree: Tree, products: Array, fused: Callable[[Array, int], Array] | None = None) -> Array:
    """Add products in fp32 along a tree of two-way additions.

    Args:
        tree: from ``reveal_tree``.
        products: float64 (... x terms), exact products.
        fused: (running sum, place) -> running sum, where a place is added with one rounding of product and sum;
            products are rounded to fp32 first unless given.

    Returns:
        float32 (...).

    Raises:
        ValueError: a node adds more than two at once.

    Source: this project.

    >>> float(evaluate(((0, 1), 2), np.array([1.0, 2.0**-24, 2.0**-24])))
    1.0
    """
    if isinstance(tree, int):
        return products[..., tree].astype(np.float32)
    if len(tree) != 2:
        raise ValueError(f"{len(tree)} terms are added at once; compare with a row of spec.tensor_cores instead")
    if fused is not None and isinstance(tree[1], int):
        return fused(evaluate(tree[0], products, fused), tree[1])
    left, right = (evaluate(branch, products, fused) for branch in tree)
    return left + right


@dataclass(kw_only=True)
class Finding:
    """What the probe found about the matrix product of one format on one device.

    ``differing`` of ``compared`` random products differ from the emulation named by ``row``; ``row`` is empty where
    no known accumulator agrees, and then ``order`` and the other fields describe a new one.
    """

    device: str
    format: str
    order: str = ""
    fan_in: int = 2
    accumulates_in: str = ""
    kept_bits: int = 0
    truncates: bool = False
    subnormal_inputs: bool = True
    subnormal_outputs: bool = True
    row: str = ""
    compared: int = 0
    differing: int = 0
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The finding as text."""
        match = self.row or "none of the known ones; a new row would hold the above"
        bits = f"{self.kept_bits} bits below the largest term, {'cut off' if self.truncates else 'rounded'}"
        subnormals = f"inputs {_kept(self.subnormal_inputs)}, outputs {_kept(self.subnormal_outputs)}"
        return [
            f"{self.format} matrix product on {self.device}",
            f"  order        {self.order}",
            f"  accumulator  {self.accumulates_in}, {bits}",
            f"  subnormals   {subnormals}",
            f"  row          {match}",
            f"  verified     {self.differing} of {self.compared} random products differ",
            *(f"  note         {note}" for note in self.notes),
        ]


def _kept(flag: bool) -> str:
    return "kept" if flag else "flushed to zero"


_SCALES: dict[str, tuple[float, float]] = {  # huge and unit, so that 31 units never count beside the huge term
    "fp16": (2.0**15, 2.0**-14),
    "bf16": (2.0**60, 1.0),
    "fp32": (2.0**60, 1.0),
    "float8_e4m3fn": (2.0**8, 2.0**-9),
    "float8_e5m2": (2.0**15, 2.0**-14),
}


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

    Source: the module's docstring.
    """
    found = Finding(device=device, format=fmt.name)

    def sums(x: Array) -> Array:
        ones = np.ones((x.shape[1], 4), np.float32).astype(fmt.dtype)
        return matmul(x.astype(np.float32).astype(fmt.dtype), ones)[:, 0].astype(np.float64)

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
    _accumulator(sums, found)
    _match(matmul, fmt, found, tree, terms, seed)
    return found


def _fan_in(tree: Tree) -> int:
    return 1 if isinstance(tree, int) else max(len(tree), *(_fan_in(branch) for branch in tree))


def _accumulator(sums: Callable[[Array], Array], found: Finding) -> None:
    """Width by a small term between a large one and its negative; truncation by one and a half of its last units."""

    def survives(shift: int, factor: float = 1.0) -> float:
        row = np.zeros((1, 32))
        row[0, :3] = 1.0, factor * 2.0**-shift, -1.0
        return float(sums(row)[0])

    reach = max((shift for shift in range(1, 15) if survives(shift) != 0), default=0)
    if reach == 14:  # the format's own range ends here: lift the large term by a product of two
        wide = [shift for shift in range(14, 40) if _lifted(sums, shift) != 0]
        reach = max(wide, default=14)
    found.kept_bits = reach
    found.accumulates_in = "fp32" if reach >= 21 else "fp16" if 9 <= reach <= 13 else f"{reach + 1} bits"
    found.truncates = _lifted(sums, reach, 1.5) == _lifted(sums, reach)


def _lifted(sums: Callable[[Array], Array], shift: int, factor: float = 1.0) -> float:
    """As a small term of ``2**-shift`` beside 1, with both inside the range of fp16: 2**14 beside 2**(14 - shift)."""
    row = np.zeros((1, 32))
    low = 14 - shift
    row[0, :3] = 2.0**14, factor * 2.0**low, -(2.0**14)
    return float(sums(row)[0]) * 2.0**-14


def _subnormals(matmul: Callable[[Array, Array], Array], fmt: FloatFormat, found: Finding) -> None:
    tiny = np.zeros((4, 32), np.float32)
    tiny[:, 0] = fmt.min_subnormal * 3
    large = np.zeros((32, 4), np.float32)
    large[0] = 2.0**12
    found.subnormal_inputs = bool((matmul(tiny.astype(fmt.dtype), large.astype(fmt.dtype)) != 0).all())
    small, less = np.zeros((4, 32), np.float32), np.zeros((32, 4), np.float32)
    small[:, 0], less[0] = fmt.min_normal, 0.25
    found.subnormal_outputs = bool((matmul(small.astype(fmt.dtype), less.astype(fmt.dtype)) != 0).all())


def _match(
    matmul: Callable[[Array, Array], Array], fmt: FloatFormat, found: Finding, tree: Tree | None, terms: int, seed: int
) -> None:
    """Compare random products with the recovered tree, then with the known rows; keep the one that differs least."""
    rng = np.random.Generator(np.random.PCG64(seed))
    problems = [_random_problem(rng, fmt, terms, cancelling) for cancelling in (False, True)]
    actual = [np.asarray(matmul(a, b)) for a, b in problems]
    compared = sum(x.size for x in actual)
    best = (compared + 1, "")
    for name, emulate in _candidates(fmt, tree):
        expected = [emulate(a, b) for a, b in problems]
        if expected[0].dtype != actual[0].dtype:
            continue
        differing = sum(_differing(x, y) for x, y in zip(actual, expected, strict=True))
        best = min(best, (differing, name), key=lambda pair: pair[0])
        if differing == 0:
            break
    found.compared, found.differing = compared, min(best[0], compared)
    found.row = best[1] if best[0] == 0 else ""
    if best[0]:
        found.notes.append(f"nearest known row: {best[1]}")


def _random_problem(rng: np.random.Generator, fmt: FloatFormat, terms: int, cancelling: bool) -> tuple[Array, Array]:
    """48 x terms x 48; where it cancels, the second half of each sum is the first half's negative in another order."""
    a, b = rng.standard_normal((48, terms)), rng.standard_normal((terms, 48))
    if cancelling:
        half, order = terms // 2, rng.permutation(terms // 2)
        a[:, half : 2 * half], b[half : 2 * half] = -a[:, order], b[order]
    return a.astype(np.float32).astype(fmt.dtype), b.astype(np.float32).astype(fmt.dtype)


def _differing(actual: Array, expected: Array) -> int:
    apart = actual.view(np.uint8) != expected.view(np.uint8)
    zero = (actual == 0) & (expected == 0)  # the sign of a sum that cancels altogether is open
    return int((apart.reshape(*actual.shape, -1).any(-1) & ~zero).sum())


def _candidates(fmt: FloatFormat, tree: Tree | None) -> list[tuple[str, Callable[[Array, Array], Array]]]:
    import mp_reference as mp
    from mp_reference.spec.accumulators import pairwise, sequential

    def along(fused: bool) -> Callable[[Array, Array], Array]:
        return lambda a, b: _along_tree(tree, a, b, fmt, fused)

    def by(accumulator: Any) -> Callable[[Array, Array], Array]:
        return lambda a, b: np.asarray(mp.matmul(a, b, accumulator=accumulator))

    rows: list[tuple[str, Callable[[Array, Array], Array]]] = []
    plain = [sequential(FORMATS["fp32"], fused=True), sequential(FORMATS["fp32"]), pairwise(FORMATS["fp32"])]
    if tree is not None and _fan_in(tree) == 2 and describe(tree) not in ("sequential", "pairwise"):
        order = describe(tree)
        rows += [(f"{order}, in fp32, fused", along(True)), (f"{order}, in fp32", along(False))]
    rows += [(row.name, by(row)) for row in plain]
    if fmt.bits == 16:
        low = [sequential(fmt, fused=True), sequential(fmt)]
        rows += [(row.name, by(row)) for row in low]
        units = ("volta", "ampere", "hopper", "blackwell", "cdna2", "cdna3")
        rows += [(mp.tensor_core(unit).name, by(mp.tensor_core(unit))) for unit in units if _has(unit, fmt)]
    rows.append(("exact, rounded once", by("exact")))
    return rows


def _has(unit: str, fmt: FloatFormat) -> bool:
    import mp_reference as mp

    try:
        row = mp.tensor_core(unit)
        mp.matmul(np.ones((1, 1), fmt.dtype), np.ones((1, 1), fmt.dtype), accumulator=row)
    except (ValueError, TypeError):
        return False
    return True


def _along_tree(tree: Tree | None, a: Array, b: Array, fmt: FloatFormat, fused: bool) -> Array:
    assert tree is not None
    import mp_reference as mp

    left, right = a.astype(np.float64), b.astype(np.float64)
    products = left[:, None, :] * right.T[None, :, :]

    def step(total: Array, place: int) -> Array:
        wide = (a[:, place].astype(np.float32)[:, None], b[place].astype(np.float32)[None, :])
        left_column, right_row = np.broadcast_arrays(*wide)
        return np.asarray(mp.fma(left_column, right_row, total))

    total = evaluate(tree, products, step if fused else None)
    return np.asarray(mp.cast(total, fmt))
