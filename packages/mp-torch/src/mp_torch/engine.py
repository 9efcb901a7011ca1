"""AmpEngine: autocast, backward and step of mixed-precision training, in the order that keeps every promise."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch

from mp_torch.admission import checked_losses, checked_pair, checked_schedulers, original
from mp_torch.application import apply_, decision_on, stored_gradients
from mp_torch.assembly import Assembly
from mp_torch.buffers import BufferSnapshot
from mp_torch.choice import select_precision
from mp_torch.config import AmpConfig, AmpSettings
from mp_torch.contexts import Depth, Reentrant, uncompiled
from mp_torch.devices import device_of
from mp_torch.errors import AmpConfigError, AmpStateError
from mp_torch.explanation import DtypeContract, Explanation, dtype_contract, explanation, summary
from mp_torch.notices import Notices
from mp_torch.outcome import Step, idle_outcome
from mp_torch.parallel import ManyRanks
from mp_torch.persistence import Persistent
from mp_torch.phase import Phase, checked_boundary, checked_weight
from mp_torch.precision import run_backward
from mp_torch.ranks import unwrapped, why_fixed
from mp_torch.report import StepReport
from mp_torch.scaling import LossScale, MovingScale, fp32, low_dtype, representable
from mp_torch.update import OwnUpdater

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from mp_torch.decision import Decision, Gradient
    from mp_torch.ranks import Ranks
    from mp_torch.report import Outcome
    from mp_torch.scaling import ScaleState

__all__ = ["AmpEngine"]


class AmpEngine(ManyRanks, Persistent):
    """Trains one model in one precision.

    Args:
        model: its parameters live on one device; a ``-true`` precision casts them in place. May be compiled.
        optimizer: one, or a sequence of them; all share one loss scale and one decision.
        precision: see ``AmpConfig``.
        scheduler: a learning-rate scheduler, or a sequence of them; steps only when the update was applied.
        config: all settings at once, instead of ``precision`` and ``settings``.
        ranks: who trains together; told from the model unless given: the replicas of ``DistributedDataParallel``, the
            ranks of its DTensors, else this process alone.
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
        optimizers, model = checked_pair(model, optimizer), original(model)
        self.config = _settled_config(model, config, precision, settings)
        self.schedulers = checked_schedulers(scheduler, optimizers)
        self.model, self.optimizers = unwrapped(model), optimizers
        self.assembly = Assembly(self.model, optimizers, self.config, fixed=why_fixed(model))
        self.device = self.assembly.device
        if ranks is None:
            self._meet_ranks(model)
        else:
            self.ranks = ranks
        default = LossScale() if self.assembly.row.scaled else LossScale.off()
        self.scale = MovingScale(self.config.loss_scale or default, self.device)
        self.phase = Phase(accumulate_steps=self.config.accumulate_steps)
        self.buffers = BufferSnapshot(self.model, enabled=self.config.restore_buffers)
        self.update_index = 0
        self._depth = Depth()
        self._guard_()
        self._pending: Step | None = None
        self._notices = Notices(self.assembly)

    # ---- the loop ----

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward passes and losses; may be entered as often as wanted.

        Inside it ops run in the engine's precision whatever surrounds it, by the same rules in eager mode, under
        ``torch.compile`` and in recomputation. The first one with gradients opens the window: buffers are remembered.

        Returns:
            A context manager, which may be entered again and nested, and decorates functions.
        """
        return Reentrant(self._forward, self._depth)

    def _forward(self) -> AbstractContextManager[Any]:
        if torch.is_autocast_enabled(self.device.type):
            self._notices.outer_autocast()
        if not self.buffers.taken and not self.phase.open and torch.is_grad_enabled():
            self.device.clear_overflow_()
            self.buffers.take_()
        if self.ranks.count == 1:
            return self.assembly.context()
        stack = ExitStack()
        stack.enter_context(self.ranks.around("the forward pass"))
        stack.enter_context(self.assembly.context())
        return stack

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
            weight: what this micro-step counts in the mean, such as its number of samples. A further loss of it is
                multiplied by its own weight: give both the same.
            retain_graph: as in torch.

        Raises:
            AmpStateError: a loss that no gradient can flow from; ``boundary=False`` after the boundary; gradients that
                something else left before the window.
            AmpConfigError: a weight that is not a finite number above 0.
        """
        losses = checked_losses(loss)
        phase = self.phase.after_backward(boundary=checked_boundary(boundary), weight=checked_weight(weight))
        if self.phase.open:
            self.assembly.accumulate_()
        else:
            self.assembly.require_no_gradients()
            phase = replace(phase, loss_dtype=low_dtype(losses))
            self._notices.missing_snapshot(self.buffers)
        seeds = [self.scale.seed(one, phase.loss_dtype, weight) for one in losses]
        try:
            with self.ranks.micro_step(last=phase.complete), self.assembly.rules_context():
                run_backward(losses, seeds, retain_graph)
                if phase.complete and self.phase.open:
                    self.assembly.average_sums_(self.ranks)
        except BaseException as error:
            self._discard_()
            error.add_note(
                "the engine discarded the window's gradients, some of which were half made; repeat the window"
            )
            raise
        self.phase = phase

    def step(self) -> StepReport:
        """Apply the window's gradients, or skip the update if any unscaled one is not finite.

        Agree on norm and finiteness across ranks; decide; unscale with the scale that made these gradients; clip;
        update fp32 values; write back; only then move the scale. Clears the gradients. Collective: every rank calls
        it. Host syncs: none; on an accelerator the outcome of a step is read when the next one begins, or a report is.

        Returns:
            What happened. Before the boundary nothing does, and the report says so.

        Raises:
            AmpStateError: no ``backward()`` since the last step; more skips in a row than ``skip_limit``; a non-finite
                gradient under ``nonfinite="raise"``. Parameters, masters, moments and buffers keep their bits.
        """
        with self.ranks.around("step()"):
            return self._step()

    @uncompiled
    def _step(self) -> StepReport:
        if self.ranks.opens_windows:
            self._end_micro_step_()
        self.phase.require_backward()
        self.settle()
        if not self.phase.complete:
            return self._idle(f"accumulating: the boundary is not reached after micro-step {self.phase.micro_steps}")
        self.assembly.admitted.check()
        self.assembly.follow_limits_()
        self._notices.foreign_changes()
        divisor = self.divisor
        gradients = stored_gradients(self.assembly, divisor)
        if not self.ranks.any_gradient(bool(gradients)):
            return self._idle("no gradients", close=True)
        decision = decision_on(self.assembly, self.ranks, gradients, divisor)
        step = self._begun(gradients, decision)
        apply_(self.assembly, self.ranks, gradients, step, divisor=divisor, update_index=self.update_index)
        self._close_(step)
        return StepReport(lambda: self._told(step))

    def settle(self) -> None:
        """Learn the outcome of the last step, where the device had not told it yet.

        Raises:
            AmpStateError: that step was one skip too many, or not finite under ``nonfinite="raise"``.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        assert step.flags is not None
        step.found = [flag != 0 for flag in step.flags()]
        self.assembly.conclude_updaters_(step.found, step.active)
        before = self.scale.state
        self._conclude_(step)
        self._schedule_(step)
        if any(step.found):
            self._require_may_skip(step, before)

    # ---- the parts of a step ----

    def _end_micro_step_(self) -> None:
        """A schedule ran backward: count it, and keep 16-bit gradients in fp32 until the boundary."""
        self.phase = self.phase.after_backward(boundary=None, weight=1.0)
        with self.ranks.micro_step(last=self.phase.complete):
            if not self.phase.complete:
                self.assembly.accumulate_()

    def _begun(self, gradients: list[Gradient], decision: Decision) -> Step:
        """Both futures of the loss scale, and the outcome itself where it can be known now."""
        good, bad = self.scale.futures
        step = Step(
            names=[one.part.weight.name for one in gradients],
            decision=decision,
            scale=self._window_scale,
            good=good,
            bad=bad,
            micro_steps=self.phase.micro_steps,
            active=decision.active,
        )
        if isinstance(decision.found, list):
            step.found = decision.found
        elif any(isinstance(one, OwnUpdater) for one in self.assembly.updaters):  # its step() cannot be masked
            step.found = [flag != 0 for flag in decision.found.tolist()]
        else:
            step.flags = self.device.later(decision.found)
        if step.found is not None and any(step.found):
            self._require_may_skip(step, self.scale.state)
        return step

    def _close_(self, step: Step) -> None:
        """End the window: buffers, gradients, loss scale, schedulers."""
        if step.found is None:
            self.buffers.restore_(skipped=step.decision.found.amin())
            self.scale.choose_(step.decision.found.amax(), step.good, step.bad)
            self._pending = step
        else:
            if all(step.found):
                self.buffers.restore_()
            if self.scale.there is not None:
                self.scale.choose_(step.decision.found.amax(), step.good, step.bad)
            self._conclude_(step)
        self._clear_()
        if step.found is not None and self.schedulers:
            self._schedule_(step)

    def _conclude_(self, step: Step) -> None:
        """Once the outcome is known: loss scale, counters."""
        self._notices.outcome(step, self.scale)
        self.scale.state = step.next_state
        self.update_index += step.applied
        step.update_index = self.update_index

    def _schedule_(self, step: Step) -> None:
        """Schedulers whose optimizer was updated step, each of them whatever another raises."""
        with ExitStack() as stack:
            for one in reversed(self.schedulers):
                mine = [at for at, owner in enumerate(self.optimizers) if owner is getattr(one, "optimizer", None)]
                if step.applied_by(mine or range(len(self.optimizers))):
                    stack.callback(one.step)

    @uncompiled
    def _told(self, step: Step) -> Outcome:
        if self._pending is step:
            self.settle()
        return step.outcome(self.optimizers)

    def _require_may_skip(self, step: Step, state: ScaleState) -> None:
        policy = self.scale.policy
        try:
            state.require_may_skip(policy, step.cause)
        except AmpStateError:
            self._discard_()
            raise
        if self.config.nonfinite == "raise" and (not policy.dynamic or state.scale <= policy.min_scale):
            self._discard_()
            raise AmpStateError(
                f"non-finite gradient: {step.cause} at loss scale {state.scale!r}, which no smaller one could help; "
                "nothing was updated; look for infinities or NaNs in the data and the forward pass, or use "
                "nonfinite='skip'"
            )

    def _discard_(self) -> None:
        """Forget the window as if it had never opened."""
        self.buffers.restore_()
        self._clear_()

    def _clear_(self) -> None:
        self.assembly.clear_gradients_()
        self.phase = self.phase.after_step()
        self.buffers.taken = False
        if self._depth.value:  # one long block: what follows in it is the next window's
            self.buffers.take_()
        self.device.clear_overflow_()
        torch.clear_autocast_cache()  # of an outer autocast, which would go on using the old weights

    def _idle(self, reason: str, *, close: bool = False) -> StepReport:
        outcome = idle_outcome(reason, self._window_scale, self.scale.state, self.update_index, self.phase.micro_steps)
        if close:
            self._clear_()
        return StepReport(lambda: outcome)

    # ---- looking inside ----

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; waits for the last step on an accelerator."""
        self.settle()
        return self.scale.state.scale

    @property
    def divisor(self) -> float:
        """What ``step()`` will divide the stored gradients by: loss scale times the window's weight, in fp32."""
        self.settle()
        return fp32(self._window_scale * self.phase.weight)

    @property
    def _window_scale(self) -> float:
        return representable(self.scale.state.scale, self.phase.loss_dtype)

    def gradients(self) -> dict[str, Tensor]:
        """The stored gradients that ``step()`` would read, still scaled, by parameter name."""
        pairs = ((part.weight.name, part.weight.gradient()) for part in self.assembly.parts)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def masters(self) -> dict[str, Tensor]:
        """The fp32 values that the update works on, by parameter name: the parameter itself where it is fp32."""
        return {part.weight.name: part.weight.load() for part in self.assembly.parts}

    def dtypes(self) -> DtypeContract:
        """Which dtype holds what, read from the tensors themselves; prints as a table.

        Raises:
            AmpStateError: a tensor has another dtype than the precision promises.
        """
        return dtype_contract(self.assembly)

    def explain(self) -> Explanation:
        """What runs in which precision, per module, and which rule decided; prints as a table."""
        return explanation(self.assembly)

    def __repr__(self) -> str:
        """A readable summary."""
        return summary(self.assembly, self.scale, self.update_index)


def _settled_config(
    model: nn.Module, config: AmpConfig | None, precision: str | None, settings: AmpSettings
) -> AmpConfig:
    """One config, whichever way it was given, with a precision chosen."""
    given = dict(settings) if precision is None else {"precision": precision, **settings}
    if not isinstance(config, AmpConfig | None):
        raise AmpConfigError(f"config={config!r} must be an AmpConfig; AmpConfig.from_dict() makes one from a dict")
    if config is not None and given:
        raise AmpConfigError(f"config= and {', '.join(given)}= were both given; put the latter into the config")
    config = AmpConfig.from_dict(given) if config is None else config
    if config.precision == "auto":
        return replace(config, precision=str(select_precision(device_of(model.parameters()).device)))
    return config
