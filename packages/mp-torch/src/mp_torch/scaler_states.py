"""Loss scalers of other libraries: their saved states, in and out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.dtypes import nearest
from mp_torch.errors import AmpConfigError, CheckpointError
from mp_torch.scaling import ScaleState, fp32

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mp_reference.spec.loss_scale import LossScalePolicy

__all__ = ["SCALERS", "export_state", "import_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaler:
    """How one library saves its loss scaler.

    Args:
        keys: every key of its state.
        export: our policy and state -> its state.
        take: its state and our policy -> scale, growth tracker and hysteresis tracker.
        source: the code that these keys were read from.
    """

    keys: tuple[str, ...]
    export: Callable[[LossScalePolicy, ScaleState], dict[str, Any]]
    take: Callable[[Mapping[str, Any], LossScalePolicy], tuple[Any, Any, Any]]
    source: str


def _export_torch(policy: LossScalePolicy, state: ScaleState) -> dict[str, Any]:
    return {
        "scale": state.scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": policy.backoff_factor,
        "growth_interval": policy.growth_interval,
        "_growth_tracker": max(state.growth_tracker, 0),
    }


def _take_torch(saved: Mapping[str, Any], policy: LossScalePolicy) -> tuple[Any, Any, Any]:
    return saved["scale"], saved["_growth_tracker"], policy.hysteresis


def _export_npu(policy: LossScalePolicy, state: ScaleState) -> dict[str, Any]:
    return _export_torch(policy, state) | {"dynamic": policy.dynamic}


def _export_megatron(policy: LossScalePolicy, state: ScaleState) -> dict[str, Any]:
    del policy
    return {
        "scale": torch.tensor([state.scale], dtype=torch.float32),
        "growth_tracker": max(state.growth_tracker, 0),
        "hysteresis_tracker": state.hysteresis_tracker,
    }


def _take_megatron(saved: Mapping[str, Any], policy: LossScalePolicy) -> tuple[Any, Any, Any]:
    del policy
    return saved["scale"], saved["growth_tracker"], saved["hysteresis_tracker"]


def _export_deepspeed(policy: LossScalePolicy, state: ScaleState) -> dict[str, Any]:
    """DeepSpeed counts steps and remembers the last overflow; only their difference matters."""
    return {
        "dynamic_loss_scale": policy.dynamic,
        "cur_scale": state.scale,
        "cur_iter": state.growth_tracker + 1,
        "last_overflow_iter": -1,
        "scale_factor": policy.growth_factor,
        "scale_window": policy.growth_interval,
        "cur_hysteresis": state.hysteresis_tracker,
    }


def _take_deepspeed(saved: Mapping[str, Any], policy: LossScalePolicy) -> tuple[Any, Any, Any]:
    stable = saved["cur_iter"] - saved["last_overflow_iter"] - 1  # what its next step divides by the window
    counted = (stable - 1) % saved["scale_window"] if stable > 0 else -1
    return saved["cur_scale"], max(counted, policy.first_count), saved["cur_hysteresis"]


SCALERS: dict[str, Scaler] = {
    "torch.amp": Scaler(
        keys=("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"),
        export=_export_torch,
        take=_take_torch,
        source="torch 2.13, torch/amp/grad_scaler.py, GradScaler.state_dict",
    ),
    "torch_npu": Scaler(
        keys=("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker", "dynamic"),
        export=_export_npu,
        take=_take_torch,
        source="torch_npu 2.13, npu/amp/grad_scaler.py, GradScaler.state_dict",
    ),
    "megatron": Scaler(
        keys=("scale", "growth_tracker", "hysteresis_tracker"),
        export=_export_megatron,
        take=_take_megatron,
        source="Megatron-LM, core/optimizer/grad_scaler.py, DynamicGradScaler.state_dict",
    ),
    "deepspeed": Scaler(
        keys=(
            "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window",
            "cur_hysteresis",
        ),
        export=_export_deepspeed,
        take=_take_deepspeed,
        source="DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py, DynamicLossScaler's fields",
    ),
}  # fmt: skip
"""The scalers whose states can be taken over, and given back."""


def export_state(kind: str, policy: LossScalePolicy, state: ScaleState) -> dict[str, Any]:
    """Our loss scale as another scaler would save it.

    Args:
        kind: a key of ``SCALERS``.
        policy: ours, for the factors and the interval that some of them save.
        state: ours.

    Returns:
        What that scaler's ``load_state_dict`` takes.

    Raises:
        AmpConfigError: no such scaler.

    >>> from mp_torch.scaling import LossScale
    >>> export_state("torch.amp", LossScale(), ScaleState.initial(LossScale()))["_growth_tracker"]
    0
    """
    return _scaler(kind).export(policy, state)


def import_state(kind: str, policy: LossScalePolicy, saved: Mapping[str, Any]) -> ScaleState:
    """Another scaler's saved state as ours.

    Args:
        kind: a key of ``SCALERS``.
        policy: ours, which goes on holding.
        saved: that scaler's ``state_dict()``; a fused DeepSpeed scaler saves no hysteresis, which is then full.

    Returns:
        Our state; skips are counted from 0.

    Raises:
        AmpConfigError: no such scaler.
        CheckpointError: a missing or unknown key, or a scale that is not finite and above 0.

    >>> from mp_torch.scaling import LossScale
    >>> import_state("megatron", LossScale(), {"scale": 8.0, "growth_tracker": 3, "hysteresis_tracker": 1}).scale
    8.0
    """
    scaler = _scaler(kind)
    saved = {"cur_hysteresis": policy.hysteresis, **saved} if kind == "deepspeed" else saved
    for key in scaler.keys:
        if key not in saved:
            raise CheckpointError(
                f"a {kind} scaler state has the key {key!r}, this one has {', '.join(saved) or 'none'}"
            )
    for key in saved:
        if key not in scaler.keys:
            raise CheckpointError(f"a {kind} scaler state has no key {key!r}{nearest(key, scaler.keys)}")
    scale, growth, hysteresis = (float(one) for one in scaler.take(saved, policy))
    if not (math.isfinite(scale) and fp32(scale) > 0):
        raise CheckpointError(f"scale={scale!r} of the {kind} scaler must be finite and above 0 in fp32; start afresh")
    return ScaleState(scale=scale, growth_tracker=int(growth), hysteresis_tracker=int(hysteresis))


def _scaler(kind: str) -> Scaler:
    if kind not in SCALERS:
        raise AmpConfigError(f"kind={kind!r} is no known scaler{nearest(kind, SCALERS)}; known: {', '.join(SCALERS)}")
    return SCALERS[kind]
