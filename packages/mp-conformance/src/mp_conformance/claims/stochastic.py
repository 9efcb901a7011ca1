"""Claims about stochastic rounding: neighbours only, unbiased with a stated error probability, equal on replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance import oracle, values
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Bound, DisagreementError, Tally, assert_same_bits
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CLAIMS"]

Array = np.ndarray[Any, np.dtype[Any]]

_DRAWS = 1 << 16
_RISK = 1e-9
"""The probability with which an unbiased rounding fails one comparison."""
_SLACK = math.sqrt(math.log(2 / _RISK) / (2 * _DRAWS))
_WHY = (
    f"Hoeffding: the mean of {_DRAWS} independent draws in [0, 1] is further than sqrt(ln(2/p) / 2n) = {_SLACK:.4f} "
    f"ulp from its expectation with probability below p = {_RISK}; random bits of finite width add at most 2**-16"
)


def _unbiased(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        for base in (1.0, -3.0, 2.0 ** (fmt.min_exponent + 1), fmt.min_subnormal * 3):
            step = _ulp(base, fmt)
            for fraction in (5 / 256, 0.25, 0.5, 0.8125):
                x = np.full(_DRAWS, math.copysign(abs(base) + fraction * step, base), np.float32)
                drawn = subject.perform("stochastic", x, to=fmt.name, seed=run.seed).astype(np.float64)
                ups = (np.abs(drawn) - abs(base)) / step
                if not np.isin(ups, (0.0, 1.0)).all():
                    raise DisagreementError(f"{x[0]!r} became {np.unique(drawn)}; only its two neighbours are allowed")
                if abs(ups.mean() - fraction) > _SLACK + 2.0**-16:
                    raise DisagreementError(
                        f"{x[0]!r} went up in {ups.mean():.5f} of {_DRAWS} draws, expected {fraction} +- {_SLACK:.5f}"
                    )
                run.record(Tally(_DRAWS))
        run.notes.append(f"false alarm with probability below {_RISK * 16:.0e} in all")

    return check


def _ulp(value: float, fmt: FloatFormat) -> float:
    return math.ldexp(1.0, max(math.frexp(value)[1] - 1, fmt.min_exponent) - fmt.mantissa_bits)


def _neighbours(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(x: Array) -> Tally:
            actual = subject.perform("stochastic", x, to=fmt.name, seed=run.drawn)
            low, high = (oracle.cast(x, fmt, mode) for mode in ("toward-negative", "toward-positive"))
            codes = [oracle.code_of(y) for y in (actual, low, high)]
            wide = x.astype(np.float64)
            allowed = (codes[0] == codes[1]) | (codes[0] == codes[2]) | np.isnan(wide)
            if not allowed.all():
                index = int(np.flatnonzero(~allowed)[0])
                raise DisagreementError(
                    f"{x[index]!r} became 0x{int(codes[0][index]):x}; its neighbours in {fmt.name} are "
                    f"0x{int(codes[1][index]):x} and 0x{int(codes[2][index]):x}"
                )
            return Tally(int(x.size))

        run.draw(values.floats_near(fmt, np.float32), one)

    return check


def _replicas(fmt: FloatFormat) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(x: Array) -> Tally:
            twice = [subject.perform("stochastic", x, to=fmt.name, seed=7) for _ in range(2)]
            return assert_same_bits(twice[1], twice[0], inputs=(x,))

        run.draw(values.floats_near(fmt, np.float32), one)
        x = np.full(4096, np.float32(1 + 0.5 * _ulp(1.0, fmt)))
        codes = [oracle.code_of(subject.perform("stochastic", x, to=fmt.name, seed=seed)) for seed in (7, 8)]
        if (codes[0] == codes[1]).all():
            raise DisagreementError("two seeds gave the same 4,096 roundings, so the seed is not used")

    return check


def _write_back(subject: Subject, run: Run) -> None:
    for fraction in (0.0625, 0.25, 0.5, 0.8125):
        drawn = subject.perform("write_back", fraction=fraction, seed=run.seed, count=_DRAWS)
        again = subject.perform("write_back", fraction=fraction, seed=run.seed, count=_DRAWS)
        run.record(assert_same_bits(again, drawn))
        ups = (drawn.astype(np.float64) - 1) * 2.0**7
        if not np.isin(ups, (0.0, 1.0)).all() or abs(ups.mean() - fraction) > _SLACK + 2.0**-16:
            raise DisagreementError(
                f"an update of {fraction} ulp moved {ups.mean():.5f} of {_DRAWS} parameters, to {np.unique(drawn)}; "
                f"expected {fraction} +- {_SLACK:.5f} of them, to the next number"
            )


def _row(kind: str, sentence: str, check: Check, fmt: FloatFormat, agreement: Bits | Bound) -> Claim:
    return Claim(
        id=f"stochastic.{kind}.{fmt.name}", sentence=sentence, agreement=agreement, operation="stochastic",
        source="Croci et al., Stochastic rounding: implementation, error analysis and applications (2022), "
        "https://doi.org/10.1098/rsos.211631",
        options={"to": fmt.name}, check=check, format=fmt.name,
    )  # fmt: skip


_FORMATS = tuple(FORMATS[name] for name in ("bf16", "fp16", "float8_e5m2", "float8_e4m3fn"))

CLAIMS: tuple[Claim, ...] = (*(
    row
    for fmt in _FORMATS
    for row in (
        _row("unbiased", f"stochastic rounding to {fmt.name} goes up as often as the discarded fraction says",
             _unbiased(fmt), fmt, Bound(_WHY)),
        _row("neighbours", f"stochastic rounding to {fmt.name} gives one of the two neighbours, and keeps what fits",
             _neighbours(fmt), fmt, Bits()),
        _row("replicas", f"with one seed, stochastic rounding to {fmt.name} gives every replica the same bits",
             _replicas(fmt), fmt, Bits()),
    )
), Claim(
    id="stochastic.write-back.bf16",
    sentence="in bf16-sr an update below an ulp moves as many parameters as its size says, the same on every replica",
    source="mp_torch.stochastic", agreement=Bound(_WHY), operation="write_back", check=_write_back, format="bf16",
))  # fmt: skip
