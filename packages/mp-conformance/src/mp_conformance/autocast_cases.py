"""One small call of every op that autocast has a rule for on CUDA, and small trainings: the same code for any device.

Run with CPU tensors under ``mp_torch.emulate`` and with the tensors of a CUDA device, the results must have the same
dtypes and bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mp_torch.emulate.arithmetic import to_numpy
from mp_torch.emulate.dispatcher import op_overload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

__all__ = ["CALLS", "NOT_CALLED", "VARIANTS", "Inputs", "call_all", "train"]

VARIANTS = ("fp32", "low", "mixed", "fp64")
"""How the floating inputs of a call are chosen: all fp32, all 16-bit, in turn fp32 and 16-bit, all float64."""

NOT_CALLED: Mapping[str, str] = {
    "aten::cudnn_convolution": "only cuDNN has it",
    "aten::cudnn_convolution_transpose": "only cuDNN has it",
    "aten::_scaled_dot_product_flash_attention": "only CUDA kernels exist",
}
"""The ops with a rule that no kernel on this machine can run for a CUDA tensor, and why."""


class Inputs:
    """Makes the leaf tensors of one call; calling it gives the next, with values between 0.1 and 0.9.

    Args:
        device: where they lie.
        variant: one of ``VARIANTS``.
        low: the 16-bit dtype.
    """

    def __init__(self, device: str, variant: str, low: torch.dtype) -> None:
        self.device, self.variant, self.low = device, variant, low
        self.leaves: list[torch.Tensor] = []
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        """The next floating leaf, which wants a gradient."""
        dtypes = {
            "fp32": (torch.float32,), "low": (self.low,), "mixed": (torch.float32, self.low), "fp64": (torch.float64,)
        }[self.variant]  # fmt: skip
        values = torch.rand(shape, generator=self._generator) * 0.8 + 0.1
        leaf = values.to(dtypes[len(self.leaves) % len(dtypes)]).to(self.device).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def below(self, bound: int, *shape: int) -> torch.Tensor:
        """Integers from 0 to ``bound - 1``."""
        return torch.randint(0, bound, shape, generator=self._generator).to(self.device)

    def signs(self, *shape: int) -> torch.Tensor:
        """Integers 1 and -1."""
        return self.below(2, *shape) * 2 - 1


def _each(names: str, arguments: Callable[[Inputs], tuple[Any, ...]]) -> dict[str, Callable[[Inputs], tuple[Any, ...]]]:
    return {f"aten::{name}": arguments for name in names.split()}


_GEOMETRY = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

CALLS: Mapping[str, Callable[[Inputs], tuple[Any, ...]]] = {
    # lower_precision_fp
    **_each("_convolution.deprecated", lambda t: (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), *_GEOMETRY, False, False, True)),
    **_each("_convolution", lambda t: (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), *_GEOMETRY, False, False, True, True)),
    **_each("convolution", lambda t: (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), *_GEOMETRY)),
    **_each("conv1d", lambda t: (t(1, 2, 5), t(3, 2, 3), t(3))),
    **_each("conv2d", lambda t: (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3))),
    **_each("conv3d", lambda t: (t(1, 2, 4, 4, 4), t(3, 2, 2, 2, 2), t(3))),
    **_each("conv_tbc", lambda t: (t(5, 2, 3), t(2, 3, 4), t(4))),
    **_each("conv_transpose1d", lambda t: (t(1, 2, 5), t(2, 3, 3), t(3))),
    **_each("conv_transpose2d.input", lambda t: (t(1, 2, 4, 4), t(2, 3, 3, 3), t(3))),
    **_each("conv_transpose3d.input", lambda t: (t(1, 2, 3, 3, 3), t(2, 3, 2, 2, 2), t(3))),
    **_each("prelu", lambda t: (t(4) - 0.5, t(1))),
    **_each("mm matmul", lambda t: (t(3, 4), t(4, 5))),
    **_each("linear", lambda t: (t(3, 4), t(5, 4), t(5))),
    **_each("addmm", lambda t: (t(3, 5), t(3, 4), t(4, 5))),
    **_each("addmv", lambda t: (t(3), t(3, 4), t(4))),
    **_each("addr", lambda t: (t(3, 4), t(3), t(4))),
    **_each("mv", lambda t: (t(3, 4), t(4))),
    **_each("bmm", lambda t: (t(2, 3, 4), t(2, 4, 5))),
    **_each("baddbmm", lambda t: (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5))),
    **_each("addbmm", lambda t: (t(3, 5), t(2, 3, 4), t(2, 4, 5))),
    **_each("einsum", lambda t: ("ij,jk->ik", [t(3, 4), t(4, 5)])),
    **_each("chain_matmul linalg_multi_dot", lambda t: ([t(3, 4), t(4, 5), t(5, 2)],)),
    **_each("linalg_vecdot", lambda t: (t(3, 4), t(3, 4))),
    **_each("rnn_tanh_cell rnn_relu_cell", lambda t: (t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4))),
    **_each("lstm_cell", lambda t: (t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16))),
    **_each("gru_cell", lambda t: (t(2, 3), t(2, 4), t(12, 3), t(12, 4), t(12), t(12))),
    **_each("_thnn_fused_lstm_cell", lambda t: (t(2, 16), t(2, 16), t(2, 4), t(16), t(16))),
    **_each("_thnn_fused_gru_cell", lambda t: (t(2, 12), t(2, 12), t(2, 4), t(12), t(12))),
    **_each("scaled_dot_product_attention", lambda t: (t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8))),
    # fp32
    **_each(
        "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh softplus tan", lambda t: (t(6),)
    ),
    **_each("pow.Tensor_Scalar", lambda t: (t(6), 1.5)),
    **_each("pow.Tensor_Tensor", lambda t: (t(6), t(6))),
    **_each("pow.Scalar", lambda t: (1.5, t(6))),
    **_each("layer_norm", lambda t: (t(3, 6), [6], t(6), t(6))),
    **_each("native_layer_norm", lambda t: (t(3, 6), [6], t(6), t(6), 1e-5)),
    **_each("rms_norm", lambda t: (t(3, 6), [6], t(6))),
    **_each("group_norm", lambda t: (t(2, 4, 3), 2, t(4), t(4))),
    **_each("frobenius_norm.dim nuclear_norm.dim", lambda t: (t(3, 4), [0, 1])),
    **_each("nuclear_norm", lambda t: (t(3, 4),)),
    **_each("cosine_similarity", lambda t: (t(3, 4), t(3, 4))),
    **_each("poisson_nll_loss", lambda t: (t(4), t(4), True, False, 1e-8, 1)),
    **_each("cosine_embedding_loss", lambda t: (t(3, 4), t(3, 4), t.signs(3))),
    **_each("nll_loss", lambda t: (t(3, 4), t.below(4, 3))),
    **_each("nll_loss2d", lambda t: (t(2, 3, 4, 4), t.below(3, 2, 4, 4))),
    **_each("hinge_embedding_loss soft_margin_loss", lambda t: (t(4), t.signs(4))),
    **_each("kl_div l1_loss smooth_l1_loss huber_loss mse_loss", lambda t: (t(4), t(4))),
    **_each("binary_cross_entropy_with_logits dist", lambda t: (t(4), t(4))),
    **_each("margin_ranking_loss", lambda t: (t(4), t(4), t.signs(4))),
    **_each("multilabel_margin_loss", lambda t: (t(3, 4), t.below(4, 3, 4))),
    **_each("multi_margin_loss", lambda t: (t(3, 4), t.below(4, 3))),
    **_each("triplet_margin_loss", lambda t: (t(3, 4), t(3, 4), t(3, 4))),
    **_each("pdist", lambda t: (t(4, 3),)),
    **_each("cdist", lambda t: (t(3, 4), t(2, 4))),
    **_each("renorm", lambda t: (t(3, 4), 2, 0, 1.0)),
    **_each("logsumexp", lambda t: (t(3, 4), [1])),
    **_each("upsample_nearest1d _upsample_nearest_exact1d", lambda t: (t(1, 2, 4), [7])),
    **_each("upsample_nearest2d _upsample_nearest_exact2d", lambda t: (t(1, 2, 4, 4), [7, 7])),
    **_each("upsample_nearest3d _upsample_nearest_exact3d", lambda t: (t(1, 2, 3, 3, 3), [5, 5, 5])),
    **_each("upsample_linear1d", lambda t: (t(1, 2, 4), [7], False)),
    **_each(
        "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa",
        lambda t: (t(1, 2, 4, 4), [7, 7], False),
    ),
    **_each("upsample_trilinear3d", lambda t: (t(1, 2, 3, 3, 3), [5, 5, 5], False)),
    # fp32_set_opt_dtype and fp32_append_dtype
    **_each("sum prod linalg_vector_norm", lambda t: (t(6),)),
    **_each("sum.dim_IntList", lambda t: (t(3, 4), [1])),
    **_each("prod.dim_int softmax.int log_softmax.int cumprod cumsum", lambda t: (t(3, 4), 1)),
    **_each("linalg_matrix_norm", lambda t: (t(3, 3), 1)),
    **_each("linalg_matrix_norm.str_ord", lambda t: (t(3, 3), "fro")),
    **_each("norm.Scalar", lambda t: (t(6), 2)),
    **_each("norm.ScalarOpt_dim", lambda t: (t(3, 4), 2, [1])),
    # promote and banned
    **_each("addcdiv addcmul", lambda t: (t(4), t(4), t(4))),
    **_each("atan2 dot vdot binary_cross_entropy", lambda t: (t(4), t(4))),
    **_each("bilinear", lambda t: (t(2, 3), t(2, 4), t(5, 3, 4), t(5))),
    **_each("cross", lambda t: (t(2, 3), t(2, 3), 1)),
    **_each("grid_sampler", lambda t: (t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, False)),
    **_each("index_put", lambda t: (t(4), [t.below(4, 1)], t(1))),
    **_each("tensordot", lambda t: (t(2, 3, 4), t(3, 4, 5), [1, 2], [0, 1])),
    **_each("scatter_add", lambda t: (t(2, 3), 0, t.below(2, 2, 3), t(2, 3))),
}
"""The arguments of one call of each op, by full overload name."""


def _floats(out: Any) -> list[torch.Tensor]:
    found = out if isinstance(out, list | tuple) else (out,)
    return [x for x in found if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _call(name: str, inputs: Inputs) -> list[torch.Tensor] | str:
    """Results and gradients, or the name of the exception."""
    try:
        with torch.autocast(inputs.device, dtype=inputs.low), sdpa_kernel(SDPBackend.MATH):
            outputs = _floats(op_overload(name)(*CALLS[name](inputs)))
        wanted = [x for x in outputs if x.requires_grad]
        grads = torch.autograd.grad(wanted, inputs.leaves, [torch.ones_like(x) for x in wanted], allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:  # a refusal is an answer too, and compared
        return type(error).__name__
    return [*outputs, *(x for x in grads if x is not None)]


def call_all(device: str, low: torch.dtype) -> dict[str, list[np.ndarray[Any, Any]] | str]:
    """Every op in every variant under autocast, forward and backward.

    Args:
        device: "cpu" (under an emulation) or "cuda".
        low: what autocast casts to.

    Returns:
        By "op variant": the floating results and then the gradients, or the name of the exception.

    Source: this project.
    """
    results: dict[str, list[np.ndarray[Any, Any]] | str] = {}
    for name in CALLS:
        for variant in VARIANTS:
            found = _call(name, Inputs(device, variant, low))
            results[f"{name} {variant}"] = found if isinstance(found, str) else [to_numpy(x.cpu()) for x in found]
    return results


class _Recurrent(nn.Module):
    """Embedding, a bidirectional LSTM of two layers, a GRU, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.head = nn.GRU(12, 6, batch_first=True), nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.gru(self.lstm(self.tokens(x))[0])[0])
        return logits.flatten(0, 1)


class _Transformer(nn.Module):
    """Embedding, one pre-norm block with ``nn.MultiheadAttention``, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        n = self.norm_1(h)
        h = h + self.attention(n, n, n)[0]
        logits: torch.Tensor = self.head(h + self.feed(self.norm_2(h)))
        return logits.flatten(0, 1)


def train(kind: str, device: str, low: torch.dtype, steps: int = 10) -> list[np.ndarray[Any, Any]]:
    """Steps of mixed-precision training with torch's own autocast and gradient scaler.

    Args:
        kind: "mlp", "transformer" or "recurrent".
        device: "cpu" (under an emulation) or "cuda".
        low: what autocast casts to.
        steps: how many.

    Returns:
        The losses, then every parameter after the last step.

    Source: this project.
    """
    torch.manual_seed(0)
    if kind == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 11))
        x = torch.randn(40, 16)
    else:
        model = _Transformer() if kind == "transformer" else _Recurrent()
        x = torch.randint(0, 11, (5, 8))
    model, x, y = model.to(device), x.to(device), torch.randint(0, 11, (40,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False, fused=False)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=low):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's own
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [to_numpy(torch.stack(losses).cpu()), *(to_numpy(p.detach().cpu()) for p in model.parameters())]
