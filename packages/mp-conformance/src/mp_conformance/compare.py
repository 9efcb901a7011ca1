"""Comparators: they raise with hex on both sides and the oracle's verdict, and otherwise return what they counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Bits", "Bound", "DisagreementError", "Tally", "Ulp", "Worst", "assert_same_bits", "assert_within_bound",
    "assert_within_ulps", "shown", "ulp_distance",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]

_CODES: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Bits:
    """Every value but NaN agrees bit for bit, signed zeros included; all NaNs are equal."""

    def __str__(self) -> str:
        """The word of the report."""
        return "BITS"


@dataclass(frozen=True)
class Ulp:
    """At most ``n`` codes away from the correctly rounded value, and why ``n``."""

    n: int
    reason: str

    def __str__(self) -> str:
        """The word of the report."""
        return f"ULP({self.n})"


@dataclass(frozen=True)
class Bound:
    """Within an a-priori error bound, and how it is derived."""

    derivation: str

    def __str__(self) -> str:
        """The word of the report."""
        return "BOUND"


class DisagreementError(AssertionError):
    """A claim was found false; the message shows the first input that shows it."""


@dataclass(frozen=True)
class Worst:
    """The input that was furthest off, in hex and in decimal."""

    distance: float
    inputs: str
    actual: str
    expected: str


@dataclass
class Tally:
    """What a comparator counted: values, how far off they were, and the worst of them."""

    compared: int = 0
    histogram: Counter[str] = field(default_factory=Counter)
    worst: Worst | None = None

    def add(self, other: Tally) -> None:
        """Count ``other`` in."""
        self.compared += other.compared
        self.histogram.update(other.histogram)
        if other.worst and (self.worst is None or other.worst.distance > self.worst.distance):
            self.worst = other.worst


def codes_of(x: Array) -> Array:
    """The bit patterns of ``x`` as unsigned integers of the same width and shape; booleans and integers as they are."""
    x = np.ascontiguousarray(x)
    if x.dtype.kind in "bui":
        return x
    return x.view(_CODES[x.dtype.itemsize])


def shown(value: Any) -> str:
    """One value as ``dtype 0xhex (decimal)``.

    Args:
        value: a NumPy scalar or 0-dim array of any dtype of the project.

    Returns:
        The text that error messages and reports print.

    Source: this project.

    >>> shown(np.float32(1.5))
    'float32 0x3fc00000 (1.5)'
    """
    array = np.asarray(value)
    if array.dtype.kind in "biuU":
        return f"{array.dtype} {array[()]}"
    code = int(codes_of(array).reshape(-1)[0])
    return f"{array.dtype} 0x{code:0{2 * array.dtype.itemsize}x} ({float(array[()])!r})"


def is_nan(x: Array) -> Array:
    """Where ``x`` is NaN; nowhere for integers and booleans."""
    if x.dtype.kind in "bui":
        return np.zeros(x.shape, bool)
    with np.errstate(invalid="ignore"):  # a signalling NaN is data here
        return np.asarray(np.isnan(x), bool)


def ulp_distance(actual: Array, expected: Array) -> Array:
    """How many codes apart two arrays are.

    Args:
        actual: any shape and floating dtype.
        expected: same shape and dtype.

    Returns:
        float64, 0 for equal values (all NaNs are equal, +0 and -0 too), infinite where one side alone is NaN.

    Source: the codes of an IEEE 754 format are ordered as their values are (IEEE 754-2019, 3.4).

    >>> ulp_distance(np.float32([1, -0.0, np.nan]), np.float32([1.0000001, 0.0, np.nan]))
    array([1., 0., 0.])
    """
    steps = []
    for x in (actual, expected):
        codes = codes_of(x).astype(np.int64)
        sign = np.int64(1) << np.int64(8 * x.dtype.itemsize - 1) if x.dtype.name != "float8_e8m0fnu" else np.int64(256)
        magnitude = codes & (sign - 1)
        steps.append(np.where(codes & sign, -magnitude, magnitude))
    distance = np.abs((steps[0] - steps[1]).astype(np.float64))
    nan = is_nan(actual), is_nan(expected)
    return np.where(nan[0] & nan[1], 0.0, np.where(nan[0] ^ nan[1], np.inf, distance))


def _require_same_kind(actual: Any, expected: Array) -> Array:
    if not isinstance(actual, np.ndarray | np.generic):
        raise DisagreementError(f"the subject returned {type(actual).__name__}, the claim needs a NumPy array")
    if actual.dtype != expected.dtype:
        raise DisagreementError(f"the subject returned dtype {actual.dtype}, the claim needs {expected.dtype}")
    if actual.shape != expected.shape:
        raise DisagreementError(f"the subject returned shape {actual.shape}, the claim needs {expected.shape}")
    return np.asarray(actual)


def _input_at(inputs: Sequence[Array], index: int, shape: tuple[int, ...]) -> str:
    texts = [shown(x.reshape(-1)[index] if x.shape == shape else x.reshape(-1)[0]) for x in inputs if np.size(x)]
    return ", ".join(texts) if texts else "(see the claim)"


def _complain(
    wrong: Array,
    actual: Array,
    expected: Array,
    inputs: Sequence[Array],
    verdict: Callable[[int], str] | None,
    tail: str,
) -> DisagreementError:
    index = int(np.flatnonzero(wrong.reshape(-1))[0])
    says = verdict(index) if verdict else f"expected is the oracle's own value, {shown(expected.reshape(-1)[index])}"
    return DisagreementError(
        f"{int(wrong.sum())} of {wrong.size} values differ{tail}; first at flat index {index}: "
        f"{_input_at(inputs, index, actual.shape)} -> subject {shown(actual.reshape(-1)[index])}, "
        f"expected {shown(expected.reshape(-1)[index])}; exact oracle: {says}"
    )


def assert_same_bits(
    actual: Any, expected: Array, *, inputs: Sequence[Array] = (), verdict: Callable[[int], str] | None = None
) -> Tally:
    """Two arrays agree bit for bit, NaN as a class.

    Args:
        actual: what the subject returned.
        expected: what the oracle, the table or the data says; same shape and dtype.
        inputs: the operands, shown beside a difference.
        verdict: what the exact oracle says about flat index i; ``expected`` unless given.

    Returns:
        The count of compared values.

    Raises:
        DisagreementError: another shape, dtype or bit pattern; hex of both sides in the message.

    Source: IEEE 754-2019, 6.2 (NaN payloads are not portable).

    >>> assert_same_bits(np.float16([1, np.nan]), np.float16([1, np.nan])).compared
    2
    """
    actual = _require_same_kind(actual, expected)
    wrong = np.asarray((codes_of(actual) != codes_of(expected)) & ~(is_nan(actual) & is_nan(expected)))
    if wrong.any():
        raise _complain(wrong, actual, expected, inputs, verdict, "")
    return Tally(int(actual.size), Counter({"0": int(actual.size)}))


def assert_within_ulps(actual: Any, expected: Array, n: int, *, inputs: Sequence[Array] = ()) -> Tally:
    """At most ``n`` codes away from the correctly rounded value.

    Args:
        actual: what the subject returned.
        expected: the correctly rounded result; same shape and dtype.
        n: the claim's allowance.
        inputs: the operands, shown beside the worst value.

    Returns:
        The histogram of distances and the worst input.

    Raises:
        DisagreementError: a value is further off; the message shows the worst one.

    Source: the claim's own reason for ``n``.

    >>> assert_within_ulps(np.float16([1.001]), np.float16([1.0]), 1).histogram
    Counter({'1': 1})
    """
    actual = _require_same_kind(actual, expected)
    distance = ulp_distance(actual, expected)
    if (distance > n).any():
        worst = distance == distance.max()
        tail = f" by more than {n} ulp ({int((distance > n).sum())} do), {distance.max():g} at most"
        raise _complain(worst, actual, expected, inputs, None, tail)
    steps, counts = np.unique(distance, return_counts=True)
    index = int(np.argmax(distance)) if distance.size else -1
    worst_seen = None
    if distance.size and distance.reshape(-1)[index] > 0:
        flat = actual.reshape(-1)[index], expected.reshape(-1)[index]
        place = _input_at(inputs, index, actual.shape)
        worst_seen = Worst(float(distance.max()), place, shown(flat[0]), shown(flat[1]))
    names = {f"{step:g}": int(count) for step, count in zip(steps, counts, strict=True)}
    return Tally(int(actual.size), Counter(names), worst_seen)


def assert_within_bound(actual: Any, exact: Array, bound: Array, *, inputs: Sequence[Array] = ()) -> Tally:
    """No further from the exact value than an a-priori bound allows.

    Args:
        actual: what the subject returned, any floating dtype.
        exact: float64, the exact value (or within a small part of ``bound`` of it).
        bound: float64, the largest permitted absolute error of each element.
        inputs: operands to show; they may have other shapes.

    Returns:
        A histogram of error / bound in tenths and the worst element.

    Raises:
        DisagreementError: an error exceeds its bound, or a finite exact value became NaN or infinite.

    Source: the claim's own derivation.

    >>> assert_within_bound(np.float32([3.0]), np.array([3.25]), np.array([1.0])).histogram
    Counter({'0.2': 1})
    """
    actual = np.asarray(actual)
    if actual.shape != exact.shape:
        raise DisagreementError(f"the subject returned shape {actual.shape}, the claim needs {exact.shape}")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(actual.astype(np.float64) - exact)
        ratio = np.where(error == 0, 0.0, error / bound)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    if (ratio > 1).any():
        tail = f" by more than the bound ({ratio.max():.3g} times it at most)"
        raise _complain(ratio == ratio.max(), actual, exact, inputs, None, tail)
    steps, counts = np.unique(np.floor(ratio * 10) / 10, return_counts=True)
    index = int(np.argmax(ratio)) if ratio.size else -1
    worst = None
    if ratio.size and ratio.reshape(-1)[index] > 0:
        place = _input_at(inputs, index, actual.shape)
        flat = actual.reshape(-1)[index], exact.reshape(-1)[index]
        worst = Worst(float(ratio.max()), place, shown(flat[0]), shown(flat[1]))
    names = {f"{step:.1f}": int(count) for step, count in zip(steps, counts, strict=True)}
    return Tally(int(actual.size), Counter(names), worst)
