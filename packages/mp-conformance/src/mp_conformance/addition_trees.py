"""In which order does a sum add? Found out by numerical testing alone, as a tree of additions.

A huge term, its negative and units elsewhere: units that were added to the huge term before it was cancelled are lost,
the others are counted. For every pair of places that count is the size of the smallest subtree holding both, which
fixes the whole tree of additions (FPRev; Xie et al., arXiv 2411.00442).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Tree", "describe", "evaluate", "first_three", "reveal_tree"]

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
                f"places {i} and {j} leave {float(count)!r} units of {terms - 2}; the sum does not absorb units as a "
                "tree of rounded additions would: choose another huge value or unit"
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
        raise ValueError(f"places {places} never come together; the sum keeps every unit, or its order changes")
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
        if tree == _chain([_chain(terms[start : start + width]) for start in range(0, len(terms), width)]):
            return f"blocks of {width}, each in sequence, then the blocks in sequence"
    return f"as {tree}"


def first_three(tree: Tree) -> tuple[int, int, int]:
    """Three places of which the third comes to the first two no earlier than these come together.

    Args:
        tree: from ``reveal_tree``, of at least three places.

    Returns:
        The places: what the second leaves behind in a sum with the first is seen once the third has taken that away.

    Source: this project.

    >>> first_three(((0, 2), (1, 3))), first_three((0, 1, 2, 3)), first_three((((0, 1), 2), 3))
    ((0, 2, 1), (0, 1, 2), (0, 1, 2))
    """
    places = _together(tree)
    return places[0], places[1], places[2]


def _together(tree: Tree) -> list[int]:
    if isinstance(tree, int):
        return [tree]
    deeper = next((branch for branch in tree if not isinstance(branch, int)), None)
    found = [] if deeper is None else _together(deeper)
    return (found + [leaf for branch in tree if branch is not deeper for leaf in _leaves(branch)])[:3]


def _leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for branch in tree for leaf in _leaves(branch)]


def _sorted(tree: Tree) -> Tree:
    if isinstance(tree, int):
        return tree
    return tuple(sorted((_sorted(branch) for branch in tree), key=lambda branch: min(_leaves(branch))))


def _chain(terms: Sequence[Tree]) -> Tree:
    tree = terms[0]
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


def evaluate(
    tree: Tree,
    products: Array,
    fused: Callable[[Array, int], Array] | None = None,
    settle: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """Add products in fp32 along a tree of two-way additions.

    Args:
        tree: from ``reveal_tree``.
        products: float64 (... x terms), exact products.
        fused: (running sum, place) -> running sum, where a place is added with one rounding of product and sum;
            products are rounded to fp32 first unless given.
        settle: what becomes of every rounded product and sum, such as a flush of subnormals to zero.

    Returns:
        float32 (...).

    Raises:
        ValueError: a node adds more than two at once.

    Source: this project.

    >>> float(evaluate(((0, 1), 2), np.array([1.0, 2.0**-24, 2.0**-24])))
    1.0
    """
    if isinstance(tree, int):
        return settle(products[..., tree].astype(np.float32))
    if len(tree) != 2:
        raise ValueError(f"{len(tree)} terms are added at once; compare with a row of spec.tensor_cores instead")
    if fused is not None and isinstance(tree[1], int):
        return settle(fused(evaluate(tree[0], products, fused, settle), tree[1]))
    left, right = (evaluate(branch, products, fused, settle) for branch in tree)
    return settle(left + right)
