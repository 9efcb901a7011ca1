"""Matrix units of accelerators: what one block of one instruction computes, one row each, bit for bit.

NVIDIA's units align every product and the accumulator to the largest exponent among them, cut each to a number of
bits below it, add exactly and round once. AMD's differ from generation to generation. Where published models disagree
and no recording decides, the question is a field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

from mp_reference.spec import sources
from mp_reference.spec.accumulators import Accumulator
from mp_reference.spec.formats import FORMATS, FloatFormat

__all__ = ["ARCHITECTURES", "ROWS", "MatrixUnit", "TensorCore", "tensor_core"]

Arithmetic = Literal["aligned", "two-stage", "pairwise", "exact", "fma"]
Addend = Literal["early", "late"]
ZeroProducts = Literal["excluded", "minimum-exponent"]


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
    second_cut: Literal["toward-negative", "toward-zero"] = "toward-negative"  # of two-stage rows; models disagree
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

_ALIASES = {
    "v100": "volta", "sm70": "volta", "t4": "turing", "sm75": "turing", "a100": "ampere", "a2": "ampere",
    "a30": "ampere", "sm80": "ampere", "sm86": "ampere", "l40s": "ada", "adalovelace": "ada", "sm89": "ada",
    "h100": "hopper", "h200": "hopper", "sm90": "hopper", "sm90a": "hopper", "b200": "blackwell", "sm100": "blackwell",
    "sm100a": "blackwell", "rtxblackwell": "blackwell-rtx", "sm120": "blackwell-rtx", "mi100": "cdna1",
    "gfx908": "cdna1", "mi210": "cdna2", "mi250": "cdna2", "gfx90a": "cdna2", "mi300": "cdna3", "mi300a": "cdna3",
    "mi300x": "cdna3", "gfx942": "cdna3",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCore(Accumulator):
    """The rows that a call may meet; the formats of the factors choose among them."""

    rows: tuple[MatrixUnit, ...]

    @property
    def result_format(self) -> FloatFormat:
        """Format of addend and result, the same for every row."""
        return self.rows[0].result_format

    def row_for(self, a: FloatFormat, b: FloatFormat, scale: str = "", scale_block: int = 0) -> MatrixUnit:
        """The row that multiplies these formats.

        Args:
            a: format of the first factor.
            b: format of the second factor.
            scale: name of the format of block scales, empty for none.
            scale_block: elements that share a scale.

        Returns:
            The first row that fits.

        Raises:
            ValueError: no row fits; the message lists what this unit multiplies.

        Source: the rows.

        >>> tensor_core("hopper").row_for(FORMATS["bf16"], FORMATS["bf16"]).block
        16
        """
        for row in self.rows:
            if {a.name, b.name} <= set(row.inputs) and (row.scale, row.scale_block) == (scale, scale_block):
                return row
        offered = sorted(
            {" or ".join(row.inputs) + (f" scaled by {row.scale}" if row.scale else "") for row in self.rows}
        )
        asked = f"{a.name} by {b.name}" + (f" with a {scale} scale for every {scale_block}" if scale else "")
        raise ValueError(
            f"{self.name} does not multiply {asked}; it multiplies {'; '.join(offered)}: cast the factors first, "
            "or choose another unit"
        )


def tensor_core(
    name: str, *, architecture: str | None = None, family: str | None = None, result: FloatFormat | str | None = None,
    **fields: Any,
) -> TensorCore:  # fmt: skip
    """Choose a matrix unit by architecture or by the vendor's instruction name.

    An architecture stands for its fastest instructions, K chained through the accumulator in order; an instruction
    name fixes formats and the K of one instruction.

    Args:
        name: "hopper", "h100", "sm_90", "gfx942", ...; or "m16n8k16.f32.f16.f16.f32", "m64n128k32.f32.e4m3.e4m3",
            "v_mfma_f32_16x16x16_f16", ...
        architecture: which architecture runs the instruction; the first that has it unless given.
        family: "mma", "wgmma", "tcgen05" or "mfma", where an architecture has several units for a format.
        result: fp32 (default) or fp16, as a format or by name: format of addend and result.
        fields: fields of ``MatrixUnit`` to replace in every row, such as ``zero_products="minimum-exponent"`` or
            ``exponent_floor=None``, where published models disagree.

    Returns:
        The accumulator.

    Raises:
        ValueError: nothing has this name; the message lists the architectures or the instructions.
        TypeError: ``fields`` holds a name that ``MatrixUnit`` does not have.

    Source: each row's ``source`` and ``witness``.

    >>> tensor_core("hopper").rows[0].block, tensor_core("m16n8k16.f32.f16.f16.f32").rows[0].architecture
    (16, 'ampere')
    """
    asked = result.name if isinstance(result, FloatFormat) else result
    known = [one.name for one in dataclass_fields(MatrixUnit)]
    if unknown := [field_name for field_name in fields if field_name not in known]:
        raise TypeError(f"tensor_core has no field {unknown[0]!r}; a row's fields are {', '.join(known)}")
    if re.search(r"\d+[xn]\d+[xk]\d+", name):
        rows = _instruction_rows(name, architecture)
    else:
        wanted = _architecture(name)
        rows = tuple(row for row in ROWS if row.architecture == wanted and (row.preferred or family))
        asked = asked or "fp32"
    rows = tuple(row for row in rows if family in (None, row.family) and asked in (None, row.result))
    if not rows:
        raise ValueError(
            f"tensor_core({name!r}) has no unit with family={family!r}, result={asked}; leave family out, and choose "
            "result=FP32, or FP16 where the unit has it"
        )
    words = [name] + [str(word) for word in (architecture, family) if word] + ["fp16"] * (asked == "fp16")
    rows = tuple(replace(row, **fields) for row in rows)
    return TensorCore(name=f"tensor_core({', '.join(words)})", source=rows[0].source, rows=rows)


def _architecture(name: str) -> str:
    wanted = name.lower()
    wanted = _ALIASES.get(wanted.replace("_", "").replace(" ", ""), wanted)
    if wanted not in ARCHITECTURES:
        raise ValueError(
            f"tensor core {name!r} is none of {', '.join(ARCHITECTURES)}, nor an instruction such as "
            "'m16n8k16.f32.f16.f16.f32' or 'v_mfma_f32_16x16x16_f16'"
        )
    return wanted


_NVIDIA_TYPES = {
    "f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e2m1": "float4_e2m1fn", "f32": "fp32",
}  # fmt: skip


def _instruction_rows(name: str, architecture: str | None) -> tuple[MatrixUnit, ...]:
    """The one row of an instruction, its block no longer than the instruction's own K."""
    wanted = None if architecture is None else _architecture(architecture)
    for row in ROWS:
        if wanted in (None, row.architecture) and not row.scale:
            inputs, k = _amd_match(row, name) if row.family == "mfma" else _nvidia_match(row, name)
            if k:
                return (replace(row, inputs=inputs, block=min(row.block, k), span=min(row.span, k)),)
    where = "any architecture" if wanted is None else wanted
    some = sorted(
        {f"{row.shapes[0]} ({row.family}, {row.architecture})" for row in ROWS if wanted in (None, row.architecture)}
    )
    raise ValueError(
        f"instruction {name!r} is not known for {where}; shapes are {', '.join(some)}, types are written as in "
        "'m16n8k16.f32.f16.f16.f32' and 'v_mfma_f32_16x16x16_f16'"
    )


