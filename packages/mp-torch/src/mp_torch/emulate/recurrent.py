"""LSTM and GRU as a CUDA device runs them: fused cells, fp32 inside, each output rounded once.

On CPU tensors torch hands an LSTM to oneDNN as a whole, past every op rule, and rounds after each operation of a cell.
Here the two products of each step follow the op rules, and the cell is the fused op of CUDA, with a kernel for CPU
tensors; its casts and its place in autograd are torch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mp_torch.emulate import fused_cells
from mp_torch.emulate.dispatcher import Overrides, native, op_overload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PACKED", "install_recurrent"]

PACKED = ("aten::lstm.data", "aten::gru.data")
"""What runs a packed sequence: torch's way on the CPU, in the inputs' own dtype."""

_LSTM, _GRU = "aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell"


def _step(kind: str, step: torch.Tensor, state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
    """One step of one layer: two products and the fused cell; the next states."""
    of_input, of_state, *rest = weights
    biases = [weight for weight in rest if weight.ndim == 1]
    gates = torch.matmul(step, of_input.t()), torch.matmul(state[0], of_state.t())
    carried = op_overload(kind)(*gates, state[-1], *biases)[: len(state)]
    projections = [weight for weight in rest if weight.ndim == 2]
    return [torch.matmul(carried[0], projections[0].t()), *carried[1:]] if projections else list(carried)


def _direction(
    kind: str, steps: Sequence[torch.Tensor], state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
    """All steps of one layer in one direction."""
    outputs = []
    for step in steps:
        state = _step(kind, step, state, weights)
        outputs.append(state[0])
    return outputs, state


def _layers(
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    options: Sequence[Any],
) -> tuple[torch.Tensor, ...]:
    """All layers and directions; ``options`` in the order of the schema."""
    _has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    directions = 2 if bidirectional else 1
    width = len(params) // (num_layers * directions)  # weights a direction: 2, biases 2, a projection 1
    steps = list((x.transpose(0, 1) if batch_first else x).unbind(0))
    last: list[Sequence[torch.Tensor]] = []
    for layer in range(num_layers):
        found = []
        for direction in range(directions):
            index = layer * directions + direction
            ordered = steps[::-1] if direction else steps
            state = [part[index] for part in states]
            outputs, carried = _direction(kind, ordered, state, params[index * width : (index + 1) * width])
            found.append(outputs[::-1] if direction else outputs)
            last.append(carried)
        steps = [torch.cat(parts, -1) for parts in zip(*found, strict=True)] if bidirectional else found[0]
        if dropout and train and layer < num_layers - 1:
            steps = list(torch.dropout(torch.stack(steps), dropout, train).unbind(0))
    joined = torch.stack(steps)
    if batch_first:  # a view, as torch has it: the layout decides how a linear layer rounds its bias
        joined = joined.transpose(0, 1)
    return (joined, *(torch.stack(list(parts)) for parts in zip(*last, strict=True)))


def _one_step(kind: str, x: torch.Tensor, hx: Any, *weights: Any) -> Any:
    """A cell on its own."""
    states = hx if isinstance(hx, list | tuple) else [hx]
    found = _step(kind, x, states, [weight for weight in weights if weight is not None])
    return tuple(found) if isinstance(hx, list | tuple) else found[0]


def _fused() -> dict[str, Callable[..., Any]]:
    """What replaces torch's composites, by full overload name."""
    return {
        "aten::lstm.input": lambda x, hx, params, *options: _layers(_LSTM, x, hx, params, options),
        "aten::gru.input": lambda x, hx, params, *options: _layers(_GRU, x, [hx], params, options),
        "aten::lstm_cell": lambda *args: _one_step(_LSTM, *args),
        "aten::gru_cell": lambda *args: _one_step(_GRU, *args),
    }


def _but_in_fp32(original: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    """The fused way, but for fp32, where torch's own differs in nothing but speed and the order of a sum."""

    def kernel(x: torch.Tensor, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return (original if dtype is torch.float32 else fused)(x, *args)

    return kernel


def install_recurrent() -> Callable[[], None]:
    """Run ``nn.LSTM``, ``nn.GRU`` and their cells in 16 bits with fused cells, in the whole process.

    Packed sequences keep torch's own way on the CPU.

    Returns:
        A function that takes the kernels out again; calling it twice is harmless.

    Source: PyTorch, aten/src/ATen/native/RNN.cpp, the way of a CUDA tensor without cuDNN.

    >>> remove = install_recurrent()
    >>> with torch.no_grad():
    ...     torch.nn.LSTM(2, 3).half()(torch.zeros(4, 1, 2).half())[0].dtype
    torch.float16
    >>> remove()
    """
    kernels = Overrides()
    originals = {name: native(name) for name in _fused()}
    for name, fused in _fused().items():
        for dispatch_key in ("AutogradCPU", "CPU"):  # above autograd, and for tensors of inference mode
            kernels.put(name, _but_in_fp32(originals[name], fused), dispatch_key)
    for name, kernel in fused_cells.kernels().items():
        kernels.put(name, kernel, "CPU")
    return kernels.remove
