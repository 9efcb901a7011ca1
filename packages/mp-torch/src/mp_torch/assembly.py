"""Putting an engine together: check model and optimizers, cast, make masters, choose how each update is made."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mp_torch import master
from mp_torch.admission import (
    check_dtypes,
    check_optimizers,
    check_spectral_norms,
    checked_limit,
    sparse_parameters,
)
from mp_torch.decision import ClipSet
from mp_torch.devices import device_of
from mp_torch.drift import Admitted
from mp_torch.dtypes import Precision, precision_named
from mp_torch.errors import AmpConfigError, AmpStateError
from mp_torch.precision import JOINING_OPS, SAFE_OPS, OpRules
from mp_torch.ranks import cast_, local, place_of
from mp_torch.regions import SAFE_MODULES, STATISTICS, leave_region_, matching, run_in_region_
from mp_torch.update import OwnUpdater, Updater, updater_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from mp_torch.config import AmpConfig
    from mp_torch.devices import Device
    from mp_torch.ranks import Ranks

__all__ = ["Assembly", "Part"]


@dataclass(slots=True)
class Part:
    """One trained parameter and its places.

    Args:
        weight: what carries its bits.
        optimizer: place of its optimizer.
        group: place of its parameter group there.
        clip_set: place of the gradients that it is clipped with.
        key: place among all trained parameters.
    """

    weight: master.Weight
    optimizer: int
    group: int
    clip_set: int
    key: int


class Assembly:
    """Model, optimizers and device, checked and fitted to each other.

    Args:
        model: its parameters are cast in place where the precision stores 16 bits.
        optimizers: their groups get fp32 masters in place of 16-bit parameters.
        config: what is asked for.
        fixed: why parameters cannot change their dtype any more, if they cannot.

    Raises:
        AmpConfigError: what is asked for cannot be done with this model and these optimizers.
        UnsupportedDeviceError: nor on this device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        config: AmpConfig,
        fixed: str | None = None,
    ) -> None:
        self.model, self.optimizers, self.config, self.fixed = model, list(optimizers), config, fixed
        self.device: Device = device_of(model.parameters())
        self.computes_on = self.device.type  # also where shards wait in host memory
        self.row: Precision = precision_named(config.precision)
        self.probe = self.device.probe()
        self.device.require(config.precision, self.probe)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        check_optimizers(self.optimizers, self.names)
        self.kept = self._kept_modules()
        self.statistics = matching(model, STATISTICS)
        check_dtypes(self.row, self.optimizers, self.names)
        if self.row.parameter != torch.float32:
            check_spectral_norms(model, self.kept)
        self.sparse = sparse_parameters(model)
        self.updaters = [self._updater(one) for one in self.optimizers]
        self.regions = self._install_regions()
        self.rules = self._op_rules()
        self.clip_sets, self.parts = self._parts()
        self.admitted = Admitted(model, self.optimizers, self.parts)

    def _kept_modules(self) -> dict[str, str]:
        """Modules that keep fp32: module name -> the pattern that says so."""
        lower = matching(self.model, self.config.lower)
        asked = matching(self.model, self.config.keep_fp32)
        for pattern in (*self.config.keep_fp32, *self.config.lower):
            if not matching(self.model, [pattern]):
                raise AmpConfigError(
                    f"pattern {pattern!r} names no module of {type(self.model).__name__}; its modules are "
                    f"{', '.join(name for name, _ in self.model.named_modules() if name) or 'none'}"
                )
        default = matching(self.model, SAFE_MODULES) if self.config.safe_ops else {}
        return {name: rule for name, rule in (default | asked).items() if name in asked or name not in lower}

    def _updater(self, optimizer: torch.optim.Optimizer) -> Updater:
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        dense = not any(one in self.sparse for one in trained)
        updater = updater_for(optimizer, self.config.update, fused=self.probe.fused_optimizers, dense=dense)
        temporary = self.row.parameter != torch.float32 and (
            self.row.carrier != "master" or self.config.master_weights != "fp32"
        )
        if isinstance(updater, OwnUpdater) and temporary:
            raise AmpConfigError(
                f"{type(optimizer).__name__} updates its own parameters, which precision={self.config.precision!r} "
                f"with master_weights={self.config.master_weights!r} keeps in 16 bits; use torch.optim.SGD, Adam or "
                "AdamW, or master_weights='fp32' with a -true precision"
            )
        return updater

    def _install_regions(self) -> dict[str, tuple[torch.dtype, str]]:
        """Give modules that the policy names a dtype of their own; returns what was decided and by which rule."""
        lower_dtype = self.row.compute
        for module in self.model.modules():
            leave_region_(module)  # of an engine before
        if lower_dtype is None:
            return {}
        regions = {name: (torch.float32, rule) for name, rule in self.kept.items()}
        lower = matching(self.model, self.config.lower)
        regions |= {name: (lower_dtype, rule) for name, rule in lower.items() if name not in self.kept}
        modules = dict(self.model.named_modules())
        for name, (dtype, _) in regions.items():
            run_in_region_(modules[name], self.computes_on, dtype)
        return regions

    def _op_rules(self) -> OpRules | None:
        if self.row.compute is None:
            return None
        safe = dict.fromkeys(SAFE_OPS, "fp32") | dict.fromkeys(JOINING_OPS, "promote")
        rules = (safe if self.config.safe_ops else {}) | dict(self.config.op_rules)
        return OpRules(rules, device_type=self.computes_on, lower=self.row.compute) if rules else None

    def context(self) -> AbstractContextManager[Any]:
        """Autocast and op rules for a forward pass, from the moment that it is entered."""
        if self.row.compute is None:
            plain = torch.autocast(self.computes_on, enabled=False)
            return _both(plain, self.device.tf32()) if self.row.tf32 else plain
        cast = torch.autocast(self.computes_on, dtype=self.row.compute, cache_enabled=False)
        return cast if self.rules is None else _both(cast, self.rules)

    def rules_context(self) -> AbstractContextManager[Any]:
        """Op rules alone, for what a backward pass computes again; in tf32 its matmuls are tf32 as well."""
        if self.row.tf32:
            return self.device.tf32()
        return nullcontext() if self.rules is None else self.rules

    def _parts(self) -> tuple[list[ClipSet], list[Part]]:
        """Cast the model, wrap every trained parameter, and put masters into the groups."""
        originals = {one: one.detach().clone() for one in self.names if self._is_lowered(one)}
        if originals and self.fixed is not None:
            raise AmpConfigError(
                f"precision={self.config.precision!r} stores {self.row.parameter} parameters, and those of this model "
                f"cannot be cast any more, because {self.fixed}"
            )
        for one in originals:
            cast_(one, self.row.parameter)
        sets, parts = [ClipSet(self.config.max_grad_norm)], list[Part]()
        self._limited: list[tuple[int, int]] = []
        for place, optimizer in enumerate(self.optimizers):
            for at, group in enumerate(optimizer.param_groups):
                clip_set = 0
                if "max_grad_norm" in group:
                    sets.append(ClipSet(checked_limit(group["max_grad_norm"])))
                    clip_set = len(sets) - 1
                    self._limited.append((place, at))
                wrapped = [self._weight(one, originals.get(one, one.detach())) for one in group["params"]]
                for weight in wrapped:
                    parts.append(Part(weight, place, at, clip_set, len(parts)))
                self._replace_(optimizer, group, wrapped)
        return sets, parts

    def _is_lowered(self, parameter: nn.Parameter) -> bool:
        if self.row.parameter == torch.float32 or parameter.dtype != torch.float32:  # others were chosen on purpose
            return False
        return parameter not in self._kept_parameters()

    def _kept_parameters(self) -> set[nn.Parameter]:
        modules = dict(self.model.named_modules())
        return {one for name in (*self.kept, *self.statistics) for one in modules[name].parameters()}

    def _weight(self, parameter: nn.Parameter, original: torch.Tensor) -> master.Weight:
        name = self.names[parameter]
        if parameter.dtype == torch.float32:
            return master.Weight(name, parameter, original)
        if self.row.carrier == "stochastic":
            return master.StochasticWeight(name, parameter, original, seed=self.config.seed)
        if self.row.carrier == "compensation":
            return master.CompensatedWeight(name, parameter, original)
        kinds = {"fp32": master.MasterWeight, "remainder": master.RemainderWeight, "none": master.BareWeight}
        return kinds[self.config.master_weights](name, parameter, original)

    # ---- over all parameters ----

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, in the optimizers' order."""
        return {part.weight.name: part.weight.parameter for part in self.parts}

    def follow_limits_(self) -> None:
        """Clip each group by the ``max_grad_norm`` that it has now.

        Raises:
            AmpConfigError: it is not a finite number above 0, nor ``None``.
        """
        for clip_set, (place, at) in enumerate(self._limited, start=1):
            limit = self.optimizers[place].param_groups[at].get("max_grad_norm")
            if limit != self.clip_sets[clip_set].max_norm:
                self.clip_sets[clip_set] = ClipSet(checked_limit(limit))

    def relayout_(self) -> None:
        """Take the model's present parameters, which are the old ones in another layout over the ranks."""
        present = dict(self.model.named_parameters())
        self.names = {parameter: name for name, parameter in present.items()}
        self.device = device_of(self.names)
        for part in self.parts:
            parameter = present[part.weight.name]
            begin, _ = place_of(part.weight.parameter)
            part.weight.relayout_(parameter, partial(_part_held, begin, parameter))
        for place, optimizer in enumerate(self.optimizers):
            for at, group in enumerate(optimizer.param_groups):
                group["params"] = [
                    part.weight.trained for part in self.parts if (part.optimizer, part.group) == (place, at)
                ]
        self.admitted = Admitted(self.model, self.optimizers, self.parts)

    def accumulate_(self) -> None:
        """Before another micro-step: move 16-bit gradients into fp32 sums, if that is asked for.

        Sparse ones always: torch has no kernel that adds them in 16 bits.
        """
        if self.row.parameter == torch.float32:
            return
        for part in self.parts:
            stored = part.weight.parameter.grad
            if self.config.accumulate == "fp32" or (stored is not None and stored.is_sparse):
                part.weight.accumulate_()

    def require_no_gradients(self) -> None:
        """Before the first backward of a window; zeros do no harm.

        Raises:
            AmpStateError: a parameter holds a gradient; it is named.
        """
        for part in self.parts:
            stored = part.weight.stored()
            if stored is not None and bool((stored.coalesce().values() if stored.is_sparse else stored).any()):
                raise AmpStateError(
                    f"{part.weight.name!r} holds a gradient that this engine did not make, from loss.backward() or "
                    "another engine, and the window would add its own, scaled, to it; give engine.backward() every "
                    "loss, or call model.zero_grad() before the window"
                )

    def average_sums_(self, ranks: Ranks) -> None:
        """At the boundary: what replicas added up apart in fp32, their exchange of gradients did not see.

        A replica that lacks a sum takes part with zeros, and looks whether another one has it.
        """
        if not ranks.sums_apart or self.row.parameter == torch.float32 or self.config.accumulate != "fp32":
            return
        weights = [part.weight for part in self.parts if part.weight.parameter.dtype != torch.float32]
        zeros = partial(torch.zeros_like, dtype=torch.float32)
        sums = [zeros(w.held) if w.accumulated is None else w.accumulated for w in weights]
        here = torch.tensor([float(w.accumulated is not None) for w in weights], device=self.device.device)
        ranks.average_([here, *sums])
        if any(w.accumulated is None for w in weights):
            for weight, total, count in zip(weights, sums, here.tolist(), strict=True):
                weight.accumulated = total if count else None

    def clear_gradients_(self) -> None:
        """Forget the window's gradients."""
        for part in self.parts:
            part.weight.clear_gradient()

    def reconcile_(self) -> list[str]:
        """Follow changes that somebody else made to 16-bit parameters; names of those that lost bits by it."""
        if self.row.parameter == torch.float32:
            return []
        free = self.device.reads_are_free
        return [part.weight.name for part in self.parts if part.weight.reconcile_(look=free)]

    def conclude_updaters_(self, found: list[bool], active: list[bool]) -> None:
        """Tell every optimizer that had gradients whether its update happened.

        Args:
            found: one for each optimizer, whether it must not step.
            active: one for each optimizer, whether it has gradients.
        """
        for updater, bad, here in zip(self.updaters, found, active, strict=True):
            if here:
                updater.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001  # schedulers ask
                updater.conclude_(applied=not bad)

    @staticmethod
    def _replace_(optimizer: torch.optim.Optimizer, group: dict[str, Any], weights: list[master.Weight]) -> None:
        """Put masters in place of 16-bit parameters, and move what state the optimizer has already."""
        for old, weight in zip(group["params"], weights, strict=True):
            if weight.trained is not old and old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[weight.trained] = {
                    key: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                    for key, value in state.items()
                }
        group["params"] = [weight.trained for weight in weights]


def _part_held(begin: tuple[int, ...], parameter: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
    """Of a tensor that begins at ``begin`` in the whole, what this rank holds of the parameter, on its device."""
    held = local(parameter.detach())
    offset, _ = place_of(parameter)
    first = [new - old for new, old in zip(offset, begin, strict=True)]
    part = carried[tuple(slice(at, at + size) for at, size in zip(first, held.shape, strict=True))]
    return part.to(held.device)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
