"""Seeded faults of rounding, casts and arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import mp_reference as mp
from mp_conformance.implementations.reference import ReferenceSubject
from mp_conformance.mutants.rows import Mutant
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_reference.spec.formats import FloatFormat

__all__ = ["MUTANTS"]

Array = np.ndarray[Any, np.dtype[Any]]

_HONEST = ReferenceSubject()


def _grid(x: Array, fmt: FloatFormat, bits: int = 0, lift: int = 0) -> tuple[Array, Array]:
    """``x`` in steps of the format's grid, and the step; ``bits`` more of them, the subnormals ``lift`` binades up."""
    wide = np.asarray(x, np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(wide), wide, 1.0))
    step = np.maximum(exponent - 1, fmt.min_exponent + lift) - fmt.mantissa_bits - bits
    return np.ldexp(wide, -step), step


def _finish(steps: Array, step: Array, x: Array, fmt: FloatFormat) -> Array:
    """Steps back to values, the format's overflow, and its dtype."""
    value = np.ldexp(steps, step)
    value = np.where(np.abs(value) > fmt.max, np.copysign(np.inf if fmt.has_inf else np.nan, value), value)
    return _stored(np.where(np.isfinite(x), np.copysign(value, x), x), fmt)


def _stored(value: Array, fmt: FloatFormat) -> Array:
    return np.asarray(mp.cast(np.asarray(value, np.float64), fmt)).reshape(np.shape(value))


def _rounding_with(rule: Callable[[Array], Array], bits: int = 0, lift: int = 0) -> Callable[..., Any]:
    def fault(x: Array, to: str, **options: Any) -> Array:
        del options
        fmt = FORMATS[to]
        steps, step = _grid(x, fmt, bits, lift)
        return _finish(rule(steps), step, np.asarray(x, np.float64), fmt)

    return fault


def _changed(change: Callable[[Array, Array, FloatFormat], Array]) -> Callable[..., Any]:
    """The right cast, then a change that sees the input and the result."""

    def fault(x: Array, to: str, **options: Any) -> Array:
        return change(x, _HONEST.perform("cast", x, to=to, **options), FORMATS[to])

    return fault


def _as_other_mode(mode: str) -> Callable[..., Any]:
    def fault(x: Array, to: str, rounding: str = "nearest-even", **options: Any) -> Array:
        del rounding
        return np.asarray(_HONEST.perform("cast", x, to=to, rounding=mode, **options))

    return fault


def _prepared(prepare: Callable[[Array, FloatFormat], Array]) -> Callable[..., Any]:
    """The right cast of a changed input."""

    def fault(x: Array, to: str, **options: Any) -> Array:
        options["source"] = "float64"
        return np.asarray(_HONEST.perform("cast", prepare(x, FORMATS[to]), to=to, **options))

    return fault


def _put(result: Array, where: Array, value: float) -> Array:
    return np.asarray(np.where(where, np.asarray(value).astype(result.dtype), result).astype(result.dtype))


def _twice_below(x: Array, fmt: FloatFormat) -> Array:
    """Round to the precision first, as if there were no subnormals, then again."""
    unbounded, step = _grid(x, mp.FloatFormat("wide", exponent_bits=8, mantissa_bits=fmt.mantissa_bits))
    return np.where(np.isfinite(x), np.ldexp(np.rint(unbounded), step), x)


def _half_away(steps: Array) -> Array:
    return np.asarray(np.trunc(steps + np.copysign(0.5, steps)))


def _no_saturation_of_infinity(x: Array, to: str, overflow: str = "ieee", **options: Any) -> Array:
    saturated = _HONEST.perform("cast", x, to=to, overflow=overflow, **options)
    plain = _HONEST.perform("cast", x, to=to, **options)
    return np.asarray(np.where(np.isinf(x), plain, saturated).astype(saturated.dtype))


def _ignores(name: str) -> Callable[..., Any]:
    def fault(x: Array, to: str, **options: Any) -> Array:
        options.pop(name, None)
        return np.asarray(_HONEST.perform("cast", x, to=to, **options))

    return fault


def _flushes_too_much(x: Array, to: str, subnormals: bool = True, **options: Any) -> Array:
    result = _HONEST.perform("cast", x, to=to, subnormals=subnormals, **options)
    return _put(result, np.abs(result.astype(np.float64)) <= FORMATS[to].min_normal, 0.0)


def _cast(id: str, sentence: str, fault: Callable[..., Any], caught_by: str) -> Mutant:  # noqa: A002
    return Mutant(id=f"cast.{id}", sentence=sentence, operation="cast", fault=fault, caught_by=caught_by)


