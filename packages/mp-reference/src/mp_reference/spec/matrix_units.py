"""Matrix units of accelerators: what one block of one instruction computes, one row each, bit for bit.

NVIDIA's units align every product and the accumulator to the largest exponent among them, cut each to a number of
bits below it, add exactly and round once. AMD's differ from generation to generation. Where published models disagree
and no recording decides, the question is a field.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mp_reference.spec import sources
from mp_reference.spec.formats import FORMATS, FloatFormat

__all__ = ["ARCHITECTURES", "ROWS", "MatrixUnit"]

Arithmetic = Literal["aligned", "two-stage", "pairwise", "exact", "fma"]
Addend = Literal["early", "late"]
ZeroProducts = Literal["excluded", "minimum-exponent"]
SecondCut = Literal["toward-negative", "toward-zero"]
_WORDS: dict[str, tuple[str, ...]] = {
    "arithmetic": get_args(Arithmetic), "addend": get_args(Addend), "zero_products": get_args(ZeroProducts),
    "second_cut": get_args(SecondCut), "rounding": ("toward-zero", "nearest-even"), "result": ("fp32", "fp16"),
}  # fmt: skip
_EXACT_BITS = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUnit:
    """One row: the dot product that a unit computes at once, and how instructions reach it.

    ``aligned``: terms cut toward zero to ``fraction_bits`` below the largest exponent, added exactly, rounded once.
    ``two-stage``: products so, then their sum (31 bits) and the addend (``fraction_bits``) cut at the larger exponent,
    rounded once; ``even_odd`` adds even and odd products apart first. ``pairwise``: fp32 products and a
    tree of fp32 sums, subnormal inputs and results flushed to zero. ``exact``: one rounding. ``fma``: a chain.
    """

    architecture: str
    family: str  # instruction family: "mma", "wgmma", "tcgen05", "mfma"
    inputs: tuple[str, ...]  # formats that either factor may have
    result: str  # format of addend and result
    arithmetic: Arithmetic
    block: int  # products added at once
    fraction_bits: int = 0  # kept below the largest exponent
    addend: Addend = "early"  # takes part in the alignment; "late": added once an instruction, to nearest even
    rounding: str = "toward-zero"  # of the block's sum; past the largest number toward-zero too gives infinity
    result_bits: int = 23  # stored fraction bits of the block's result
    span: int = 0  # products an instruction adds before a late addend
    quads: bool = False  # of every four products the first two go to the first block of an instruction
    even_odd: bool = False
    second_cut: SecondCut = "toward-negative"  # of two-stage rows; models disagree
    zero_products: ZeroProducts = "excluded"  # whether 0 * b claims an exponent (-126 + b's) in the alignment
    exponent_floor: int | None = None  # least exponent of alignment; no recording decides
    scale: str = ""  # format of block scales: "float8_e8m0fnu" or "float8_e4m3fn"
    scale_block: int = 0  # elements that share a scale
    group: int = 1  # products added exactly before scales and alignment
    shapes: tuple[str, ...] = ()  # of the instructions, "N" standing for any multiple of 8 up to 256
    types: tuple[str, ...] = ()  # AMD's input names where they differ from the formats
    preferred: bool = True  # whether the architecture's name alone may choose this row
    witness: str = field(default="published model", compare=False)
    source: str = field(default=sources.KHATTAK, compare=False)

    def __post_init__(self) -> None:
        """Refuse words that mean nothing and numbers that the arithmetic cannot hold exactly."""
        for name, offered in _WORDS.items():
            if getattr(self, name) not in offered:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, offered))}")
        self._require_a_shape()
        stored = self.result_format.mantissa_bits
        if not stored >= self.result_bits >= (1 if self.result == "fp32" else stored):
            raise ValueError(f"result_bits={self.result_bits} does not fit {self.result}, which stores {stored}")
        if not (self.exponent_floor is None or isinstance(self.exponent_floor, int)):
            raise ValueError(f"exponent_floor={self.exponent_floor!r} must be an integer, or None for no floor")

    def _require_a_shape(self) -> None:
        """Whole powers of two that divide each other, and sums that float64 holds."""
        for name, at_least in (("block", 1), ("group", 1), ("fraction_bits", 0), ("span", 0)):
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= at_least):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number of at least {at_least}")
        for name in ("block", "group", "span"):
            if getattr(self, name).bit_count() > 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a power of two, as every unit's is")
        if self.block % self.group or self.span % self.block:
            raise ValueError(
                f"block={self.block} must be a multiple of group={self.group} and divide span={self.span}; change them "
                "together"
            )
        if self.fraction_bits + (self.block + 1).bit_length() + 2 > _EXACT_BITS:
            raise ValueError(
                f"fraction_bits={self.fraction_bits} and block={self.block} make sums of more than {_EXACT_BITS} bits, "
                "which are not exact here; for exact sums use accumulator='exact'"
            )

    @property
    def result_format(self) -> FloatFormat:
        """The row of ``result``."""
        return FORMATS[self.result]


def _nvidia(
    architecture: str, family: str, inputs: tuple[str, ...], block: int, bits: int, **fields: Any
) -> MatrixUnit:
    """A row of the aligned kind with NVIDIA's usual result."""
    return MatrixUnit(
        architecture=architecture, family=family, inputs=inputs, block=block, fraction_bits=bits,
        **{"result": "fp32", "arithmetic": "aligned"} | fields,
    )  # fmt: skip


