"""The fused LSTM and GRU cells that torch has for CUDA, for CPU tensors: fp32 inside, each result rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["gru_backward", "gru_forward", "kernels", "lstm_backward", "lstm_forward"]

Bias = torch.Tensor | None


def _up(x: torch.Tensor) -> torch.Tensor:
    """What a CUDA kernel computes in: fp32, or float64 for itself."""
    return x if x.dtype is torch.float64 else x.float()


def _wide(*parts: torch.Tensor | None) -> torch.Tensor:
    """The sum, widened, from the first to the last."""
    given = [_up(part) for part in parts if part is not None]
    total = given[0]
    for part in given[1:]:
        total = total + part
    return total


def lstm_forward(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor, input_bias: Bias = None,
    hidden_bias: Bias = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One LSTM cell.

    Args:
        input_gates: (batch, 4 * hidden), what the input contributes.
        hidden_gates: (batch, 4 * hidden), what the hidden state contributes.
        cx: (batch, hidden), the cell state.
        input_bias: (4 * hidden,) or None.
        hidden_bias: (4 * hidden,) or None.

    Returns:
        The next hidden and cell state, and the activated gates for the backward: each rounded once to 16 bits.

    Source: PyTorch, aten/src/ATen/native/cuda/RNN.cu, ``lstm_cell_forward``.

    >>> zero = torch.zeros(1, 4, dtype=torch.float16)
    >>> [x.flatten().tolist() for x in lstm_forward(zero, zero, zero[:, :1] + 2)]
    [[0.380859375], [1.0], [0.5, 0.5, 0.0, 0.5]]
    """
    enter, forget, candidate, leave = _wide(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, -1)
    enter, forget, leave = torch.sigmoid(enter), torch.sigmoid(forget), torch.sigmoid(leave)
    candidate = torch.tanh(candidate)
    cell = forget * _up(cx) + enter * candidate
    hidden = leave * torch.tanh(cell)
    low = input_gates.dtype
    return hidden.to(low), cell.to(low), torch.cat([enter, forget, candidate, leave], -1).to(low)


def lstm_backward(
    grad_hy: torch.Tensor | None, grad_cy: torch.Tensor | None, cx: torch.Tensor, cy: torch.Tensor,
    workspace: torch.Tensor, has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of one LSTM cell, from the rounded gates and states.

    Args:
        grad_hy: of the next hidden state, or None.
        grad_cy: of the next cell state, or None.
        cx: the cell state before.
        cy: the cell state after.
        workspace: the activated gates.
        has_bias: whether there were biases.

    Returns:
        The gradients of the gates (of the input and of the hidden state alike), of ``cx``, and of either bias (empty
        without).

    Source: PyTorch, aten/src/ATen/native/cuda/RNN.cu, ``lstm_cell_backward``.

    >>> one = torch.ones(1, 1, dtype=torch.float16)
    >>> gates = torch.tensor([[0.5, 0.5, 0.0, 0.5]], dtype=torch.float16)
    >>> lstm_backward(None, one, 2 * one, one, gates, False)[0].tolist()
    [[0.0, 0.5, 0.5, 0.0]]
    """
    enter, forget, candidate, leave = _up(workspace).chunk(4, -1)
    of_hidden = torch.zeros_like(_up(cx)) if grad_hy is None else _up(grad_hy)
    squashed = torch.tanh(_up(cy))
    of_leave = of_hidden * squashed
    of_cell = of_hidden * leave * (1 - squashed * squashed)
    if grad_cy is not None:
        of_cell = of_cell + _up(grad_cy)
    gates = torch.cat(
        [
            of_cell * candidate * (1 - enter) * enter,
            of_cell * _up(cx) * (1 - forget) * forget,
            of_cell * enter * (1 - candidate * candidate),
            of_leave * (1 - leave) * leave,
        ],
        -1,
    ).to(workspace.dtype)
    bias = gates.sum(0) if has_bias else gates.new_empty(0)
    return gates, (of_cell * forget).to(workspace.dtype), bias


def gru_forward(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, input_bias: Bias = None,
    hidden_bias: Bias = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One GRU cell.

    Args:
        input_gates: (batch, 3 * hidden), what the input contributes.
        hidden_gates: (batch, 3 * hidden), what the hidden state contributes.
        hx: (batch, hidden), the hidden state.
        input_bias: (3 * hidden,) or None.
        hidden_bias: (3 * hidden,) or None.

    Returns:
        The next hidden state, and what the backward needs, (batch, 5 * hidden): each rounded once to 16 bits.

    Source: PyTorch, aten/src/ATen/native/cuda/RNN.cu, ``gru_cell_forward``.

    >>> zero = torch.zeros(1, 3, dtype=torch.float16)
    >>> gru_forward(zero, zero, zero[:, :1] + 2)[0].item()
    1.0
    """
    ours, theirs = input_gates.chunk(3, -1), hidden_gates.chunk(3, -1)
    our_bias, their_bias = ((None,) * 3 if bias is None else bias.chunk(3, -1) for bias in (input_bias, hidden_bias))
    reset, update = (
        torch.sigmoid(_wide(ours[place], theirs[place], our_bias[place], their_bias[place])) for place in (0, 1)
    )
    pushed = _wide(theirs[2], their_bias[2])
    candidate = torch.tanh(_wide(ours[2], our_bias[2]) + reset * pushed)
    hidden = candidate + update * (_up(hx) - candidate)
    low = input_gates.dtype
    return hidden.to(low), torch.cat([reset, update, candidate, _up(hx), pushed], -1).to(low)


def gru_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of one GRU cell, from what the forward kept.

    Args:
        grad_hy: of the next hidden state.
        workspace: as the forward returned it.
        has_bias: whether there were biases.

    Returns:
        The gradients of the input's gates, the hidden state's gates, ``hx``, and the two biases (empty without).

    Source: PyTorch, aten/src/ATen/native/cuda/RNN.cu, ``gru_cell_backward``.

    >>> one = torch.ones(1, 1, dtype=torch.float16)
    >>> kept = torch.tensor([[0.5, 0.5, 0.0, 2.0, 0.0]], dtype=torch.float16)
    >>> gru_backward(one, kept, False)[0].tolist()
    [[0.0, 0.5, 0.5]]
    """
    reset, update, candidate, hx, pushed = _up(workspace).chunk(5, -1)
    grad = _up(grad_hy)
    of_update = grad * (hx - candidate) * (1 - update) * update
    of_candidate = grad * (1 - update) * (1 - candidate * candidate)
    of_reset = of_candidate * pushed * (1 - reset) * reset
    low = workspace.dtype
    ours = torch.cat([of_reset, of_update, of_candidate], -1).to(low)
    theirs = torch.cat([of_reset, of_update, of_candidate * reset], -1).to(low)
    biases = (ours.sum(0), theirs.sum(0)) if has_bias else (ours.new_empty(0), ours.new_empty(0))
    return ours, theirs, (grad * update).to(low), *biases


def kernels() -> dict[str, Callable[..., Any]]:
    """The four ops by full overload name; torch has kernels of them for CUDA alone.

    >>> sorted(kernels())[0]
    'aten::_thnn_fused_gru_cell'
    """
    return {
        "aten::_thnn_fused_lstm_cell": lstm_forward,
        "aten::_thnn_fused_lstm_cell_backward_impl": lstm_backward,
        "aten::_thnn_fused_gru_cell": gru_forward,
        "aten::_thnn_fused_gru_cell_backward": gru_backward,
    }
