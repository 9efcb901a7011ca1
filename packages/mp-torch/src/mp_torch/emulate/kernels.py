"""The matmul family of an emulated device, as CPU kernels: forward and backward, wherever the call comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mp_torch.emulate import attention, convolution
from mp_torch.emulate.arithmetic import LOW_DTYPES, from_numpy, to_numpy
from mp_torch.emulate.dispatcher import Overrides, native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mp_torch.emulate.arithmetic import Arithmetic

__all__ = ["install_arithmetic", "install_kernels", "matmul_kernels"]


def _addend_first(arithmetic: Arithmetic) -> Callable[..., torch.Tensor]:
    """``addmm`` and ``baddbmm``: the addend comes first."""

    def kernel(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        return arithmetic.product(a, b, c if beta != 0 else None, beta=beta, alpha=alpha)

    return kernel


def _matrix_vector(arithmetic: Arithmetic) -> Callable[..., torch.Tensor]:
    """``addmv``: a vector is a matrix of one column."""

    def kernel(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        column = c.expand(a.shape[0]).unsqueeze(1) if beta != 0 else None
        return arithmetic.product(a, b.unsqueeze(1), column, beta=beta, alpha=alpha).squeeze(1)

    return kernel


def _dot(arithmetic: Arithmetic) -> Callable[..., torch.Tensor]:
    """``dot`` and ``vdot``: a row times a column."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return arithmetic.product(a.unsqueeze(0), b.unsqueeze(1)).reshape(())

    return kernel


def matmul_kernels(arithmetic: Arithmetic) -> Mapping[str, tuple[int, Callable[..., Any]]]:
    """What replaces torch's CPU kernels for 16-bit operands.

    Args:
        arithmetic: what multiplies the matrices.

    Returns:
        By full overload name: the position of the argument whose dtype decides, and the kernel for 16 bits.

    Source: the ops that PyTorch's linear, attention and convolution layers end in.

    >>> from mp_torch.emulate.arithmetic import FastArithmetic
    >>> "aten::convolution_backward" in matmul_kernels(FastArithmetic())
    True
    """
    add, matrix_vector, dot = _addend_first(arithmetic), _matrix_vector(arithmetic), _dot(arithmetic)
    return {
        "aten::mm": (0, arithmetic.product),
        "aten::bmm": (0, arithmetic.product),
        "aten::addmm": (1, add),
        "aten::baddbmm": (1, add),
        "aten::addmv": (1, matrix_vector),
        "aten::dot": (0, dot),
        "aten::vdot": (0, dot),
        **convolution.kernels(arithmetic),
        **attention.kernels(arithmetic),
    }


def _for_dtypes(
    dtypes: tuple[torch.dtype, ...], original: Callable[..., Any], position: int, kernel: Callable[..., Any]
) -> Callable[..., Any]:
    """Emulate operands of these dtypes, leave every other to torch's own kernel."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if args[position].dtype in dtypes:
            return kernel(*args, **kwargs)
        return original(*args, **kwargs)

    return dispatch


def _in_place(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Write the result over the first argument."""

    def dispatch(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.copy_(kernel(self, *args, **kwargs))

    return dispatch


def _into(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Write the result into ``out``."""

    def dispatch(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = kernel(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return dispatch


def install_arithmetic(arithmetic: Arithmetic) -> Callable[[], None]:
    """Replace torch's CPU kernels of the matmul family for 16-bit operands, in the whole process.

    Args:
        arithmetic: what multiplies the matrices.

    Returns:
        A function that puts torch's own kernels back; calling it twice is harmless.

    Source: as for ``matmul_kernels``.

    >>> from mp_torch.emulate.arithmetic import FastArithmetic
    >>> import torch
    >>> restore = install_arithmetic(FastArithmetic())
    >>> torch.mm(torch.ones(1, 2, dtype=torch.float16), torch.ones(2, 1, dtype=torch.float16)).item()
    2.0
    >>> restore()
    """
    dtypes = arithmetic.dtypes
    replaced: dict[str, Callable[..., Any]] = {}
    for name, (position, kernel) in matmul_kernels(arithmetic).items():
        replaced[name] = _for_dtypes(dtypes, native(name), position, kernel)
        if name in _WITH_VARIANTS:
            replaced[f"{name}.out"] = _for_dtypes(dtypes, native(f"{name}.out"), position, _into(kernel))
        if name in _WITH_VARIANTS and position == 1:
            replaced[f"{name}_"] = _for_dtypes(dtypes, native(f"{name}_"), position, _in_place(kernel))
    kernels = Overrides()
    for name, replacement in replaced.items():
        kernels.put(name, replacement, "CPU")
    return kernels.remove


def _through_numpy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's kernel decides shapes and dtypes, a NumPy function the values, rounded once each."""
    original = native(name)

    def array(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return to_numpy(x.float() if x.dtype in LOW_DTYPES else x)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        expected = original(*args, **kwargs)
        found = function(*map(array, args), **{key: array(x) for key, x in kwargs.items()})
        parts = expected if isinstance(expected, tuple) else (expected,)
        values = found if isinstance(found, tuple) else (found,)
        for part, value in zip(parts, values, strict=True):
            if value is not None:
                part.copy_(from_numpy(np.array(value, order="C")).to(part.dtype))
        return expected

    return kernel


def install_kernels(functions: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Compute other ops by NumPy functions instead of torch's CPU kernels, in the whole process.

    Args:
        functions: by the op's name in the aten namespace, such as ``native_layer_norm`` or ``sum.dim_IntList``: a
            function of the op's arguments, 16-bit ones widened to float32, that returns the op's results as arrays of
            their shapes, unrounded; None leaves torch's own value. Each is rounded once to the dtype that torch gives.

    Returns:
        A function that puts torch's own kernels back; calling it twice is harmless.

    Source: the caller's functions.

    >>> import torch
    >>> restore = install_kernels({"tanh": lambda x: 2 * x})
    >>> torch.tanh(torch.ones(1, dtype=torch.float16)).item()
    2.0
    >>> restore()
    """
    kernels = Overrides()
    for name, function in functions.items():
        kernels.put(f"aten::{name}", _through_numpy(f"aten::{name}", function), "CPU")
    return kernels.remove


_WITH_VARIANTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv"})
