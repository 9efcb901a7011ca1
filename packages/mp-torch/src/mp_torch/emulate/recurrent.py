"""LSTM and GRU as a CUDA device runs them: fused cells, fp32 inside, each output rounded once.

On CPU tensors torch hands an LSTM to oneDNN as a whole, past every op rule, and rounds after each operation of a cell.
These kernels take its place in 16 bits: the two products of each step follow the op rules, and the cell is one fused
operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mp_torch.emulate.arithmetic import LOW_DTYPES
from mp_torch.emulate.dispatcher import Overrides, native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["gru_cell", "install_recurrent", "lstm_cell"]


def lstm_cell(gates: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One fused LSTM cell.

    Args:
        gates: the parts of the pre-activation, (batch, 4 * hidden) or (4 * hidden,), in 16 bits; summed in fp32
            in order.
        state: hidden and cell state, (batch, hidden), in 16 bits; the hidden one is in the gates already.

    Returns:
        The next hidden and cell state, each rounded once.

    Source: PyTorch, aten/src/ATen/native/cuda/RNN.cu, ``lstm_cell_forward``.

    >>> zero = torch.zeros(1, 4, dtype=torch.float16)
    >>> [x.item() for x in lstm_cell([zero, zero], [zero[:, :1], zero[:, :1] + 2])]
    [0.380859375, 1.0]
    """
    total = gates[0].float()
    for part in gates[1:]:
        total = total + part.float()
    enter, forget, candidate, leave = total.chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1].float() + torch.sigmoid(enter) * torch.tanh(candidate)
    hidden = torch.sigmoid(leave) * torch.tanh(cell)
    return hidden.to(state[1].dtype), cell.to(state[1].dtype)


def gru_cell(gates: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One fused GRU cell.

    Args:
        gates: of the input and of the state: (batch, 3 * hidden), in 16 bits, then their biases if there are any.
        state: the hidden state, (batch, hidden), in 16 bits.

    Returns:
        The next hidden state, rounded once.

    Source: PyTorch, aten/src/ATen/native/cuda/RNN.cu, ``gru_cell_forward``.

    >>> zero = torch.zeros(1, 3, dtype=torch.float16)
    >>> gru_cell([zero, zero], [zero[:, :1] + 2])[0].item()
    1.0
    """
    ours, theirs, *biases = (part.float() for part in gates)
    reset, update, new = ours.chunk(3, -1)
    reset_h, update_h, new_h = theirs.chunk(3, -1)
    if biases:
        (reset_1, update_1, new_1), (reset_2, update_2, new_2) = (bias.chunk(3) for bias in biases)
        reset, update, new = reset + reset_1, update + update_1, new + new_1
        reset_h, update_h, new_h = reset_h + reset_2, update_h + update_2, new_h + new_2
    candidate = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
    hidden = candidate + torch.sigmoid(update + update_h) * (state[0].float() - candidate)
    return (hidden.to(state[0].dtype),)


def _direction(
    cell: Callable[..., tuple[torch.Tensor, ...]],
    steps: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    low: torch.dtype,
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """All steps of one layer in one direction."""
    of_input, of_state, *rest = weights
    biases = [weight.to(low) for weight in rest if weight.ndim == 1]
    projections = [weight for weight in rest if weight.ndim == 2]
    carried = tuple(part.to(low) for part in state)
    outputs = []
    for step in steps:
        gates = [torch.matmul(step, of_input.t()), torch.matmul(carried[0], of_state.t()), *biases]
        carried = cell(gates, carried)
        for projection in projections:
            carried = (torch.matmul(carried[0], projection.t()), *carried[1:])
        outputs.append(carried[0])
    return outputs, carried


def _layers(
    cell: Callable[..., tuple[torch.Tensor, ...]],
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    options: Sequence[Any],
) -> tuple[torch.Tensor, ...]:
    """All layers and directions; ``options`` in the order of the schema."""
    _has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    low = _low_dtype(x)
    directions = 2 if bidirectional else 1
    width = len(params) // (num_layers * directions)  # weights a direction: 2, biases 2, a projection 1
    steps = list((x.transpose(0, 1) if batch_first else x).unbind(0))
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(num_layers):
        found = []
        for direction in range(directions):
            index = layer * directions + direction
            ordered = steps[::-1] if direction else steps
            state = [part[index] for part in states]
            outputs, carried = _direction(cell, ordered, state, params[index * width : (index + 1) * width], low)
            found.append(outputs[::-1] if direction else outputs)
            last.append(carried)
        steps = [torch.cat(parts, -1) for parts in zip(*found, strict=True)]
        if dropout and train and layer < num_layers - 1:
            steps = list(torch.dropout(torch.stack(steps), dropout, train).unbind(0))
    joined = torch.stack(steps, 1 if batch_first else 0)
    return (joined, *(torch.stack(parts) for parts in zip(*last, strict=True)))


def _low_dtype(x: torch.Tensor) -> torch.dtype:
    """The 16-bit dtype that a cell runs in: autocast's, or that of its input; fp32 where neither has one."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def _one_step(
    cell: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor, hx: Any, *weights: Any
) -> tuple[torch.Tensor, ...]:
    """A cell on its own."""
    states = hx if isinstance(hx, list | tuple) else [hx]
    return _direction(cell, [x], states, [weight for weight in weights if weight is not None], _low_dtype(x))[1]


def _fused() -> dict[str, Callable[..., Any]]:
    """The kernels by full overload name."""
    return {
        "aten::lstm.input": lambda x, hx, params, *options: _layers(lstm_cell, x, hx, params, options),
        "aten::gru.input": lambda x, hx, params, *options: _layers(gru_cell, x, [hx], params, options),
        "aten::lstm_cell": lambda *args: _one_step(lstm_cell, *args),
        "aten::gru_cell": lambda *args: _one_step(gru_cell, *args)[0],
    }


def _in_low_dtypes(original: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    """The fused kernel in 16 bits, torch's own otherwise."""

    def kernel(x: torch.Tensor, *args: Any) -> Any:
        return (fused if _low_dtype(x) in LOW_DTYPES else original)(x, *args)

    return kernel


def install_recurrent() -> Callable[[], None]:
    """Run ``nn.LSTM``, ``nn.GRU`` and their cells in 16 bits with fused cells, in the whole process.

    Packed sequences keep torch's own way on the CPU.

    Returns:
        A function that takes the kernels out again; calling it twice is harmless.

    Source: PyTorch, aten/src/ATen/native/RNN.cpp, the way of a CUDA tensor without cuDNN.

    >>> remove = install_recurrent()
    >>> with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
    ...     torch.nn.LSTM(2, 3)(torch.zeros(4, 1, 2))[0].dtype
    torch.float16
    >>> remove()
    """
    kernels = Overrides()
    originals = {name: native(name) for name in _fused()}
    for name, fused in _fused().items():
        for dispatch_key in ("AutogradCPU", "CPU"):  # above autograd, and for tensors of inference mode
            kernels.put(name, _in_low_dtypes(originals[name], fused), dispatch_key)
    return kernels.remove
