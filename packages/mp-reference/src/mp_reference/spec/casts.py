"""What the casts of NumPy, ml_dtypes, torch and an Ascend in saturation mode do, where the format leaves it open.

A format says which numbers there are; a producer decides what becomes of infinity, of overflow, of NaN, and of inputs
wider than float32. ``numerics.casting.cast_as`` computes what a row says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mp_reference.spec import sources

__all__ = ["CASTS", "PRODUCERS", "CastRule", "cast_rule"]

PRODUCERS = ("numpy", "ml_dtypes", "torch-cpu", "ascend-saturation")


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRule:
    """How one producer casts to one format; rounding is to nearest, ties to even, in all of them.

    Args:
        producer: one of ``PRODUCERS``.
        target: the format's name.
        wide: float64 and 32- or 64-bit integers go ``direct`` (one rounding) or ``through-fp32`` (two roundings).
        overflow: ``ieee`` (infinity, NaN where the format has none) or ``saturate`` (the largest number), for finite
            numbers past the largest and for infinities alike.
        nan: what NaN becomes: ``nan`` (which one is the next field), ``zero``, or ``zero-opposite-sign``.
        nan_code: which NaN: ``sign-kept``, ``payload-kept``, ``varies`` (scalar and vector code differ), ``only``
            (the format has one), or ``none``.
        unsigned: for the format without sign: negatives and zero become ``nan``, or their ``magnitude`` is cast; zero
            is then the smallest number. ``none`` for all other formats.
        below_normal: ``exact`` or, for the unsigned format, ``up``: float32 subnormals above 2**-127 become 2**-126,
            though many are nearer to 2**-127.
        source: where this was read or measured.

    Source: the row's own ``source`` field.

    >>> cast_rule("torch-cpu", "float8_e4m3fn").overflow
    'saturate'
    """

    producer: str
    target: str
    wide: Literal["direct", "through-fp32"] = "through-fp32"
    overflow: Literal["ieee", "saturate"] = "ieee"
    nan: Literal["nan", "zero", "zero-opposite-sign"] = "nan"
    nan_code: Literal["sign-kept", "payload-kept", "varies", "only", "none"] = "sign-kept"
    unsigned: Literal["none", "nan", "magnitude"] = "none"
    below_normal: Literal["exact", "up"] = "exact"
    source: str


def _rows() -> tuple[CastRule, ...]:
    numpy, ml_dtypes, torch = sources.NUMPY_CASTS, sources.ML_DTYPES_CASTS, sources.TORCH_CPU_CASTS
    rows = [
        CastRule(producer="numpy", target="fp32", wide="direct", nan_code="payload-kept", source=numpy),
        CastRule(producer="numpy", target="fp16", wide="direct", nan_code="payload-kept", source=numpy),
        CastRule(producer="ml_dtypes", target="bf16", source=ml_dtypes),
        CastRule(producer="ml_dtypes", target="float8_e4m3fn", source=ml_dtypes),
        CastRule(producer="ml_dtypes", target="float8_e5m2", source=ml_dtypes),
        CastRule(producer="ml_dtypes", target="float8_e4m3fnuz", nan_code="only", source=ml_dtypes),
        CastRule(producer="ml_dtypes", target="float8_e5m2fnuz", nan_code="only", source=ml_dtypes),
        CastRule(
            producer="ml_dtypes", target="float8_e8m0fnu", nan_code="only", unsigned="nan", below_normal="up",
            source=ml_dtypes,
        ),
    ]  # fmt: skip
    rows += [
        CastRule(
            producer="ml_dtypes", target=name, overflow="saturate", nan="zero-opposite-sign", nan_code="none",
            source=ml_dtypes,
        )
        for name in ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
    ]  # fmt: skip
    rows += [
        CastRule(producer="torch-cpu", target="fp32", wide="direct", nan_code="payload-kept", source=torch),
        CastRule(producer="torch-cpu", target="fp16", nan_code="varies", source=torch),
        CastRule(producer="torch-cpu", target="bf16", nan_code="varies", source=torch),
        CastRule(producer="torch-cpu", target="float8_e4m3fn", overflow="saturate", source=torch),
        CastRule(producer="torch-cpu", target="float8_e5m2", nan_code="varies", source=torch),
        CastRule(producer="torch-cpu", target="float8_e4m3fnuz", nan_code="only", source=torch),
        CastRule(producer="torch-cpu", target="float8_e5m2fnuz", nan_code="only", source=torch),
        CastRule(
            producer="torch-cpu", target="float8_e8m0fnu", nan_code="only", unsigned="magnitude", below_normal="up",
            source=torch,
        ),
        CastRule(
            producer="ascend-saturation", target="fp16", wide="direct", overflow="saturate", nan="zero",
            nan_code="none", source=sources.ASCEND_SATURATION,
        ),
    ]  # fmt: skip
    return tuple(rows)


CASTS: tuple[CastRule, ...] = _rows()
"""Every row."""


def cast_rule(producer: str, target: str) -> CastRule:
    """Look a row up.

    Args:
        producer: one of ``PRODUCERS``.
        target: a format's name.

    Returns:
        The row.

    Raises:
        ValueError: there is none; the message lists the targets that the producer has.

    Source: the rows.

    >>> cast_rule("ml_dtypes", "bf16").wide
    'through-fp32'
    """
    for row in CASTS:
        if (row.producer, row.target) == (producer, target):
            return row
    known = [row.target for row in CASTS if row.producer == producer]
    raise ValueError(
        f"no cast of producer {producer!r} to {target!r} is recorded; "
        + (f"{producer} has rows for {', '.join(known)}" if known else f"producers are {', '.join(PRODUCERS)}")
    )
