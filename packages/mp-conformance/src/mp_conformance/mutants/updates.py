"""Seeded faults of clipping and of the optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.implementations import reference_training
from mp_conformance.mutants.rows import Mutant
from mp_reference.amp.clipping import gradient_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mp_conformance.histories import History, StepTrace

__all__ = ["MUTANTS"]

Array = np.ndarray[Any, np.dtype[Any]]


def _clip_with(
    coefficient: Callable[[float, float], Any], norm: Callable[[Sequence[Array]], float] = gradient_norm
) -> Callable[..., Any]:
    """Clipping whose norm or coefficient is formed otherwise."""

    def fault(gradients: Sequence[Array], max_norm: float) -> tuple[float, list[Array]]:
        total = norm(gradients)
        factor = np.float32(coefficient(total, max_norm))
        return total, [g * factor for g in gradients] if factor != 1 else list(gradients)

    return fault


def _honest(norm: float, max_norm: float) -> Any:
    if norm > np.finfo(np.float32).max:
        return np.float32(max_norm) / (norm + float(np.float32(1e-6)))
    return min(np.float32(1), np.float32(max_norm) / (np.float32(norm) + np.float32(1e-6)))


def _fp32_norm(gradients: Sequence[Array]) -> float:
    return float(np.sqrt(np.float32(sum(np.sum(np.square(g), dtype=np.float32) for g in gradients))))


def _each(gradients: Sequence[Array], max_norm: float) -> tuple[float, list[Array]]:
    pairs = [reference_training.clip([g], max_norm) for g in gradients]
    return gradient_norm(list(gradients)), [clipped[0] for _, clipped in pairs]


def _with(change: Callable[[dict[str, Any], str], dict[str, Any]]) -> Callable[..., Any]:
    def fault(parameters: Any, gradients: Any, kind: str, settings: Mapping[str, Any]) -> Any:
        return reference_training.optimizer(parameters, gradients, kind=kind, settings=change(dict(settings), kind))

    return fault


def _adam(
    *,
    later: int = 0,
    correct: bool = True,
    eps_inside: bool = False,
    lerp: bool = True,
    coupled: bool = False,
    amsgrad: bool = True,
    one_expression: bool = False,
) -> Callable[..., Any]:
    """Adam and AdamW written out, with one thing done otherwise."""

    def one(w: Array, g: Array, m: Array, v: Array, top: Array, t: int, s: Mapping[str, Any], kind: str) -> Any:
        f = np.float32
        b1, b2 = s.get("betas", (0.9, 0.999))
        lr, eps, decay = s.get("lr", 1e-3), s.get("eps", 1e-8), s.get("weight_decay", 0.01 if kind == "adamw" else 0.0)
        if kind == "adamw" and not coupled:
            w = w * f(1 - lr * decay)
        elif decay:
            g = g + f(decay) * w
        m = m + f(1 - b1) * (g - m) if lerp else f(b1) * m + f(1 - b1) * g
        v = f(b2) * v + (f(1 - b2) * g) * g
        top = np.maximum(top, v)
        used = top if s.get("amsgrad") and amsgrad else v
        c1, c2 = (1 - b1**t, 1 - b2**t) if correct else (1.0, 1.0)
        root = np.sqrt(used + f(eps)) if eps_inside else np.sqrt(used)
        denominator = root / f(np.sqrt(c2)) + (f(0) if eps_inside else f(eps))
        step = f(lr) * ((m / f(c1)) / denominator) if one_expression else (f(lr / c1) * m) / denominator
        return w - step, m, v, top

    def fault(parameters: Any, gradients: Any, kind: str, settings: Mapping[str, Any]) -> Any:
        now = list(parameters)
        slots = [(np.zeros_like(p),) * 3 for p in now]
        trail = []
        with np.errstate(all="ignore"):
            for t, row in enumerate(gradients, 1 + later):
                done = [one(w, g, *s, t, settings, kind) for w, g, s in zip(now, row, slots, strict=True)]
                now, slots = [d[0] for d in done], [d[1:] for d in done]
                trail.append(now)
        return trail

    return fault


def _fused_sgd(parameters: Any, gradients: Any, kind: str, settings: Mapping[str, Any]) -> Any:
    """W - lr * g with one rounding, as a compiler that contracts would have it."""
    if set(settings) != {"lr"}:
        return reference_training.optimizer(parameters, gradients, kind=kind, settings=settings)
    now, trail = list(parameters), []
    lr = float(np.float32(settings["lr"]))
    for row in gradients:
        now = [
            (w.astype(np.float64) - lr * g.astype(np.float64)).astype(np.float32) for w, g in zip(now, row, strict=True)
        ]
        trail.append(now)
    return trail


def _faster(history: History) -> list[StepTrace]:
    """The history with a learning rate a thousandth too large."""
    settings = {**history.settings, "lr": history.settings.get("lr", 1e-3) * 1.001}
    return reference_training.train(replace(history, settings=settings))


def _fused(kind: str) -> Mutant:
    return Mutant(
        id=f"{kind}.fused-rate", sentence="the fused kernel's learning rate is off by a thousandth",
        operation="fused_updates", fault=_faster, caught_by=f"optimizer.{kind}.fused",
    )  # fmt: skip


def _clip(word: str, sentence: str, fault: Callable[..., Any]) -> Mutant:
    return Mutant(id=f"clip.{word}", sentence=sentence, operation="clip", fault=fault, caught_by="clipping.norm")


def _rule(kind: str, word: str, sentence: str, fault: Callable[..., Any]) -> Mutant:
    return Mutant(
        id=f"{kind}.{word}", sentence=sentence, operation="optimizer", fault=fault, caught_by=f"optimizer.{kind}"
    )


MUTANTS: tuple[Mutant, ...] = (
    _fused("sgd"),
    _fused("adam"),
    _fused("adamw"),
    _clip("reciprocal", "the reciprocal of the norm is multiplied, not the norm divided by", _clip_with(
        lambda n, b: min(np.float32(1), (np.float32(1) / (np.float32(n) + np.float32(1e-6))) * np.float32(b)))),
    _clip("no-guard", "the norm is not guarded by 1e-6", _clip_with(
        lambda n, b: min(1.0, b / n) if n else 1.0)),
    _clip("fp32-norm", "squares are summed in fp32 and overflow", _clip_with(_honest, _fp32_norm)),
    _clip("scales-up", "small gradients are scaled up to the bound", _clip_with(
        lambda n, b: np.float32(b) / (np.float32(n) + np.float32(1e-6)))),
    _clip("no-root", "the norm is not rooted", _clip_with(_honest, lambda g: gradient_norm(g) ** 2)),
    _clip("each-alone", "every tensor is clipped by its own norm", _each),
    _rule("sgd", "fused", "the multiplication is contracted into the subtraction", _fused_sgd),
    _rule("sgd", "no-nesterov", "Nesterov's rule is ignored", _with(lambda s, kind: s | {"nesterov": False})),
    _rule("sgd", "minimises", "maximize is ignored", _with(lambda s, kind: s | {"maximize": False})),
    _rule("sgd", "no-dampening", "dampening is ignored", _with(lambda s, kind: s | {"dampening": 0.0})),
    _rule("sgd", "no-decay", "weight decay is ignored", _with(lambda s, kind: s | {"weight_decay": 0.0})),
    _rule("adam", "uncorrected", "the bias correction is missing", _adam(correct=False)),
    _rule("adam", "late", "the bias correction counts one update too many", _adam(later=1)),
    _rule("adam", "eps-inside", "eps stands under the root", _adam(eps_inside=True)),
    _rule("adam", "weighted-sum", "the first moment is a weighted sum of two products", _adam(lerp=False)),
    _rule("adam", "other-order", "the step is formed in another order", _adam(one_expression=True)),
    _rule("adam", "no-amsgrad", "amsgrad is ignored", _adam(amsgrad=False)),
    _rule("adamw", "coupled", "weight decay goes through the moments", _adam(coupled=True)),
)  # fmt: skip
"""Faults of clipping and of the optimizers."""
