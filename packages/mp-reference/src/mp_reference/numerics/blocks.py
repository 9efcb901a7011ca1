"""Block formats: numbers to elements and scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_reference.numerics.codec import code_dtype, decode, encode, encode_representable, nan_code
from mp_reference.numerics.odd import ODD
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.blocks import SCALE_RULES, BlockFormat
from mp_reference.spec.formats import FP32

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mp_reference.numerics.arguments import RandomBits
    from mp_reference.numerics.rounding import Rounding
    from mp_reference.spec.blocks import ScaleRule

__all__ = ["BlockArray", "dequantize", "quantize", "tensor_scale_of"]

_LONGEST = 26  # stored bits of element and scale: a quotient and the product of both scales fit float64 together
_ROWS = 2048  # blocks worked on at a time: a workspace that stays in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockArray:
    """Numbers in a block format.

    Args:
        format: the block format.
        elements: codes of the element format, the shape of the numbers.
        scales: codes of the scale format; the blocked axis is last and has one entry a block.
        axis: along which blocks run.
        tensor_scale: by which every value is multiplied besides; 1.0 unless the format has such a scale.

    Source: OCP MX v1.0, 5.1.

    >>> from mp_reference.spec.blocks import MXFP4
    >>> quantize(np.float32([1.0, 3.0]), MXFP4).scales.tolist()
    [126]
    """

    format: BlockFormat
    elements: NDArray[Any]
    scales: NDArray[Any]
    axis: int
    tensor_scale: float = 1.0


def tensor_scale_of(x: ArrayLike, fmt: BlockFormat) -> float:
    """The fp32 scale that brings the largest magnitude of a tensor to the largest scale times the largest element.

    Args:
        x: floating array, any shape, finite in fp32.
        fmt: a format with a tensor scale.

    Returns:
        ``amax / (scale.max * element.max)`` rounded to fp32, the smallest fp32 number where that is zero; 1.0 for a
        tensor of zeros.

    Raises:
        ValueError: the format has no tensor scale, or ``x`` is not finite in fp32.

    Source: NVIDIA, arXiv 2509.25149, appendix C.

    >>> from mp_reference.spec.blocks import NVFP4
    >>> tensor_scale_of(np.float32([2688.0, 1.0]), NVFP4)
    1.0
    """
    if not fmt.tensor_scale:
        raise ValueError(f"{fmt.name} has no tensor scale; leave it out")
    amax = float(np.max(np.abs(np.asarray(x)), initial=0.0))
    if not amax <= FP32.max:
        raise ValueError(f"the largest magnitude is {amax}, which no scale brings into range; check x before")
    scale = float(round_to(amax / (fmt.scale_format.max * fmt.element_format.max), FP32))
    return max(scale, FP32.min_subnormal) if amax > 0 else 1.0


def quantize(
    x: ArrayLike,
    fmt: BlockFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule | None = None,
    tensor_scale: float = 1.0,
    rounding: Rounding = "nearest-even",
    random_bits: RandomBits | None = None,
) -> BlockArray:
    """Put numbers into a block format: choose each block's scale, divide, round once, saturate.

    Args:
        x: float32 or narrower, any shape with at least one axis; a last block may be short.
        fmt: the block format.
        axis: along which blocks run.
        scale_rule: one of ``SCALE_RULES``; the format's own unless given.
        tensor_scale: positive, an fp32 number, from ``tensor_scale_of``; only for formats that have one.
        rounding: of the elements, as ``round_to``.
        random_bits: for ``stochastic``, as ``round_to``, of the shape of ``x`` with ``axis`` moved last.

    Returns:
        The codes. A block of zeros has the smallest scale. A block with a NaN or an infinity has a NaN scale and zero
        elements: every one of its values reads as NaN.

    Raises:
        TypeError: ``x`` is wider than float32; round it with mp.cast first.
        ValueError: no axis, an unknown rule, random bits of another shape, or a tensor scale that the format does not
            have, cannot divide by exactly, or that is no positive fp32 number.

    Source: OCP MX v1.0, 6.3; ``round-up``: arXiv 2506.08027, appendix; ``amax``: arXiv 2509.25149.

    >>> from mp_reference.spec.blocks import MXFP8_E4M3
    >>> packed = quantize(np.float32([1.0, 500.0]), MXFP8_E4M3)
    >>> dequantize(packed).tolist()
    [1.0, 448.0]
    >>> dequantize(quantize(np.float32([1.0, 500.0]), MXFP8_E4M3, scale_rule="round-up")).tolist()
    [1.0, 512.0]
    """
    if not isinstance(fmt, BlockFormat):
        raise TypeError(f"fmt={fmt!r} must be a BlockFormat; look one up with block_format_named(name)")
    rule = fmt.scale_rule if scale_rule is None else scale_rule
    values = _checked(np.asarray(x), fmt, rule, tensor_scale)
    moved = np.moveaxis(values, axis, -1)
    length = moved.shape[-1]
    count = -(-length // fmt.block_size)
    blocks = np.zeros((*moved.shape[:-1], count * fmt.block_size), np.float32)
    blocks[..., :length] = moved
    flat = blocks.reshape(-1, fmt.block_size)
    elements = np.empty(flat.shape, code_dtype(fmt.element_format))
    scales = np.empty(flat.shape[0], code_dtype(fmt.scale_format))
    if random_bits is not None and isinstance(random_bits, np.ndarray):
        random_bits = _padded(random_bits, moved.shape, blocks.shape).reshape(flat.shape)
    for start in range(0, flat.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        drawn = random_bits[rows] if isinstance(random_bits, np.ndarray) else random_bits
        scales[rows] = _scale_codes(flat[rows], fmt, rule, tensor_scale)
        elements[rows] = _element_codes(flat[rows], scales[rows], fmt, tensor_scale, rounding, drawn)
    shaped = elements.reshape(blocks.shape)[..., :length]
    return BlockArray(
        format=fmt, elements=np.ascontiguousarray(np.moveaxis(shaped, -1, axis)),
        scales=scales.reshape(*moved.shape[:-1], count), axis=axis, tensor_scale=tensor_scale,
    )  # fmt: skip


def _padded(random_bits: NDArray[Any], given: tuple[int, ...], whole: tuple[int, ...]) -> NDArray[Any]:
    """Random bits for the blocks filled up, as they are given for the numbers alone."""
    padded = np.zeros(whole, random_bits.dtype)
    try:
        padded[..., : given[-1]] = random_bits
    except ValueError:
        raise ValueError(
            f"random_bits have shape {random_bits.shape} and must broadcast to {given}, the shape of x with the "
            "blocked axis last; draw as many"
        ) from None
    return padded


def _checked(x: NDArray[Any], fmt: BlockFormat, rule: str, tensor_scale: float) -> NDArray[np.float32]:
    if rule not in SCALE_RULES:
        raise ValueError(f"scale_rule={rule!r} must be one of {', '.join(SCALE_RULES)}")
    if rule != "amax" and fmt.scale_format.specials != "exponent-only":
        raise ValueError(f"scale_rule={rule!r} makes powers of two, which {fmt.name} does not store; use 'amax'")
    number = np.ndim(tensor_scale) == 0 and 0 < tensor_scale <= FP32.max
    if not (number and float(np.float32(tensor_scale)) == tensor_scale):
        raise ValueError(f"tensor_scale={tensor_scale!r} must be a positive fp32 number; use tensor_scale_of(x, fmt)")
    if tensor_scale != 1.0 and not fmt.tensor_scale:
        raise ValueError(f"{fmt.name} has no tensor scale; leave it out")
    if tensor_scale != 1.0 and fmt.element_format.mantissa_bits + fmt.scale_format.mantissa_bits > _LONGEST:
        raise ValueError(
            f"{fmt.name}: {fmt.element} elements, {fmt.scale} scales and a tensor scale have more bits together than "
            "float64 divides exactly; leave the tensor scale out"
        )
    if x.ndim == 0:
        raise ValueError("blocks run along an axis and x has none; use x[np.newaxis]")
    if x.dtype.kind in "iubc" or x.dtype.itemsize > 4:
        raise TypeError(f"quantize takes float32 or narrower floats, got {x.dtype}; use mp.cast(x, mp.FP32) first")
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32)


def _scale_codes(rows: NDArray[np.float32], fmt: BlockFormat, rule: str, tensor_scale: float) -> NDArray[Any]:
    """The scale of each row, as codes."""
    scale, element = fmt.scale_format, fmt.element_format
    amax = np.abs(rows).max(axis=1).astype(np.float64)
    usual = np.isfinite(amax) & (amax > 0)
    known = np.where(usual, amax, 1.0)
    if rule == "amax":
        exact = ODD["div"](known, np.array(element.max * tensor_scale), precision=scale.mantissa_bits + 1)
        chosen = round_to(exact, scale, overflow="saturate")
    else:
        exponent = np.frexp(known)[1] - 1 - element.max_exponent  # exact, also just below a power of two
        if rule == "round-up":
            exponent += known > np.ldexp(element.max, exponent)
        chosen = np.ldexp(1.0, np.maximum(exponent, scale.min_exponent))
    codes = encode_representable(chosen, scale)
    codes = np.where(amax == 0, code_dtype(scale).type(0), codes)
    return np.where(np.isfinite(amax), codes, code_dtype(scale).type(nan_code(scale)))


def _element_codes(
    rows: NDArray[np.float32],
    scales: NDArray[Any],
    fmt: BlockFormat,
    tensor_scale: float,
    rounding: Rounding,
    random_bits: RandomBits | None,
) -> NDArray[Any]:
    """Each number divided by its scale, exactly, and rounded once."""
    scale = (decode(scales, fmt.scale_format).astype(np.float64) * tensor_scale)[:, np.newaxis]
    usual = np.isfinite(scale) & (scale > 0)
    divisor = np.where(usual, scale, 1.0)
    numbers = np.where(usual, rows, np.where(np.isnan(scale), 0.0, np.copysign(0.0, rows))).astype(np.float64)
    quotient = ODD["div"](numbers, divisor, precision=fmt.element_format.mantissa_bits + 1)
    return encode(quotient, fmt.element_format, rounding, "saturate", random_bits=random_bits)


def dequantize(packed: BlockArray) -> NDArray[np.float64]:
    """The numbers that a block array stands for.

    Args:
        packed: as ``quantize`` returns it.

    Returns:
        float64, the shape of the elements; exact: element times scale times tensor scale. NaN where the scale is.

    Raises:
        ValueError: the scales do not fit the elements.

    Source: OCP MX v1.0, 5.3.

    >>> from mp_reference.spec.blocks import MXFP4
    >>> dequantize(quantize(np.float32([0.75, -3.0, 100.0]), MXFP4)).tolist()
    [0.0, -0.0, 96.0]
    """
    values = np.moveaxis(decode(packed.elements, packed.format.element_format), packed.axis, -1).astype(np.float64)
    size, length = packed.format.block_size, values.shape[-1]
    wanted = (*values.shape[:-1], -(-length // size))
    if packed.scales.shape != wanted:
        raise ValueError(
            f"scales have shape {packed.scales.shape}; elements of shape {packed.elements.shape} in blocks of {size} "
            f"along axis {packed.axis} need {wanted}"
        )
    scale = decode(packed.scales, packed.format.scale_format).astype(np.float64) * packed.tensor_scale
    spread = np.repeat(scale, size, axis=-1)[..., :length]
    return np.moveaxis(values * spread, -1, packed.axis)
