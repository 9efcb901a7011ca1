"""Seeded faults of many ranks: what they exchange, what they decide alone, what they count twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance.histories import StepTrace
from mp_conformance.implementations import reference_training
from mp_conformance.layouts import LAYOUTS, PARAMETERS
from mp_conformance.mutants.rows import Mutant
from mp_reference.amp.clipping import gradient_norm
from mp_reference.amp.step import StepState, divisor_of, initial_state, step
from mp_reference.amp.stochastic import random_bits16
from mp_reference.numerics.rounding import round_to
from mp_reference.spec.formats import BF16, FP16

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mp_conformance.histories import History
    from mp_conformance.layouts import Layout
    from mp_reference.spec.formats import FloatFormat

__all__ = ["MUTANTS"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class _View:
    """What there is to see for one rank in one step.

    ``micros`` are, for each rank, place and micro-step of the rank, what it adds to the whole gradient; ``pooled`` is
    what the exchange made of them.
    """

    history: History
    layout: Layout
    rank: int
    micros: Sequence[Sequence[Sequence[Array]]]
    pooled: Sequence[Array] = ()

    def own(self) -> list[Array]:
        """What this rank has before the exchange."""
        return [_sum(parts) for parts in self.micros[self.rank]]

    def part(self, cut: Callable[[int, int, tuple[int, ...]], tuple[slice, ...]]) -> list[Array]:
        """The pooled gradients of this rank's parameters, cut by a method of the layout."""
        places = self.layout.trains(self.rank, len(self.pooled))
        return [self.pooled[place][cut(self.rank, place, self.pooled[place].shape)] for place in places]

    def held(self) -> list[Array]:
        """What this rank holds of the pooled gradients."""
        return self.part(self.layout.held)

    def computed(self) -> list[Array]:
        """What all ranks know that share a window with this one."""
        return self.part(self.layout.computed)


def _sum(parts: Sequence[Array]) -> Array:
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    return total


def _mean(shares: list[Array], rank: int) -> Array:
    return _sum(shares) / np.float32(len(shares))


def _pool(view: _View, mean: Callable[[list[Array], int], Array], adds_copies: bool = True) -> list[Array]:
    """One gradient a parameter: ranks of a share are put together, then the shares are averaged."""
    layout, pooled = view.layout, []
    for place in range(len(view.history.parameters)):
        shares: list[list[Array]] = [[] for _ in range(layout.shares)]
        for rank in range(layout.world):
            copies = place == len(PARAMETERS) - 1 or (place == PARAMETERS.index("row.bias") and not adds_copies)
            if place in layout.trains(rank, len(view.history.parameters)) and not (copies and rank % layout.tensor):
                shares[rank // layout.tensor % layout.shares].append(_sum(view.micros[rank][place]))
        pooled.append(mean([_sum(parts) for parts in shares], view.rank))
    return pooled


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """All ranks in one process, with one thing done wrong.

    Args:
        pool: makes one gradient a parameter of all ranks' micro-steps.
        decides: the gradients whose finiteness decides whether a rank updates; all of them where honest.
        scales: the gradients whose finiteness moves a rank's loss scale.
        norm: of a rank's view and divisor; None is honest.
        bits: what a rank's whole parameter is rounded with.
        says: what a rank reports.
    """

    pool: Callable[[_View], list[Array]] = lambda view: _pool(view, _mean)
    decides: Callable[[_View], Sequence[Array]] = lambda view: view.pooled
    scales: Callable[[_View], Sequence[Array]] = lambda view: view.pooled
    norm: Callable[[_View, np.float32], float] | None = None
    bits: Callable[[_View, StepState], list[Array] | None] | None = None
    says: Callable[[_View], str] = lambda _view: ""

    def __call__(self, histories: Sequence[History], layout: str) -> list[list[list[StepTrace]]]:
        """The operation."""
        rows = LAYOUTS[layout]
        with np.errstate(all="ignore"):
            return [[self._run(history, rows, rank) for history in histories] for rank in range(rows.world)]

    def _run(self, history: History, layout: Layout, rank: int) -> list[StepTrace]:
        policy, fmt = reference_training.policy_of(history), reference_training.STORED[history.precision]
        state = initial_state(policy, list(history.parameters), fmt)
        trace = []
        for window in history.windows:
            scale, weight = np.float32(state.loss_scale.scale), len(window) / layout.shares
            micros = [_computed(layout, one, window, scale, fmt) for one in range(layout.world)]
            view = _View(history=history, layout=layout, rank=rank, micros=micros)
            view = replace(view, pooled=self.pool(view))
            given = list(view.pooled)
            if all(np.isfinite(g).all() for g in self.decides(view)):
                given = [np.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) for g in given]
            norm, told = None, policy
            if self.norm is not None and policy.max_grad_norm is not None:
                norm, told = self.norm(view, divisor_of(state, weight)), replace(policy, max_grad_norm=None)
                given = [g * np.float32(min(1.0, policy.max_grad_norm / (norm + 1e-6))) for g in given]
            bits = reference_training.random_bits_of(history, state) if self.bits is None else self.bits(view, state)
            new, report = step(told, state, given, weight=weight, random_bits=bits)
            own = not all(np.isfinite(g).all() for g in self.scales(view))
            both = policy.loss_scale.next(state.loss_scale, found_inf=own)
            state = new if self.scales is _Ranks.scales else replace(new, loss_scale=both)
            asked = report.applied and history.max_grad_norm is not None
            entry = StepTrace(
                applied=report.applied, loss_scale=float(scale), next_loss_scale=state.loss_scale.scale,
                grad_norm=(norm or report.grad_norm) if asked else None, report=self.says(view),
                parameters=_flat(state.parameters), masters=_flat(state.masters),
                slots=tuple({name: one.reshape(-1) for name, one in s.slots.items()} for s in state.optimizer),
            )  # fmt: skip
            trace.append(entry)
        return trace


