"""torch on one device as a subject. Tensors live there; what comes back is NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mp_conformance.dispatcher import probe
from mp_conformance.implementations import NotOfferedError
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["TORCH_DTYPES", "TorchSubject", "to_numpy", "to_torch"]

Array = np.ndarray[Any, np.dtype[Any]]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2, "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz, "float8_e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip
"""Which dtype of torch holds which format."""

_BY_NUMPY = {FORMATS[name].dtype: dtype for name, dtype in TORCH_DTYPES.items()}
_BY_TORCH = {dtype: np_dtype for np_dtype, dtype in _BY_NUMPY.items()}
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "sqrt": torch.sqrt,
    "minimum": torch.minimum, "maximum": torch.maximum, "less": torch.lt, "less_equal": torch.le, "equal": torch.eq,
}  # fmt: skip

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "erf": torch.erf, "softplus": torch.nn.functional.softplus,
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
}  # fmt: skip


def to_torch(x: Array, device: str = "cpu") -> torch.Tensor:
    """An array as a tensor, bit for bit, also for the dtypes that NumPy shares with ml_dtypes alone.

    Args:
        x: any shape, a dtype of ``TORCH_DTYPES``'s formats, float64, an integer or bool.
        device: where the tensor goes.

    Returns:
        A tensor of the same shape and bits.

    Source: this project.

    >>> to_torch(np.array([1.5], FORMATS["bf16"].dtype))
    tensor([1.5000], dtype=torch.bfloat16)
    """
    dtype = _BY_NUMPY.get(x.dtype)
    x = np.ascontiguousarray(x)
    if dtype is None or dtype in (torch.float32, torch.float16):
        return torch.from_numpy(x.copy()).to(device)
    width = {1: np.uint8, 2: np.int16}[x.dtype.itemsize]
    return torch.from_numpy(x.view(width).copy()).to(device).view(dtype)


def to_numpy(tensor: torch.Tensor) -> Array:
    """A tensor as an array, bit for bit.

    Args:
        tensor: any shape, on any device.

    Returns:
        An array of the dtype that ml_dtypes or NumPy has for it.

    Source: this project.

    >>> to_numpy(torch.tensor([1.5], dtype=torch.bfloat16))
    array([1.5], dtype=bfloat16)
    """
    tensor = tensor.detach()
    dtype = _BY_TORCH.get(tensor.dtype)
    if dtype is None or tensor.dtype in (torch.float32, torch.float16):
        return np.asarray(tensor.cpu().numpy())
    return np.asarray(tensor.contiguous().view(_SAME_WIDTH[tensor.element_size()]).cpu().numpy()).view(dtype)


class TorchSubject:
    """The installed torch, asked for what its kernels on one device compute.

    Args:
        device: a device type, such as ``cuda``; an index may follow after a colon.

    Raises:
        ValueError: this torch cannot use such a device.
    """

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device.split(":")[0]
        self.place = device
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as reason:
            raise ValueError(
                f"device {device!r}: torch {torch.__version__} cannot place a tensor there "
                f"({str(reason).splitlines()[0].rstrip('.')}); run with "
                "--device cpu, or install the build of torch for this device"
            ) from reason

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Whatever torch has a kernel for; it rounds to nearest-even and knows no other overflow than its own."""
        plain = options.get("rounding", "nearest-even") == "nearest-even" and options.get("subnormals", True)
        if not plain or options.get("overflow", "ieee") != "ieee":
            return False
        if operation in ("cast", "facts"):
            source = options.get("source", "float32")
            known = source in TORCH_DTYPES or source in ("float32", "float64", "int64")
            return known and options.get("to", options.get("format")) in TORCH_DTYPES
        if operation in _ELEMENTWISE:
            return options.get("format") in ("fp16", "bf16", "fp32")
        if operation == "elementary":
            return options["function"] in _FUNCTIONS
        if operation == "loss_scale":
            return options.get("preset") == "torch"
        if operation == "norm":
            return torch.backends.cpu.get_cpu_capability() != "DEFAULT"  # whose kernels fuse nothing
        return operation in ("sum", "matmul", "op_rules")

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it on the device."""
        if operation == "facts":
            return _facts(TORCH_DTYPES[options["format"]])
        if operation == "cast":
            return to_numpy(to_torch(operands[0], self.place).to(TORCH_DTYPES[options["to"]]))
        if operation in _ELEMENTWISE:
            return to_numpy(_ELEMENTWISE[operation](*(to_torch(x, self.place) for x in operands)))
        if operation == "elementary":
            return self._elementary(operands[0], options["function"], options.get("layout", "contiguous"))
        if operation == "norm":
            return to_numpy(torch.linalg.vector_norm(to_torch(operands[0], self.place)))
        if operation == "sum":
            return to_numpy(to_torch(operands[0], self.place).sum())
        if operation == "matmul":
            return to_numpy(to_torch(operands[0], self.place) @ to_torch(operands[1], self.place))
        if operation == "op_rules":
            return probe(options["device"], TORCH_DTYPES[options["fmt"]])
        if operation == "loss_scale":
            return _grad_scaler(self.place, *operands)
        raise NotOfferedError(f"torch has no {operation}")

    def _elementary(self, x: Array, function: str, layout: str) -> Array:
        tensor = to_torch(x, self.place)
        if layout == "strided":
            tensor = torch.stack((tensor, torch.ones_like(tensor)), dim=-1)[..., 0]
        return to_numpy(_FUNCTIONS[function](tensor))


def _grad_scaler(device: str, settings: Mapping[str, Any], flags: Sequence[bool]) -> list[tuple[float, int]]:
    """Torch's own GradScaler over the flags, through the kernels that a real step would run."""
    scaler = torch.amp.GradScaler(
        device.split(":")[0], init_scale=settings["init_scale"], growth_interval=settings["growth_interval"]
    )
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer, seen = torch.optim.SGD([parameter], lr=0.0), []
    for flag in flags:
        scaler.scale(torch.zeros((), device=device))
        parameter.grad = torch.full((1,), float("inf") if flag else 1.0, device=device)
        scaler.step(optimizer)
        scaler.update()
        seen.append((float(scaler.get_scale()), int(scaler.state_dict()["_growth_tracker"])))
    return seen


def _facts(dtype: torch.dtype) -> dict[str, float]:
    info = torch.finfo(dtype)
    return {
        "bits": float(info.bits),
        "max": float(info.max),
        "min_normal": float(info.smallest_normal),
        "epsilon": float(info.eps),
    }
