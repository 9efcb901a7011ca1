"""AmpEngine: autocast, backward and step of mixed-precision training, in the order that keeps every promise."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

import torch

from mp_torch.assembly import Assembly
from mp_torch.buffers import BufferSnapshot
from mp_torch.checkpoint import engine_state, load_engine_state_
from mp_torch.choice import select_precision
from mp_torch.config import AmpConfig, AmpSettings
from mp_torch.decision import Decision, Gradient, decide
from mp_torch.devices import device_of
from mp_torch.errors import AmpConfigError, AmpStateError
from mp_torch.phase import Phase, checked_weight
from mp_torch.ranks import LocalRanks
from mp_torch.report import OptimizerOutcome, Outcome, StepReport
from mp_torch.scaling import LossScale, ScaleState, fp32, representable
from mp_torch.update import Entry, OwnUpdater

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from mp_reference.spec.loss_scale import LossScalePolicy
    from mp_torch.ranks import Ranks

__all__ = ["AmpEngine"]


@dataclass(slots=True)
class _Step:
    """A step on its way: what was read, what was decided, and what follows from either outcome."""

    gradients: list[Gradient]
    decision: Decision
    scale: float
    good: ScaleState
    bad: ScaleState
    micro_steps: int
    active: list[bool]
    found: list[bool] | None = None
    flags: Callable[[], list[float]] | None = None
    lost: list[Tensor] = field(default_factory=list)
    clipped_norm: Any = None
    update_index: int = 0
    outcome: Outcome | None = None


class AmpEngine:
    """Trains one model in one precision.

    Args:
        model: its parameters live on one device; a ``-true`` precision casts them in place.
        optimizer: one, or a sequence of them; all share one loss scale and one decision.
        precision: see ``AmpConfig``.
        scheduler: a learning-rate scheduler, or a sequence of them; steps only when the update was applied.
        config: all settings at once, instead of ``precision`` and ``settings``.
        ranks: who trains together; this process alone unless given.
        settings: the fields of ``AmpConfig``.

    Raises:
        AmpConfigError: what is asked for contradicts itself, the model or the optimizers.
        UnsupportedDeviceError: the model's device cannot do it.

    >>> model = torch.nn.Linear(2, 1)
    >>> engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16-mixed")
    >>> with engine.autocast():
    ...     loss = model(torch.ones(4, 2)).float().square().mean()
    >>> engine.backward(loss)
    >>> engine.step().applied
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        precision: str | None = None,
        *,
        scheduler: Any = None,
        config: AmpConfig | None = None,
        ranks: Ranks | None = None,
        **settings: Unpack[AmpSettings],
    ) -> None:
        self.config = _settled_config(model, config, precision, settings)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self.schedulers = _checked_schedulers(scheduler)
        self.ranks: Ranks = LocalRanks() if ranks is None else ranks
        self.assembly = Assembly(model, optimizers, self.config)
        self.model, self.optimizers, self.device = model, optimizers, self.assembly.device
        self.policy: LossScalePolicy = _policy(self.config, scaled=self.assembly.row.scaled)
        self.scale_state = ScaleState.initial(self.policy)
        self._scale_there: Tensor | None = self._scale_tensor()
        self.phase = Phase(accumulate_steps=self.config.accumulate_steps)
        self.buffers = BufferSnapshot(model, enabled=self.config.restore_buffers)
        self.update_index = 0
        self._pending: _Step | None = None
        self._warned_outer = self._warned_snapshot = False

    # ---- the loop ----

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward passes and losses; may be entered as often as wanted.

        Inside it ops run in the engine's precision whatever surrounds it, by the same rules in eager mode, under
        ``torch.compile`` and in recomputation. The first one with gradients opens the window: buffers are remembered.

        Returns:
            A context manager.
        """
        self._warn_of_outer_autocast()
        if torch.is_grad_enabled() and not self.phase.open:
            self.device.clear_overflow_()
            self.buffers.take_()
        return self.assembly.context()

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        *,
        boundary: bool | None = None,
        weight: float = 1.0,
        retain_graph: bool | None = None,
    ) -> None:
        """One micro-step: accumulate the gradients of the scaled loss.

        The loss is scaled in fp32 whatever its dtype and shape: the scale is what its gradient starts with. The update
        will use the weighted mean over the window. A further call after the boundary adds another loss to the last
        micro-step.

        Args:
            loss: floating, of any shape (its elements are summed), or several losses of one micro-step.
            boundary: ``None`` counts up to ``accumulate_steps``; ``True`` or ``False`` decides by hand.
            weight: what this micro-step counts in the mean, such as its number of samples.
            retain_graph: as in torch.

        Raises:
            AmpStateError: a loss that no gradient can flow from; ``boundary=False`` after the boundary.
            AmpConfigError: a weight that is not a finite number above 0.
        """
        losses = _checked_losses(loss)
        phase = self.phase.after_backward(boundary=boundary, weight=checked_weight(weight))
        if not self.phase.open:
            phase = replace(phase, loss_dtype=_low_dtype(losses))
            self._warn_of_missing_snapshot()
        elif self.config.accumulate == "fp32":
            for part in self.assembly.parts:
                part.weight.accumulate_()
        seeds = [self._seed(one, phase, weight) for one in losses]
        with self.ranks.micro_step(last=phase.complete), self.assembly.rules_context():
            torch.autograd.backward(losses, seeds, retain_graph=retain_graph)
        self.phase = phase

    def step(self) -> StepReport:
        """Apply the window's gradients, or skip the update if any unscaled one is not finite.

        Agree on norm and finiteness across ranks; decide; unscale with the scale that made these gradients; clip; update
        fp32 values; write back; only then move the scale. Clears the gradients. Collective: every rank calls it. Host
        syncs: none; on an accelerator the outcome of a step is read when the next one begins, or a report is read.

        Returns:
            What happened. Before the boundary nothing does, and the report says so.

        Raises:
            AmpStateError: no ``backward()`` since the last step; more skips in a row than ``skip_limit``; a non-finite
                gradient under ``nonfinite="raise"``. Parameters, masters, moments and buffers keep their bits.
        """
        self.phase.require_backward()
        self.settle()
        if not self.phase.complete:
            return self._waiting()
        self._follow_foreign_changes()
        gradients = self._gradients()
        if not self.ranks.any_gradient(bool(gradients)):
            return self._nothing_to_do()
        decision = decide(
            gradients,
            self.assembly.clip_sets,
            divisor=self.divisor,
            norm_type=self.config.norm_type,
            exact=self.config.update == "exact",
            together=self.config.skip == "all",
            optimizers=len(self.optimizers),
            device=self.device,
            ranks=self.ranks,
        )
        step = self._prepare(gradients, decision)
        self._update_(step)
        self._close_(step)
        return StepReport(lambda: self._outcome_of(step))

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's own weights and buffers, copied; legal at any micro-step boundary.

        Returns:
            Plain values and tensors: format and version, config, loss scale, counters, masters or what stands for them,
            optimizer states, and within a window its gradients and buffer snapshot.
        """
        return engine_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as if the saved run had never stopped; load the model's own weights first.

        Args:
            state: from ``state_dict()``, of this version or an older one.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        load_engine_state_(self, state)
        torch.clear_autocast_cache()

    def resume_(self, scale: ScaleState, phase: Phase, update_index: int) -> None:
        """Take back counters; for checkpoints."""
        self.scale_state, self.phase, self.update_index = scale, phase, update_index
        self._scale_there = self._scale_tensor()

    # ---- the parts of a step ----

    def _gradients(self) -> list[Gradient]:
        """Every gradient of the window in fp32: as stored for the fused kernels, unscaled for the others."""
        folded = [one.folds_scale and self.config.clip_value is None for one in self.assembly.updaters]
        unit = torch.full((), self.divisor, dtype=torch.float32, device=self.device.device)
        gradients = []
        for part in self.assembly.parts:
            stored = part.weight.gradient()
            if stored is None:
                continue
            sparse = stored.coalesce() if stored.is_sparse else None
            value = (stored if sparse is None else sparse.values()).float()
            scaled = folded[part.optimizer]
            gradients.append(Gradient(part, value if scaled else value / unit, scaled, sparse))
        return gradients

    def _prepare(self, gradients: list[Gradient], decision: Decision) -> _Step:
        """Both futures of the loss scale, and the outcome itself where it can be known now."""
        step = _Step(
            gradients=gradients,
            decision=decision,
            scale=self._window_scale(),
            good=self.scale_state.after_good_step(self.policy),
            bad=self.scale_state.after_overflow(self.policy),
            micro_steps=self.phase.micro_steps,
            active=[any(one.part.optimizer == at for one in gradients) for at in range(len(self.optimizers))],
        )
        if isinstance(decision.found, list):
            step.found = decision.found
        elif any(isinstance(one, OwnUpdater) for one in self.assembly.updaters):
            step.found = [flag != 0 for flag in decision.found.tolist()]
        else:
            step.flags = self.device.later(decision.found)
        if step.found is not None and any(step.found):
            self._require_may_skip(step)
        return step

    def _update_(self, step: _Step) -> None:
        """Clip, update fp32 values, write the parameters from them."""
        groups: dict[tuple[int, int], list[tuple[Gradient, Entry]]] = {}
        for one in self._clipped(step):
            if step.found is None or not step.found[one.part.optimizer]:
                value = one.part.weight.load()
                entry = Entry(one.part.weight.trained, value, _whole(one))
                groups.setdefault((one.part.optimizer, one.part.group), []).append((one, entry))
        for (place, at), members in groups.items():
            group = self.optimizers[place].param_groups[at]
            skipped = None if step.found is not None else step.decision.found[place]
            scale = self._folded_scale(step, members[0][0])
            self.assembly.updaters[place].update_(group, [entry for _, entry in members], scale, skipped)
        if step.found is not None:
            self._conclude_updaters(step.found, step.active)
        for (place, _), members in groups.items():
            skipped = None if step.found is not None else step.decision.found[place] != 0
            for one, entry in members:
                self._store_(step, one, entry, skipped)

    def _clipped(self, step: _Step) -> list[Gradient]:
        """Gradients that nobody divides later are clipped here."""
        limit = self.config.clip_value
        if step.found is not None and all(step.found):
            return step.gradients
        clipped = []
        for one in step.gradients:
            coefficient = step.decision.coefficients[one.part.clip_set]
            value = one.value
            if not one.scaled and coefficient is not None and not _is_one(coefficient):
                value = value * coefficient
            if limit is not None:
                value = value.clamp(-limit, limit)
            clipped.append(one if value is one.value else replace(one, value=value))
        if any(new is not old for new, old in zip(clipped, step.gradients, strict=True)):
            step.clipped_norm = self._norm_of(clipped)
        return clipped

    def _norm_of(self, gradients: list[Gradient]) -> Any:
        return decide(
            gradients,
            [],
            divisor=self.divisor,
            norm_type=self.config.norm_type,
            exact=self.config.update == "exact",
            together=True,
            optimizers=len(self.optimizers),
            device=self.device,
            ranks=self.ranks,
        ).norm

    def _folded_scale(self, step: _Step, one: Gradient) -> Tensor | None:
        """What a fused kernel divides by: the divisor and the clip coefficient in one number."""
        if not one.scaled:
            return None
        coefficient = step.decision.coefficients[one.part.clip_set]
        if isinstance(coefficient, torch.Tensor):
            largest = torch.finfo(torch.float32).max
            return (self.divisor / coefficient).clamp(max=largest)
        folded = fp32(self.divisor / coefficient)
        return None if folded == 1.0 else torch.full((), folded, dtype=torch.float32, device=self.device.device)

    def _store_(self, step: _Step, one: Gradient, entry: Entry, skipped: Tensor | None) -> None:
        weight = one.part.weight
        before = None if weight.keeps_every_bit else weight.parameter.detach().clone()
        weight.store_(entry.value, skipped=skipped, update_index=self.update_index, key=one.part.key)
        if before is not None:
            asked = one.value != 0
            step.lost.append(torch.stack(((asked & (before == weight.parameter.detach())).sum(), asked.sum())))

    def _close_(self, step: _Step) -> None:
        """End the window: buffers, gradients, loss scale."""
        if step.found is None:
            every = step.decision.found.amin()
            self.buffers.restore_(skipped=every)
            self._move_scale_there(step)
            self._pending = step
        else:
            if all(step.found):
                self.buffers.restore_()
            self._conclude(step, step.found)
        self._clear()

    def _conclude_updaters(self, found: list[bool], active: list[bool]) -> None:
        for updater, bad, here in zip(self.assembly.updaters, found, active, strict=True):
            if here:
                updater.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001  # schedulers ask
                updater.conclude_(applied=not bad)

    def _conclude(self, step: _Step, found: list[bool]) -> None:
        """Once the outcome is known: counters, loss scale, schedulers."""
        step.found = found
        self.scale_state = step.bad if any(found) else step.good
        if self._applied(step):
            self.update_index += 1
            for one in self.schedulers:
                one.step()
        step.update_index = self.update_index

    def settle(self) -> None:
        """Learn the outcome of the last step, if the device had not told it yet.

        Raises:
            AmpStateError: that step was one skip too many, or not finite under ``nonfinite="raise"``.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        assert step.flags is not None
        found = [flag != 0 for flag in step.flags()]
        self._conclude_updaters(found, step.active)
        previous = self.scale_state
        self._conclude(step, found)
        if any(found):
            self._require_may_skip(step, previous)

    @staticmethod
    def _applied(step: _Step) -> bool:
        assert step.found is not None
        return any(here and not bad for here, bad in zip(step.active, step.found, strict=True))

    def _require_may_skip(self, step: _Step, before: ScaleState | None = None) -> None:
        state = self.scale_state if before is None else before
        cause = _cause(*step.decision.first_nonfinite(step.gradients))
        state.require_may_skip(self.policy, cause)
        helpless = not self.policy.dynamic or state.scale <= self.policy.min_scale
        if self.config.nonfinite == "raise" and helpless:
            if before is None:
                self.buffers.restore_()
                self._clear()
            raise AmpStateError(
                f"non-finite gradient: {cause} at loss scale {state.scale!r}, which no smaller one could help; nothing was "
                "updated; look for infinities or NaNs in the data and the forward pass, or use nonfinite='skip'"
            )

    # ---- the loss scale ----

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; waits for the last step on an accelerator."""
        self.settle()
        return self.scale_state.scale

    @property
    def divisor(self) -> float:
        """What ``step()`` will divide the stored gradients by: loss scale times the window's weight, in fp32."""
        self.settle()
        return fp32(self._window_scale() * self.phase.weight)

    def _window_scale(self) -> float:
        return representable(self.scale_state.scale, self.phase.loss_dtype)

    def _seed(self, loss: Tensor, phase: Phase, weight: float) -> Tensor:
        """The gradient that a loss starts with: scale times weight."""
        if self._scale_there is None:
            scale = fp32(representable(self.scale_state.scale, phase.loss_dtype) * weight)
            return torch.full_like(loss, scale, requires_grad=False)
        scale_there = self._scale_there
        if phase.loss_dtype is not None:
            capped = scale_there.clamp(max=2.0**15) if phase.loss_dtype == torch.float16 else scale_there
            scale_there = capped.to(phase.loss_dtype).float()
        if weight != 1.0:
            scale_there = (scale_there.double() * weight).float()
        return scale_there.to(loss.dtype).expand(loss.shape)

    def _scale_tensor(self) -> Tensor | None:
        """The scale on the device, where reading what it became would mean waiting."""
        if self.device.reads_are_free:
            return None
        return torch.full((), self.scale_state.scale, dtype=torch.float32, device=self.device.device)

    def _move_scale_there(self, step: _Step) -> None:
        """The host knows both futures; the device, which knows the outcome, chooses."""
        assert self._scale_there is not None
        found = step.decision.found.amax()
        good, bad = (torch.full_like(self._scale_there, fp32(one.scale)) for one in (step.good, step.bad))
        self._scale_there = torch.where(found != 0, bad, good)

    # ---- what a step says ----

    def _waiting(self) -> StepReport:
        phase = self.phase
        full = f" of {phase.accumulate_steps}" if phase.accumulate_steps > 1 else ""
        return self._idle(f"accumulating: {phase.micro_steps}{full} micro-steps, the boundary is not reached")

    def _nothing_to_do(self) -> StepReport:
        report = self._idle("no gradients")
        self._clear()
        return report

    def _idle(self, reason: str) -> StepReport:
        scale = self.scale_state
        outcome = Outcome(
            applied=False, skipped=False, reason=reason, grad_norm=0.0, clipped_norm=0.0, clip_coef=1.0,
            loss_scale=self._window_scale(), next_loss_scale=scale.scale, first_nonfinite=None, nonfinite_kind=None,
            update_index=self.update_index, consecutive_skips=scale.consecutive_skips, micro_steps=self.phase.micro_steps,
        )  # fmt: skip
        return StepReport(lambda: outcome)

    def _outcome_of(self, step: _Step) -> Outcome:
        if self._pending is step:
            self.settle()
        found = step.found
        assert found is not None
        name, kind = step.decision.first_nonfinite(step.gradients) if any(found) else (None, None)
        cause = _cause(name, kind)
        norm = float(step.decision.norm)
        coefficient = (
            1.0 if all(found) else min((float(c) for c in step.decision.coefficients if c is not None), default=1.0)
        )
        clipped = (
            norm if all(found) else fp32(norm * coefficient) if step.clipped_norm is None else float(step.clipped_norm)
        )
        skipped = any(found)
        return Outcome(
            applied=self._applied(step),
            skipped=skipped,
            reason=f"non-finite gradient: {cause}" if skipped else "",
            grad_norm=norm,
            clipped_norm=clipped,
            clip_coef=coefficient,
            loss_scale=step.scale,
            next_loss_scale=(step.bad if skipped else step.good).scale,
            first_nonfinite=name,
            nonfinite_kind=kind,
            update_index=step.update_index,
            consecutive_skips=(step.bad if skipped else step.good).consecutive_skips,
            micro_steps=step.micro_steps,
            rounded_away=_share(step.lost),
            optimizers=tuple(
                OptimizerOutcome(
                    name=f"{type(optimizer).__name__} {place}",
                    applied=here and not bad,
                    skipped=here and bad,
                    reason="" if here and not bad else f"non-finite gradient: {cause}" if here else "no gradients",
                )
                for place, (optimizer, here, bad) in enumerate(zip(self.optimizers, step.active, found, strict=True))
            ),
        )

    # ---- looking inside ----

    def gradients(self) -> dict[str, Tensor]:
        """The stored gradients that ``step()`` would read, still scaled, by parameter name."""
        pairs = ((part.weight.name, part.weight.gradient()) for part in self.assembly.parts)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def masters(self) -> dict[str, Tensor]:
        """The fp32 values that the update works on, by parameter name: the parameter itself where it is fp32."""
        return {part.weight.name: part.weight.load() for part in self.assembly.parts}

    def _clear(self) -> None:
        for part in self.assembly.parts:
            part.weight.clear_gradient()
        self.phase = self.phase.after_step()
        self.buffers.taken = False
        torch.clear_autocast_cache()

    def _follow_foreign_changes(self) -> None:
        changed = [part.weight.name for part in self.assembly.parts if part.weight.reconcile_()]
        if changed:
            warnings.warn(
                f"{len(changed)} parameters, {changed[0]!r} first, were changed from outside; their masters are rebuilt from "
                "them and lose the bits that 16 do not hold. Load the engine's state as well to keep them",
                stacklevel=3,
            )

    def _warn_of_outer_autocast(self) -> None:
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and not self._warned_outer:
            outer, inner = torch.get_autocast_dtype(kind), self.assembly.row.compute
            if outer != inner:
                self._warned_outer = True
                warnings.warn(
                    f"engine.autocast() inside torch.autocast of {outer}: within it the engine's precision "
                    f"{self.config.precision!r} holds",
                    stacklevel=3,
                )

    def _warn_of_missing_snapshot(self) -> None:
        if self.buffers.needed and not self.buffers.taken and not self._warned_snapshot:
            self._warned_snapshot = True
            warnings.warn(
                "backward() of a loss that was not computed inside engine.autocast(): if the step is skipped, buffers such as "
                "BatchNorm statistics cannot be given back; enter it around the forward, or set restore_buffers=False",
                stacklevel=3,
            )


