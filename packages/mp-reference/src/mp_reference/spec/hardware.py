"""Hardware as rows: which formats it multiplies natively, how fast, how it overflows, and what to train in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mp_reference.spec import sources

__all__ = ["HARDWARE", "Hardware", "hardware_named", "hardware_table"]

HalfOverflow = Literal["ieee", "saturate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of hardware.

    Args:
        name: what people call it.
        device: the type that torch gives it: ``"cuda"``, ``"xpu"``, ``"npu"``, ``"cpu"`` or ``"mps"``.
        pattern: regular expression that finds its driver's device names, whatever their case.
        throughput: native formats of matrix products, each with its dense peak rate; ``None`` where none is published.
        rate_unit: unit of ``throughput``; only ratios within a row mean anything where it is not TFLOP/s.
        bandwidth: GB/s of its main memory; ``None`` where it depends on the board or is not published.
        compute_capabilities: NVIDIA's numbers that this row also stands for when the name is unknown.
        overflow: an fp16 result past 65504 becomes infinity (``"ieee"``) or 65504 (``"saturate"``).
        flushes: formats whose matrix products take subnormals for zero.
        pretrain: recommended precision for training from scratch.
        finetune: recommended precision for training from a checkpoint.
        inference: recommended precision without gradients.
        why: the reason in words, one clause about the formats.
        source: the documents.

    Source: the row's own ``source`` field.

    >>> HARDWARE["A100"].ratio("bf16")
    16.0
    """

    name: str
    device: str
    pattern: str
    throughput: dict[str, float | None]
    rate_unit: str = "TFLOP/s"
    bandwidth: float | None = None
    compute_capabilities: tuple[str, ...] = ()
    overflow: HalfOverflow = "ieee"
    flushes: tuple[str, ...] = ()
    pretrain: str
    finetune: str
    inference: str
    why: str
    source: str

    @property
    def formats(self) -> tuple[str, ...]:
        """The native formats, widest first."""
        return tuple(self.throughput)

    def ratio(self, format_name: str) -> float | None:
        """How many times as fast as in fp32 its matrix products are.

        Args:
            format_name: a native format.

        Returns:
            The ratio of the published rates, ``None`` where one of them is not published or the format is not native.

        Source: the row.

        >>> HARDWARE["V100"].ratio("bf16") is None
        True
        """
        rate, fp32 = self.throughput.get(format_name), self.throughput.get("fp32")
        return rate / fp32 if rate and fp32 else None


_FP8 = "float8_e4m3fn"
_NO_BF16 = "its matrix units multiply fp16 and not bf16, so that gradients need a loss scale"
_BF16 = "its matrix units multiply bf16, which has the range of fp32 and needs no loss scale"