def _nvidia_match(row: MatrixUnit, name: str) -> tuple[tuple[str, ...], int]:
    """Inputs and K if ``name`` is an instruction of this row: shape.d.a.b[.c], in PTX's order."""
    parts = [
        part for part in name.split(".") if part not in ("mma", "sync", "wgmma", "tcgen05", "aligned", "row", "col")
    ]
    shape = next((part for part in parts if re.fullmatch(r"m\d+n\d+k\d+", part)), "")
    types = parts[parts.index(shape) + 1 :] if shape else []
    if len(types) not in (3, 4) or not all(word in _NVIDIA_TYPES for word in types):
        return (), 0
    d, a, b, c = (_NVIDIA_TYPES[word] for word in (types if len(types) == 4 else [*types, types[0]]))
    fits = any(re.fullmatch(known.replace("N", r"\d+").replace("M", r"\d+"), shape) for known in row.shapes)
    volta = row.architecture == "volta" and c == "fp16"  # m8n8k4 alone widens an fp16 addend
    if not fits or d != row.result or not (c == d or volta) or not {a, b} <= set(row.inputs):
        return (), 0
    return tuple(dict.fromkeys((a, b))), int(shape.rpartition("k")[2])


def _amd_match(row: MatrixUnit, name: str) -> tuple[tuple[str, ...], int]:
    """Inputs and K if ``name`` is an instruction of this row: [v_mfma_]f32_MxNxK[_blocks][_]types."""
    found = re.fullmatch(r"(?:v_mfma_)?f32_(\d+x\d+x(\d+?))(?:_\d+b)?_?([a-z]\w*?)", name)
    if found is None or found[1] not in row.shapes:
        return (), 0
    if row.even_odd:  # fp8 rows name both factors
        words = found[3].split("_")
        return (row.inputs, int(found[2])) if len(words) == 2 and set(words) <= set(row.types) else ((), 0)
    return (row.inputs, int(found[2])) if found[3] in row.types else ((), 0)