def _settled_config(
    model: nn.Module, config: AmpConfig | None, precision: str | None, settings: AmpSettings
) -> AmpConfig:
    if config is not None and (precision is not None or settings):
        given = ", ".join(["precision"] * (precision is not None) + list(settings))
        raise AmpConfigError(f"config= and {given}= were both given; put {given} into the config")
    if config is None:
        config = AmpConfig.from_dict(({} if precision is None else {"precision": precision}) | dict(settings))
    if config.precision == "auto":
        config = replace(config, precision=str(select_precision(device_of(model.parameters()).device)))
    return config


def _policy(config: AmpConfig, *, scaled: bool) -> LossScalePolicy:
    if config.loss_scale is not None:
        return config.loss_scale
    return LossScale() if scaled else LossScale.off()


def _checked_schedulers(scheduler: Any) -> list[Any]:
    schedulers = [] if scheduler is None else list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
    for one in schedulers:
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise AmpConfigError(
                "ReduceLROnPlateau needs a metric at every step(), which the engine does not have; leave it out and call "
                "scheduler.step(metric) yourself if report.applied"
            )
        if not callable(getattr(one, "step", None)):
            raise AmpConfigError(f"scheduler={one!r} has no step(); pass a torch.optim.lr_scheduler, or a list of them")
    return schedulers