def _arithmetic(operation: str, sentence: str, fault: Callable[..., Any], caught_by: str = "") -> Mutant:
    word = sentence.split()[0]
    claim = caught_by or f"arithmetic.{operation}.fp16"
    return Mutant(id=f"{operation}.{word}", sentence=sentence, operation=operation, fault=fault, caught_by=claim)


def _f32(x: Array) -> Array:
    return x.astype(np.float32)


def _unfused(a: Array, b: Array, c: Array, **options: Any) -> Array:
    return np.asarray(mp.add(mp.mul(a, b, **options), c, **options))


def _truncating(operation: Any) -> Callable[..., Any]:
    def fault(*operands: Array, **options: Any) -> Array:
        del options
        fmt = FORMATS["fp16"] if operands[0].dtype == np.float16 else FORMATS["bf16"]
        exact = operation(*(x.astype(np.float64) for x in operands))
        steps, step = _grid(exact, fmt)
        return _finish(np.trunc(steps), step, exact, fmt)

    return fault


MUTANTS: tuple[Mutant, ...] = (
    _cast("ties-away", "ties go away from zero", _rounding_with(_half_away), "cast.float32.fp16"),
    _cast("ties-up", "ties go up", _rounding_with(lambda s: np.floor(s + 0.5)), "cast.float32.bf16"),
    _cast("ties-down", "ties go toward zero", _rounding_with(lambda s: np.sign(s) * np.ceil(np.abs(s) - 0.5)),
          "cast.float64.fp16"),
    _cast("truncates", "the rest is cut off", _rounding_with(np.trunc), "cast.float32.float8_e4m3fn"),
    _cast("rounds-up", "every rest rounds away", _rounding_with(lambda s: np.copysign(np.ceil(np.abs(s)), s)),
          "cast.float32.fp16"),
    _cast("one-bit-more", "one bit too many is kept and rounded again", _prepared(
        lambda x, fmt: np.where(np.isfinite(x), np.ldexp(np.rint(_grid(x, fmt, 1)[0]), _grid(x, fmt, 1)[1]), x)),
        "cast.float64.bf16"),
    _cast("one-bit-less", "one bit too few is kept", _rounding_with(np.rint, bits=-1), "cast.float32.bf16"),
    _cast("via-float32", "float64 takes a detour through float32", _prepared(
        lambda x, fmt: np.asarray(x).astype(np.float32).astype(np.float64)), "cast.float64.bf16"),
    _cast("int-via-float32", "integers take a detour through float32", _prepared(
        lambda x, fmt: np.asarray(x).astype(np.float32).astype(np.float64)), "cast.int64.bf16"),
    _cast("flushes", "subnormal results become zero", _changed(
        lambda x, r, fmt: _put(r, np.abs(r.astype(np.float64)) < fmt.min_normal, 0.0)), "cast.float32.fp16"),
    _cast("early-subnormals", "the subnormal range begins one binade early", _rounding_with(np.rint, lift=1),
          "cast.float32.fp16"),
    _cast("subnormals-twice", "subnormals are rounded twice", _prepared(_twice_below), "cast.float64.float8_e5m2"),
    _cast("overflow-saturates", "overflow gives the largest number", _changed(
        lambda x, r, fmt: np.where(np.isfinite(x) & ~np.isfinite(r.astype(np.float64)), np.copysign(fmt.max, x),
                                   r.astype(np.float64)).astype(r.dtype)), "cast.float32.fp16"),
    _cast("overflow-early", "everything above the largest number overflows at once", _changed(
        lambda x, r, fmt: np.where(np.abs(x) > fmt.max, np.copysign(np.inf, x), r.astype(np.float64)).astype(r.dtype)),
        "cast.float64.fp16"),
    _cast("overflow-late", "the tie above the largest number stays finite", _changed(
        lambda x, r, fmt: _put(r, x == fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1), fmt.max)),
        "cast.float32.fp16"),
    _cast("infinity-lost", "infinity becomes the largest number", _changed(
        lambda x, r, fmt: _put(r, x == np.inf, fmt.max)), "cast.float32.bf16"),
    _cast("nan-lost", "NaN becomes infinity", _changed(lambda x, r, fmt: _put(r, np.isnan(x), np.inf)),
          "cast.float32.fp16"),
    _cast("nan-to-zero", "NaN becomes zero", _changed(lambda x, r, fmt: _put(r, np.isnan(x), 0.0)),
          "cast.fp16-to.bf16"),
    _cast("zero-sign-lost", "negative zero loses its sign", _changed(lambda x, r, fmt: _put(r, r == 0, 0.0)),
          "cast.float32.fp16"),
    _cast("fn-top-code", "the largest number of float8_e4m3fn is 240, as with infinities", _changed(
        lambda x, r, fmt: _put(r, np.abs(x) > 248, np.nan)), "cast.float32.float8_e4m3fn"),
    _cast("e8m0-floor", "a scale takes the next lower power of two", _changed(
        lambda x, r, fmt: np.where(np.isfinite(x) & (x > 0), np.ldexp(0.5, np.frexp(np.maximum(x, 2.0**-127))[1]),
                                   np.nan).astype(r.dtype)), "cast.float64.float8_e8m0fnu"),
    _cast("away-is-even", "nearest-away rounds ties to even", _as_other_mode("nearest-even"),
          "rounding.nearest-away.fp16"),
    _cast("up-is-away", "toward-positive rounds negative numbers away from zero", lambda x, to, **o: np.where(
        np.asarray(x) < 0, _HONEST.perform("cast", x, to=to, rounding="toward-negative"),
        _HONEST.perform("cast", x, to=to, rounding="toward-positive")).astype(FORMATS[to].dtype),
        "rounding.toward-positive.bf16"),
    _cast("down-is-zero", "toward-negative cuts off", _as_other_mode("toward-zero"), "rounding.toward-negative.fp16"),
    _cast("odd-is-zero", "to-odd forgets the sticky bit", _as_other_mode("toward-zero"), "rounding.to-odd.bf16"),
    _cast("zero-overflows", "toward-zero overflows to infinity", _changed(
        lambda x, r, fmt: np.where(np.abs(x) >= 2 * fmt.max, np.copysign(np.inf, x), r.astype(np.float64))
        .astype(r.dtype)), "rounding.toward-zero.fp16"),
    _cast("saturation-ignored", "overflow='saturate' is ignored", _ignores("overflow"),
          "rounding.saturate.float8_e5m2"),
    _cast("infinity-not-saturated", "saturation leaves infinities alone", _no_saturation_of_infinity,
          "rounding.saturate.fp16"),
    _cast("flush-ignored", "subnormals=False is ignored", _ignores("subnormals"), "rounding.flush.fp16"),
    _cast("flush-too-much", "the smallest normal number is flushed too", _flushes_too_much, "rounding.flush.bf16"),
    _arithmetic("add", "truncates the exact sum", _truncating(np.add)),
    _arithmetic("add", "zeroes have the wrong sign: x + -x is -0", lambda a, b, **o: np.where(
        (a == -b) & (a != 0), np.array(-0.0, a.dtype), mp.add(a, b, **o)).astype(a.dtype)),
    _arithmetic("sub", "swaps the operands", lambda a, b, **o: mp.sub(b, a, **o), "arithmetic.sub.bf16"),
    _arithmetic("mul", "flushes subnormal products", lambda a, b, **o: _put(
        mp.mul(a, b, **o), np.abs(_f32(mp.mul(a, b, **o))) < 2.0**-14, 0.0)),
    _arithmetic("mul", "truncates the exact product", _truncating(np.multiply), "arithmetic.mul.bf16"),
    _arithmetic("div", "multiplies by the rounded reciprocal", lambda a, b, **o: mp.mul(
        a, mp.div(np.ones_like(b), b, **o), **o)),
    _arithmetic("div", "gives NaN where a number is divided by zero", lambda a, b, **o: _put(
        mp.div(a, b, **o), np.asarray(b == 0), np.nan), "arithmetic.div.fp32"),
    _arithmetic("sqrt", "truncates the exact root", _truncating(np.sqrt), "arithmetic.sqrt.fp16"),
    _arithmetic("sqrt", "loses the sign of zero", lambda a, **o: _put(mp.sqrt(a, **o), np.asarray(a == 0), 0.0),
                "arithmetic.sqrt.bf16"),
    _arithmetic("fma", "rounds the product first", _unfused),
    _arithmetic("fma", "goes through float32", lambda a, b, c, **o: (
        _f32(a) * _f32(b) + _f32(c)).astype(a.dtype) if a.dtype != np.float32 else mp.fma(a, b, c, **o)),
    _arithmetic("add", "ignores the rounding asked for", lambda a, b, **o: mp.add(a, b),
                "arithmetic.add.toward-positive.fp16"),
)  # fmt: skip
"""Faults below one operation."""