_ROWS = (
    Hardware(
        name="V100", device="cuda", pattern=r"\bV100|\bGV100|TITAN V\b", compute_capabilities=("7.0",),
        throughput={"fp32": 15.7, "fp16": 125.0}, bandwidth=900.0,
        pretrain="fp16-mixed", finetune="fp16-mixed", inference="fp16-true", why=_NO_BF16, source=sources.NVIDIA_V100,
    ),
    Hardware(
        name="T4", device="cuda", pattern=r"\bT4G?\b",
        throughput={"fp32": 8.1, "fp16": 65.0}, bandwidth=320.0,
        pretrain="fp16-mixed", finetune="fp16-mixed", inference="fp16-true", why=_NO_BF16, source=sources.NVIDIA_T4,
    ),
    Hardware(
        name="RTX 20", device="cuda", pattern=r"RTX 20\d\d|TITAN RTX|Quadro RTX",
        throughput={"fp32": 13.4, "fp16": 53.8}, bandwidth=616.0,
        pretrain="fp16-mixed", finetune="fp16-mixed", inference="fp16-true", why=_NO_BF16, source=sources.NVIDIA_TURING,
    ),
    Hardware(
        name="RTX 30", device="cuda", pattern=r"RTX 30\d\d|RTX A\d000|\bA(2|10|10G|16|40)\b",
        compute_capabilities=("8.6",),
        throughput={"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0}, bandwidth=936.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.NVIDIA_GA102,
    ),
    Hardware(
        name="RTX 40", device="cuda", pattern=r"RTX 40\d\d|\bL(4|40|40S)\b|RTX \d000 Ada",
        compute_capabilities=("8.9",),
        throughput={"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, _FP8: 330.3, "float8_e5m2": 330.3},
        bandwidth=1008.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.NVIDIA_ADA,
    ),
    Hardware(
        name="RTX 50", device="cuda", pattern=r"RTX 50\d\d|RTX PRO \d000", compute_capabilities=("12.0",),
        throughput={
            "fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, _FP8: 419.0, "float8_e5m2": 419.0,
            "float6_e2m3fn": 419.0, "float6_e3m2fn": 419.0, "float4_e2m1fn": 1676.0,
        },
        bandwidth=1792.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16,
        source=sources.NVIDIA_RTX_BLACKWELL,
    ),
    Hardware(
        name="A100", device="cuda", pattern=r"\bA100|\bA800|\bA30\b", compute_capabilities=("8.0",),
        throughput={"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}, bandwidth=2039.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.NVIDIA_A100,
    ),
    Hardware(
        name="H100", device="cuda", pattern=r"\bG?H100|\bH800|\bGH200", compute_capabilities=("9.0",),
        throughput={"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, _FP8: 1978.9, "float8_e5m2": 1978.9},
        bandwidth=3352.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.NVIDIA_H100,
    ),
    Hardware(
        name="H200", device="cuda", pattern=r"\bH200",
        throughput={"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, _FP8: 1978.9, "float8_e5m2": 1978.9},
        bandwidth=4800.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.NVIDIA_H200,
    ),
    Hardware(
        name="B200", device="cuda", pattern=r"\bG?B[123]00\b", compute_capabilities=("10.0", "10.3"),
        throughput={
            "fp32": 80.0, "tf32": 1100.0, "fp16": 2250.0, "bf16": 2250.0, _FP8: 4500.0, "float8_e5m2": 4500.0,
            "float6_e2m3fn": 4500.0, "float6_e3m2fn": 4500.0, "float4_e2m1fn": 9000.0,
        },
        bandwidth=8000.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.NVIDIA_BLACKWELL,
    ),
    Hardware(
        name="MI250", device="cuda", pattern=r"\bMI2[15]0X?\b", flushes=("fp16", "bf16"),
        throughput={"fp32": 95.7, "fp16": 383.0, "bf16": 383.0}, bandwidth=3277.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true",
        why=f"{_BF16}; its fp16 products take subnormals for zero, where small gradients live",
        source=sources.AMD_CDNA2,
    ),
    Hardware(
        name="MI300", device="cuda", pattern=r"\bMI3(00[AX]?|25X)\b",
        throughput={
            "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "float8_e4m3fnuz": 2614.9,
            "float8_e5m2fnuz": 2614.9,
        },
        bandwidth=5325.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.AMD_CDNA3,
    ),
    Hardware(
        name="Intel Max 1550", device="xpu", pattern=r"Data Center GPU Max",
        throughput={"fp32": 52.4, "tf32": 419.0, "fp16": 839.0, "bf16": 839.0}, bandwidth=3277.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16, source=sources.INTEL_MAX,
    ),
    Hardware(
        name="Ascend 910A", device="npu", pattern=r"Ascend910(Premium|Pro)?[AB]$", overflow="saturate",
        throughput={"fp16": 256.0}, bandwidth=1200.0,
        pretrain="fp16-mixed", finetune="fp16-mixed", inference="fp16-true",
        why=f"{_NO_BF16}; an overflow stays finite there, so the engine reads it from the device's status flag",
        source=f"{sources.ASCEND_910}; {sources.ASCEND_OVERFLOW}",
    ),
    Hardware(
        name="Ascend 910B", device="npu", pattern=r"Ascend910(B\d|_93\d\d)",
        throughput={"fp32": None, "fp16": 376.0, "bf16": 376.0}, bandwidth=1600.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true",
        why=f"{_BF16} (and no INF_NAN_MODE_ENABLE)", source=f"{sources.CLOUDMATRIX}; {sources.ASCEND_OVERFLOW}",
    ),
    Hardware(
        name="Ascend 950", device="npu", pattern=r"Ascend950",
        throughput={"fp32": None, "fp16": None, "bf16": None, _FP8: 1000.0, "float4_e2m1fn": 2000.0}, bandwidth=1600.0,
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true", why=_BF16,
        source=f"{sources.ASCEND_950}; {sources.ASCEND_OVERFLOW}",
    ),
    Hardware(
        name="CPU with AMX", device="cpu", pattern=r"^CPU with AMX$",
        throughput={"fp32": 64.0, "bf16": 1024.0}, rate_unit="FLOP/cycle/core",
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true",
        why="its tiles multiply bf16, which has the range of fp32 and needs no loss scale", source=sources.INTEL_AMX,
    ),
    Hardware(
        name="CPU with AVX512-BF16", device="cpu", pattern=r"^CPU with AVX512-BF16$",
        throughput={"fp32": None, "bf16": None}, rate_unit="FLOP/cycle/core",
        pretrain="bf16-mixed", finetune="bf16-mixed", inference="bf16-true",
        why="one instruction multiplies 32 pairs in bf16 where fp32 has 16, and bf16 needs no loss scale",
        source=sources.AVX512_BF16,
    ),
    Hardware(
        name="CPU", device="cpu", pattern=r"^CPU$", throughput={"fp32": None}, rate_unit="FLOP/cycle/core",
        pretrain="fp32", finetune="fp32", inference="fp32",
        why="it multiplies 16-bit formats only through conversions, which cost more than they save",
        source=sources.AVX512_BF16,
    ),
    Hardware(
        name="Apple GPU", device="mps", pattern=r"^Apple (GPU|M\d)",
        throughput={"fp32": None, "fp16": None, "bf16": None},
        pretrain="fp32", finetune="fp32", inference="fp16-true",
        why="no higher rate than fp32's is published for 16-bit formats, so that they save memory and traffic alone",
        source=sources.APPLE_METAL,
    ),
)  # fmt: skip

HARDWARE: dict[str, Hardware] = {row.name: row for row in _ROWS}
"""Every row, by name."""


def hardware_named(name: str, compute_capability: str | None = None) -> Hardware:
    """The row that a device belongs to.

    Args:
        name: the name of a row, or what a driver calls the device.
        compute_capability: NVIDIA's number of the architecture, used where the name is in no row.

    Returns:
        The row.

    Raises:
        ValueError: neither the name nor the compute capability is in a row; the message lists the rows.

    Source: the rows.

    >>> hardware_named("NVIDIA A100-SXM4-80GB").name, hardware_named("NVIDIA Thing", "9.0").name
    ('A100', 'H100')
    """
    by_name = {key.lower(): row for key, row in HARDWARE.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    for row in _ROWS:
        if re.search(row.pattern, name, re.IGNORECASE):
            return row
    for row in _ROWS:
        if compute_capability is not None and compute_capability in row.compute_capabilities:
            return row
    raise ValueError(
        f"hardware {name!r} is not one of {', '.join(HARDWARE)}; name the nearest of these, or "
        "choose a precision yourself"
    )


def hardware_table() -> str:
    """The rows as text: bandwidth, fp16 overflow, recommended precisions, formats with their rates relative to fp32.

    Returns:
        One line a row below a heading, columns aligned; a rate that is not published is left out.

    Source: the rows.

    >>> print(hardware_table().splitlines()[1])
    V100                  900 GB/s   ieee      fp16-mixed  fp16-mixed  fp16-true  fp32 x1, fp16 x7.96
    """
    head = ("hardware", "bandwidth", "overflow", "pretrain", "finetune", "inference", "native formats")
    rows = [head]
    for row in _ROWS:
        ratios = {name: row.ratio(name) for name in row.formats}
        formats = ", ".join(name if ratio is None else f"{name} x{ratio:.3g}" for name, ratio in ratios.items())
        bandwidth = f"{row.bandwidth:g} GB/s" if row.bandwidth else ""
        rows.append((row.name, bandwidth, row.overflow, row.pretrain, row.finetune, row.inference, formats))
    widths = [max(len(line[column]) for line in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in rows
    )