def _computed(
    layout: Layout, rank: int, window: tuple[tuple[Array, ...], ...], scale: np.float32, fmt: FloatFormat
) -> list[list[Array]]:
    """For each place, for each micro-step of a rank, what it adds to the whole gradient."""
    found = []
    for place in range(len(window[0])):
        wholes = []
        for micro in layout.micro_steps(rank, len(window)):
            whole = np.zeros_like(window[micro][place])
            addends = round_to(scale * layout.addends(rank, place, window[micro][place]), fmt)
            whole[layout.computed(rank, place, whole.shape)] = addends
            wholes.append(whole)
        found.append(wholes)
    return found


def _flat(arrays: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(one.reshape(-1) for one in arrays)


def _last_alone(view: _View) -> list[Array]:
    """Every rank adds its own earlier micro-steps to the mean of all ranks' last ones."""
    last = replace(view, micros=[[parts[-1:] for parts in one] for one in view.micros])
    earlier = [parts[:-1] for parts in view.micros[view.rank]]
    means = _pool(last, _mean)
    return [_sum([*parts, mean]) for parts, mean in zip(earlier, means, strict=True)]


def _counted_twice(view: _View, divisor: np.float32) -> float:
    """Each rank adds up its own squares, so that a copy on every rank counts on every rank."""
    copies = [*view.pooled, *([view.pooled[3], view.pooled[4]] * (view.layout.tensor - 1))]
    return float(gradient_norm([np.asarray(g / divisor, np.float32) for g in copies]))


def _own_norm(view: _View, divisor: np.float32) -> float:
    return float(gradient_norm([np.asarray(g / divisor, np.float32) for g in view.held()]))


def _local_bits(view: _View, state: StepState) -> list[Array]:
    """Bits by an element's place in the rank's part."""
    found = []
    for place, parameter in enumerate(view.history.parameters):
        bits = np.zeros(parameter.shape, np.uint16)
        for rank in range(view.layout.world):
            part = bits[view.layout.held(rank, place, bits.shape)]
            drawn = random_bits16(view.history.seed, state.update_index, place, np.arange(part.size))
            part[...] = drawn.reshape(part.shape)
        found.append(bits)
    return found


def _keyed_bits(key: Callable[[_View, int], tuple[int, int]]) -> Callable[[_View, StepState], list[Array]]:
    """Bits of another seed or another parameter number than the honest ones."""

    def bits(view: _View, state: StepState) -> list[Array]:
        found = []
        for place, parameter in enumerate(view.history.parameters):
            seed, number = key(view, place)
            drawn = random_bits16(seed, state.update_index, number, np.arange(parameter.size))
            found.append(drawn.reshape(parameter.shape))
        return found

    return bits


def _pooled_by(mean: Callable[[list[Array], int], Array]) -> _Ranks:
    return _Ranks(pool=lambda view: _pool(view, mean))


def _rotated(shares: list[Array], rank: int) -> Array:
    return _mean(shares[rank:] + shares[:rank], rank)


def _in_bf16(shares: list[Array], rank: int) -> Array:
    total = shares[0]
    for one in shares[1:]:
        total = round_to(total + one, BF16)
    return total / np.float32(len(shares))


def _sent_as(sent: Callable[[Array], Array]) -> _Ranks:
    return _pooled_by(lambda shares, rank: sent(_mean([sent(one) for one in shares], rank)))


def _flushed(x: Array) -> Array:
    """fp16 without the numbers below its normal ones."""
    return round_to(x, FP16, subnormals=False)


_TWICE = _pooled_by(lambda shares, rank: _mean(shares, rank) / np.float32(len(shares)))
_DROPPED = _pooled_by(lambda shares, rank: _sum(shares[:-1]) / np.float32(len(shares)))


def _row(word: str, sentence: str, fault: Callable[..., Any], claim: str) -> Mutant:
    return Mutant(id=f"ranks.{word}", sentence=sentence, operation="ranks", fault=fault, caught_by=f"ranks.{claim}")


MUTANTS: tuple[Mutant, ...] = (
    _row("sum", "gradients are added up, not averaged", _pooled_by(lambda shares, _: _sum(shares)), "replicas"),
    _row("alone", "each rank decides by its own gradients", _Ranks(decides=_View.own), "replicas"),
    _row("own-gradients", "one rank steps with its own gradients",
         _pooled_by(lambda shares, rank: shares[rank] if rank else _mean(shares, rank)), "replicas"),
    _row("fp16-wire", "gradients travel in fp16", _pooled_by(
        lambda shares, _: (shares[0] / 2).astype(np.float16).astype(np.float32) + shares[1] / np.float32(2)),
        "replicas"),
    _row("twice", "the average is divided by the ranks twice", _TWICE, "ddp-2"),
    _row("dropped", "the last rank is left out of the sum", _DROPPED, "fsdp2-4"),
    _row("last-alone", "only the last micro-step of a window is exchanged", _Ranks(pool=_last_alone), "ddp-2"),
    _row("says", "ranks report different things", _Ranks(says=lambda view: f"rank {view.rank}"), "ddp-2"),
    _row("shard-alone", "each shard decides by what it holds", _Ranks(decides=_View.held), "fsdp2-4"),
    _row("tensor-alone", "the decision is not shared between tensor parallel ranks", _Ranks(decides=_View.held),
         "tp-2"),
    _row("tensor-beside-shards", "the decision is shared over the shards, not over tensor parallel ranks",
         _Ranks(decides=_View.computed), "tp-fsdp2-4"),
    _row("stage-alone", "each stage decides by its own gradients", _Ranks(decides=_View.held), "pp-2"),
    _row("shard-scale", "each shard moves a scale of its own", _Ranks(scales=_View.held), "fsdp2-2"),
    _row("stage-scale", "each stage moves a scale of its own", _Ranks(scales=_View.held), "pp-2"),
    _row("copies-twice", "the norm counts a replicated parameter on every rank", _Ranks(norm=_counted_twice), "tp-2"),
    _row("shard-norm", "the norm is that of a shard", _Ranks(norm=_own_norm), "fsdp2-2"),
    _row("stage-norm", "the norm is that of a stage", _Ranks(norm=_own_norm), "pp-2"),
    _row("copies-apart", "a replicated parameter gets the gradient of its first rank alone",
         _Ranks(pool=lambda view: _pool(view, _mean, adds_copies=False)), "tp-fsdp2-4"),
    _row("rounded-twice", "the average is divided by the ranks twice", _TWICE, "rounded-sums.ddp-2"),
    _row("rounded-dropped", "the last rank is left out of the sum", _DROPPED, "rounded-sums.fsdp2-4"),
    _row("rounded-low", "ranks are added up in bf16", _pooled_by(_in_bf16), "rounded-sums.fsdp2-2"),
    _row("rounded-orders", "every rank adds in an order of its own", _pooled_by(_rotated), "rounded-sums.fsdp2-4"),
    _row("wire-coarse", "gradients travel in bf16 where fp16 was asked for", _sent_as(lambda x: round_to(x, BF16)),
         "wire.fp16.fsdp2-2"),
    _row("wire-flush", "numbers below fp16's normal ones are lost on the way", _sent_as(_flushed), "wire.fp16.ddp-2"),
    _row("local-bits", "random bits go by an element's place in its shard", _Ranks(bits=_local_bits),
         "stochastic.fsdp2-4"),
    _row("tensor-bits", "random bits go by an element's place in a tensor parallel part", _Ranks(bits=_local_bits),
         "stochastic.tp-2"),
    _row("stage-bits", "every stage numbers its parameters from zero", _Ranks(bits=_keyed_bits(
        lambda view, place: (view.history.seed, place - (2 if place > 1 else 0)))), "stochastic.pp-2"),
    _row("seeds", "every rank has a seed of its own", _Ranks(bits=_keyed_bits(
        lambda view, place: (view.history.seed + view.rank, place))), "stochastic.ddp-2"),
)  # fmt: skip
"""Faults of many ranks."""