def _checked_losses(loss: Tensor | Sequence[Tensor]) -> list[Tensor]:
    losses = [loss] if isinstance(loss, torch.Tensor) else list(loss)
    for one in losses:
        if not one.requires_grad:
            raise AmpStateError(
                "backward() of a loss that needs no gradient: it was computed under no_grad, or from frozen parameters only; "
                "compute it with gradients enabled"
            )
    if not losses:
        raise AmpStateError("backward() of no loss at all; pass one, or a sequence of them")
    return losses


def _low_dtype(losses: Sequence[Tensor]) -> torch.dtype | None:
    low = [one.dtype for one in losses if one.dtype in (torch.float16, torch.bfloat16)]
    return torch.float16 if torch.float16 in low else low[0] if low else None


def _cause(name: str | None, kind: str | None) -> str:
    return "the device's overflow flag is set" if name is None else f"{kind} in {name}"


def _whole(gradient: Gradient) -> Tensor:
    if gradient.sparse is None:
        return gradient.value
    sparse = gradient.sparse
    return torch.sparse_coo_tensor(sparse.indices(), gradient.value, sparse.shape, is_coalesced=True)


def _is_one(coefficient: Any) -> bool:
    return not isinstance(coefficient, torch.Tensor) and coefficient >= 1.0


def _share(lost: list[Tensor]) -> float | None:
    if not lost:
        return None
    away, asked = torch.stack(lost).sum(0).tolist()
    return away / asked if asked else 0.0