def _with_fp16(row: MatrixUnit, floor: int | None) -> tuple[MatrixUnit, MatrixUnit]:
    """The row and its twin with fp16 addend and result, which round to nearest even."""
    return row, replace(row, result="fp16", rounding="nearest-even", result_bits=10, exponent_floor=floor)


_FP8 = ("float8_e4m3fn", "float8_e5m2")
_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
_FP4 = ("float4_e2m1fn",)
_NARROW = (*_FP8, "float6_e2m3fn", "float6_e3m2fn", *_FP4)
_MMA_16 = ("m16n8k8", "m16n8k16")
_MMA_TF32 = ("m16n8k4", "m16n8k8")
_MMA_8 = ("m16n8k16", "m16n8k32")
_RECORDED = "recordings of "


def _mma(architecture: str, block: int, bits: int, floors: tuple[int, int], witness: str) -> tuple[MatrixUnit, ...]:
    """The mma.sync rows that Ampere brought and later architectures keep."""
    floor, floor16 = floors
    common: dict[str, Any] = {"exponent_floor": floor, "witness": witness}
    return (
        *_with_fp16(_nvidia(architecture, "mma", ("fp16",), block, bits, shapes=_MMA_16, **common), floor16),
        _nvidia(architecture, "mma", ("bf16",), block, bits, shapes=_MMA_16, **common),
        _nvidia(architecture, "mma", ("tf32",), block // 2, bits, shapes=_MMA_TF32, **common),
    )


def _fp16_unit(architecture: str, witness: str, floors: tuple[int, int]) -> tuple[MatrixUnit, MatrixUnit]:
    """FP8 mma.sync where it is compiled to two fp16 instructions and an addition."""
    return _with_fp16(
        _nvidia(
            architecture, "mma", _FP8, 16, 25, shapes=_MMA_8, addend="late", span=32, quads=True, preferred=False,
            exponent_floor=floors[0], witness=witness,
        ),
        floors[1],
    )  # fmt: skip


_HOPPER_WITNESS = _RECORDED + "H100 and H200 (fp32 results with addend 0), " + sources.MMAEMU
_LATER_FLOORS = (-133, -21)
_VOLTA = _with_fp16(
    _nvidia("volta", "mma", ("fp16",), 4, 23, shapes=("m8n8k4",), witness=_RECORDED + "V100"), -19
)  # fmt: skip
_TURING = _with_fp16(
    _nvidia("turing", "mma", ("fp16",), 8, 24, shapes=("m16n8k8",), exponent_floor=-132, source=sources.MMA_SIM), -20
)
_AMPERE = _mma("ampere", 8, 24, (-132, -20), _RECORDED + "A100 and A2")
_ADA = (
    *_mma("ada", 8, 24, (-132, -20), _RECORDED + "Ada and L40S"),
    *_with_fp16(
        _nvidia("ada", "mma", _FP8, 16, 13, result_bits=13, shapes=_MMA_8, exponent_floor=-132,
                witness=_RECORDED + "Ada and L40S, " + sources.MMAEMU), -20,
    ),
)  # fmt: skip


def _warpgroup(family: str, architecture: str, inputs: tuple[str, ...], shape: str, block: int) -> MatrixUnit:
    """A row of the asynchronous units, 25 fraction bits; the same unit as mma.sync's of that architecture."""
    return _nvidia(architecture, family, inputs, block, 25, shapes=(shape,), exponent_floor=_LATER_FLOORS[0])


_HOPPER = (
    *_mma("hopper", 16, 25, _LATER_FLOORS, _RECORDED + "H100 and H200"),
    *_with_fp16(_warpgroup("wgmma", "hopper", ("fp16",), "m64nNk16", 16), _LATER_FLOORS[1]),
    _warpgroup("wgmma", "hopper", ("bf16",), "m64nNk16", 16),
    _warpgroup("wgmma", "hopper", ("tf32",), "m64nNk8", 8),
    *_with_fp16(
        _nvidia("hopper", "wgmma", _FP8, 32, 13, result_bits=13, shapes=("m64nNk32",), exponent_floor=-132,
                witness=_HOPPER_WITNESS), -20,
    ),
    *_fp16_unit("hopper", _RECORDED + "H100 and H200 for fp16 results", _LATER_FLOORS),
)  # fmt: skip


def _scaled(architecture: str, family: str, shape8: str, shape4: str) -> tuple[MatrixUnit, ...]:
    """The block-scaled rows of Blackwell."""
    common: dict[str, Any] = {"source": sources.MMA_SIM}
    mx = _nvidia(
        architecture, family, _NARROW, 32, 25, shapes=(shape8,), scale="float8_e8m0fnu", scale_block=32, **common
    )
    fp4 = _nvidia(architecture, family, _FP4, 64, 35, shapes=(shape4,), group=16, **common)
    return (
        replace(fp4, scale="float8_e8m0fnu", scale_block=32),
        replace(fp4, scale="float8_e8m0fnu", scale_block=16),
        replace(fp4, scale="float8_e4m3fn", scale_block=16),
        mx,
    )


_BLACKWELL = (
    *_mma("blackwell", 16, 25, _LATER_FLOORS, _RECORDED + "B200"),
    *_with_fp16(_warpgroup("tcgen05", "blackwell", ("fp16",), "mMnNk16", 16), _LATER_FLOORS[1]),
    _warpgroup("tcgen05", "blackwell", ("bf16",), "mMnNk16", 16),
    _warpgroup("tcgen05", "blackwell", ("tf32",), "mMnNk8", 8),
    *_with_fp16(
        _nvidia("blackwell", "tcgen05", _NARROW, 32, 25, shapes=("mMnNk32",), exponent_floor=-133,
                source=sources.MMA_SIM), -21,
    ),
    *_fp16_unit("blackwell", _RECORDED + "B200", _LATER_FLOORS),
    *_scaled("blackwell", "tcgen05", "mMnNk32", "mMnNk64"),
)  # fmt: skip
_BLACKWELL_RTX = (
    *_mma("blackwell-rtx", 16, 25, _LATER_FLOORS, "published model"),
    *_with_fp16(
        _nvidia("blackwell-rtx", "mma", _NARROW, 32, 25, shapes=_MMA_8, exponent_floor=-133, source=sources.MMA_SIM),
        -21,
    ),
    *_scaled("blackwell-rtx", "mma", "m16n8k32", "m16n8k64"),
)


def _amd(architecture: str, inputs: tuple[str, ...], arithmetic: Arithmetic, block: int, **fields: Any) -> MatrixUnit:
    """A row of AMD's matrix cores: fp32 result, to nearest even."""
    return MatrixUnit(
        architecture=architecture, family="mfma", inputs=inputs, result="fp32", arithmetic=arithmetic, block=block,
        rounding="nearest-even", **{"source": sources.MMA_SIM} | fields,
    )  # fmt: skip


_MFMA_F32 = ("32x32x2", "32x32x1", "16x16x4", "16x16x1", "4x4x1")
_MFMA_16 = ("32x32x8", "32x32x4", "16x16x16", "16x16x4", "4x4x4")
_MFMA_BF16 = ("32x32x4", "32x32x2", "16x16x8", "16x16x2", "4x4x2")
_CDNA1 = (
    _amd("cdna1", ("fp32",), "fma", 1, shapes=_MFMA_F32, types=("f32",)),
    _amd("cdna1", ("fp16",), "exact", 4, shapes=_MFMA_16, types=("f16",), source=sources.KHATTAK),
    _amd("cdna1", ("bf16",), "exact", 2, shapes=_MFMA_BF16, types=("bf16",), source=sources.KHATTAK),
)
_CDNA2 = (
    _amd("cdna2", ("fp32",), "fma", 1, shapes=_MFMA_F32, types=("f32",)),
    _amd("cdna2", ("fp16",), "pairwise", 4, shapes=_MFMA_16, types=("f16",)),
    _amd("cdna2", ("bf16",), "pairwise", 4, shapes=_MFMA_16, types=("bf16_1k",)),
    _amd("cdna2", ("bf16",), "pairwise", 2, shapes=_MFMA_BF16, types=("bf16",), preferred=False),
)
_TWO_STAGE: dict[str, Any] = {"fraction_bits": 24, "addend": "late", "exponent_floor": -126}
_CDNA3 = (
    _amd("cdna3", ("fp32",), "fma", 1, shapes=_MFMA_F32, types=("f32",)),
    _amd("cdna3", ("tf32",), "two-stage", 4, shapes=("16x16x8", "32x32x4"), types=("xf32",), **_TWO_STAGE),
    _amd("cdna3", ("fp16",), "two-stage", 8, shapes=_MFMA_16, types=("f16",), **_TWO_STAGE),
    _amd("cdna3", ("bf16",), "two-stage", 8, shapes=_MFMA_16, types=("bf16",), **_TWO_STAGE),
    _amd("cdna3", _FNUZ, "two-stage", 16, even_odd=True, shapes=("16x16x32", "32x32x16"), types=("fp8", "bf8"),
         **_TWO_STAGE),
)  # fmt: skip

ROWS: tuple[MatrixUnit, ...] = (
    *_VOLTA, *_TURING, *_AMPERE, *_ADA, *_HOPPER, *_BLACKWELL, *_BLACKWELL_RTX, *_CDNA1, *_CDNA2, *_CDNA3,
)  # fmt: skip
"""Every unit, oldest architecture first; where two rows fit, the first one is meant."""

ARCHITECTURES: tuple[str, ...] = tuple(dict.fromkeys(row.architecture for row in ROWS))
"""Names that ``tensor_core`` takes."""
