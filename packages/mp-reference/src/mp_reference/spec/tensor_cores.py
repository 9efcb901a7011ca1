"""Matrix units by name: an architecture, a device or a vendor's instruction chooses rows of ``matrix_units``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from mp_reference.spec.accumulators import Accumulator
from mp_reference.spec.formats import FloatFormat
from mp_reference.spec.matrix_units import ARCHITECTURES, ROWS, MatrixUnit
from mp_reference.spec.names import meant

__all__ = ["ARCHITECTURES", "ROWS", "MatrixUnit", "TensorCore", "tensor_core"]

_DEVICES = {
    "volta": "v100 sm70",
    "turing": "t4 sm75",
    "ampere": "a100 a800 a2 a10 a30 a40 rtx3090 sm80 sm86",
    "ada": "l4 l40 l40s rtx4090 adalovelace sm89",
    "hopper": "h100 h200 h20 h800 gh200 sm90 sm90a",
    "blackwell": "b100 b200 gb200 sm100 sm100a",
    "blackwell-rtx": "rtx5090 blackwellrtx rtxblackwell sm120",
    "cdna1": "mi100 gfx908",
    "cdna2": "mi210 mi250 mi250x gfx90a",
    "cdna3": "mi300 mi300a mi300x mi325x gfx942",
}  # fmt: skip
_ALIASES = {name: architecture for architecture, names in _DEVICES.items() for name in names.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCore(Accumulator):
    """The rows that a call may meet; the formats of the factors choose among them."""

    rows: tuple[MatrixUnit, ...]

    def __repr__(self) -> str:
        """What a person wants to know of a unit, in one line."""
        inputs = ", ".join(dict.fromkeys(name for row in self.rows for name in row.inputs))
        return f"TensorCore({self.name}: {self.rows[0].architecture}, {inputs} to {self.result_format.name})"

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

        >>> from mp_reference.spec.formats import BF16
        >>> tensor_core("hopper").row_for(BF16, BF16).block
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
        ValueError: nothing has this name; the message lists the architectures or the shapes of instructions. Or a
            field's value is none that it can have, or ``architecture`` is given beside an architecture.
        TypeError: ``name`` is no string, or ``fields`` holds a name that ``MatrixUnit`` does not have.

    Source: each row's ``source`` and ``witness``.

    >>> tensor_core("hopper").rows[0].block, tensor_core("m16n8k16.f32.f16.f16.f32").rows[0].architecture
    (16, 'ampere')
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} must be a string such as 'hopper' or 'm16n8k16.f32.f16.f16.f32'")
    asked = result.name if isinstance(result, FloatFormat) else result
    known = [one.name for one in dataclass_fields(MatrixUnit)]
    if unknown := [field_name for field_name in fields if field_name not in known]:
        raise TypeError(f"tensor_core has no field {unknown[0]!r}; a row's fields are {', '.join(known)}")
    if re.search(r"\d+[xn]\d+[xk]\d+", name):
        rows = _instruction_rows(name, architecture)
    else:
        wanted = _architecture(name)
        if architecture is not None:
            raise ValueError(
                f"architecture={architecture!r} says which one runs an instruction, and {name!r} is an architecture "
                "itself; leave it out"
            )
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
    wanted = _ALIASES.get(re.sub("[-_ ]", "", wanted), wanted)
    if wanted not in ARCHITECTURES:
        raise ValueError(
            f"tensor core {name!r} is none of {', '.join(ARCHITECTURES)}{meant(name, [*ARCHITECTURES, *_ALIASES])}, "
            f"nor a device such as {', '.join(_ALIASES)}, nor an instruction such as 'm16n8k16.f32.f16.f16.f32' or "
            "'v_mfma_f32_16x16x16_f16'"
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
    shapes = sorted({shape for row in ROWS if wanted in (None, row.architecture) for shape in row.shapes})
    near = meant(re.findall(r"[0-9mnkMNx]+", name.replace("v_mfma_f32_", ""))[0], shapes)
    raise ValueError(
        f"instruction {name!r} is not known for {where}; shapes are {', '.join(shapes)}{near}, types are written as in "
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
