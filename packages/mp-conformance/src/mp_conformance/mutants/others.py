"""Seeded faults of op rules, stochastic rounding, reductions, elementary functions and facts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import mp_reference as mp
from mp_conformance.implementations import reference_training
from mp_conformance.implementations.reference import ReferenceSubject
from mp_conformance.mutants.rows import Mutant
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MUTANTS"]

Array = np.ndarray[Any, np.dtype[Any]]

_HONEST = ReferenceSubject()


def _rules_with(**changed: str) -> Callable[..., Any]:
    """The right table, some rules changed; "" takes a row out."""

    def fault(device: str, fmt: str) -> dict[str, str]:
        del fmt
        table = reference_training.rules(device) | {f"aten::{op.replace('__', '.')}": r for op, r in changed.items()}
        return {op: rule for op, rule in table.items() if rule}

    return fault


def _bits(x: Array, seed: int) -> Array:
    return np.asarray(np.random.Generator(np.random.PCG64(seed)).integers(0, 2**32, x.shape, np.uint32))


def _stochastic_with(bits: Callable[[Array, int], Array]) -> Callable[..., Any]:
    def fault(x: Array, to: str, seed: int) -> Array:
        fmt = FORMATS[to]
        return np.asarray(mp.cast(mp.round_to(x, fmt, rounding="stochastic", random_bits=bits(x, seed)), fmt))

    return fault


def _two_apart(x: Array, to: str, seed: int) -> Array:
    """Noise of a whole ulp to either side, then rounded: numbers of the format move too."""
    fmt = FORMATS[to]
    noise = (_bits(x, seed) / 2.0**32 - 0.5) * 2 * np.ldexp(1.0, np.frexp(np.where(np.isfinite(x), x, 1.0))[1] - 1)
    with np.errstate(all="ignore"):
        moved = x.astype(np.float64) + np.where(np.isfinite(x), noise * fmt.epsilon, 0.0)
    return np.asarray(mp.cast(mp.round_to(moved, fmt), fmt))


def _deterministic(x: Array, to: str, seed: int) -> Array:
    del seed
    return np.asarray(_HONEST.perform("cast", x, to=to))


_CALLS = [0]


def _unseeded(x: Array, to: str, seed: int) -> Array:
    _CALLS[0] += 1
    return np.asarray(_HONEST.perform("stochastic", x, to=to, seed=seed + _CALLS[0]))


def _wrong_facts(format: str) -> dict[str, float]:  # noqa: A002  # the operation's own option
    told: dict[str, float] = _HONEST.perform("facts", format=format)
    return told | {"min_subnormal": told["min_normal"]}


def _accumulates_low(a: Array, b: Array) -> Array:
    return np.asarray(mp.matmul(a, b, accumulator=mp.sequential(FORMATS["fp16"])))


def _sums_low(x: Array) -> Array:
    return np.asarray(mp.sum(x, accumulator=FORMATS["bf16"]))


def _drops_last(a: Array, b: Array) -> Array:
    return np.asarray(mp.matmul(a[:, :-1], b[:-1]))


def _unfused_product(a: Array, b: Array, accumulator: Any) -> Array:
    return np.asarray(mp.matmul(a, b, accumulator=replace(accumulator, fused=not accumulator.fused)))


def _fused_in_double(a: Array, b: Array, accumulator: Any) -> Array:
    """Sums in float64 and then a cast: two roundings where the accumulator lies below float64's last bit."""
    total = np.zeros((len(a), b.shape[1]))
    for k in range(a.shape[1]):
        total = mp.round_to(total + np.outer(a[:, k].astype(np.float64), b[k].astype(np.float64)), accumulator.format)
    return np.asarray(total.astype(accumulator.format.dtype))


def _exp_by_parts(x: Array, function: str, layout: str = "contiguous") -> Array:
    """Exp as the square of exp(x / 2), each rounded."""
    if function != "exp":
        return np.asarray(_HONEST.perform("elementary", x, function=function, layout=layout))
    half = _HONEST.perform("elementary", (x.astype(np.float32) / 2).astype(x.dtype), function="exp")
    return np.asarray(mp.mul(half, half))


def _row(id: str, sentence: str, operation: str, fault: Callable[..., Any], caught_by: str) -> Mutant:  # noqa: A002
    return Mutant(id=id, sentence=sentence, operation=operation, fault=fault, caught_by=caught_by)


def _rules(word: str, sentence: str, fault: Callable[..., Any], device: str = "cuda") -> Mutant:
    return _row(f"op-rules.{word}", sentence, "op_rules", fault, f"op-rules.{device}.fp16")


def _sr(word: str, sentence: str, fault: Callable[..., Any], claim: str) -> Mutant:
    return _row(f"stochastic.{word}", sentence, "stochastic", fault, f"stochastic.{claim}.bf16")


MUTANTS: tuple[Mutant, ...] = (
    _rules("softmax-low", "softmax runs in low precision", _rules_with(softmax__int="lower_precision_fp")),
    _rules("mm-fp32", "mm runs in fp32", _rules_with(mm="fp32")),
    _rules("no-exp", "exp has no rule", _rules_with(exp="")),
    _rules("banned-allowed", "binary_cross_entropy is not banned", _rules_with(binary_cross_entropy="fp32")),
    _rules("extra-relu", "relu has a rule", _rules_with(relu="fp32")),
    _rules("cpu-softmax", "the CPU has CUDA's rule for softmax", _rules_with(softmax__int="fp32_set_opt_dtype"), "cpu"),
    _sr("always-up", "every rest goes up", _stochastic_with(lambda x, seed: np.full(x.shape, 2**32 - 1, np.uint32)),
        "unbiased"),
    _sr("four-bits", "only four random bits are used", _stochastic_with(
        lambda x, seed: _bits(x, seed) >> np.uint32(28) << np.uint32(28)), "unbiased"),
    _sr("half", "up and down are equally likely", _stochastic_with(
        lambda x, seed: np.where(_bits(x, seed) & 1, np.uint32(2**32 - 1), np.uint32(0))), "unbiased"),
    _sr("nearest", "rounds to nearest", _deterministic, "unbiased"),
    _sr("noise", "adds noise and rounds, so that numbers of the format move", _two_apart, "neighbours"),
    _sr("unseeded", "every call draws other bits", _unseeded, "replicas"),
    _sr("one-seed", "the seed is ignored", _stochastic_with(lambda x, seed: _bits(x, 0)), "replicas"),
    _row("facts.no-subnormals", "the smallest number is the smallest normal one", "facts", _wrong_facts,
         "format.fp16.facts"),
    _row("matmul.low", "products are accumulated in fp16", "matmul", _accumulates_low, "matmul.bound.fp16"),
    _row("matmul.short", "the last term is dropped", "matmul", _drops_last, "matmul.order-free.bf16"),
    _row("matmul.fused", "fused steps are not, and others are", "emulated_matmul", _unfused_product,
         "matmul.sequential.fp16"),
    _row("matmul.fused-in-double", "fused steps are sums in float64, rounded again", "emulated_matmul",
         _fused_in_double, "matmul.sequential-fused.bf16"),
    _row("sum.low", "a sum is accumulated in bf16", "sum", _sums_low, "sum.bound.bf16"),
    _row("exp.squared", "exp is the square of a rounded exp", "elementary", _exp_by_parts, "elementary.exp.exact.fp16"),
)  # fmt: skip
"""Faults beside rounding, the loss scale and the step."""
