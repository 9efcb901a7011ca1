"""Claims about training: clipping, optimizers, the step over drawn histories, accumulation, save and resume."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from mp_conformance import training_oracle
from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Bound, DisagreementError, Tally, assert_same_bits, assert_within_bound
from mp_conformance.histories import History, StepTrace, histories, tensors
from mp_conformance.implementations import reference_training
from mp_conformance.oracle import values_of
from mp_reference.amp.fused import update_bound
from mp_reference.amp.optimizers import OptimizerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject

__all__ = ["CLAIMS", "assert_same_trace"]

Array = np.ndarray[Any, np.dtype[Any]]

_ORDER = "mp_reference.spec.optimizers, and the order of a step: unscale, decide, clip, update, write back, rescale"


def assert_same_trace(actual: list[StepTrace], expected: list[StepTrace]) -> Tally:
    """Two runs of one history agree in every decision, scale, norm, parameter, master and moment.

    Args:
        actual: the subject's.
        expected: the oracle's.

    Returns:
        The count of compared values.

    Raises:
        DisagreementError: naming the step, the thing and, for arrays, both sides in hex.

    Source: this project.
    """
    if len(actual) != len(expected):
        raise DisagreementError(f"the subject made {len(actual)} steps, the history has {len(expected)}")
    tally = Tally()
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        for name in ("applied", "loss_scale", "next_loss_scale", "grad_norm"):
            if getattr(got, name) != getattr(wanted, name):
                raise DisagreementError(
                    f"step {index}: {name} is {getattr(got, name)!r}, expected {getattr(wanted, name)!r}"
                )
        for name in ("parameters", "masters"):
            for place, pair in enumerate(zip(getattr(got, name), getattr(wanted, name), strict=True)):
                tally.add(_same_array(f"step {index}: {name}[{place}]", *pair))
        for place, (slots, wanted_slots) in enumerate(zip(got.slots, wanted.slots, strict=True)):
            if set(slots) != set(wanted_slots):
                raise DisagreementError(
                    f"step {index}: parameter {place} keeps {sorted(slots)}, not {sorted(wanted_slots)}"
                )
            for name, value in wanted_slots.items():
                tally.add(_same_array(f"step {index}: {name} of parameter {place}", slots[name], value))
    return tally


def _same_array(what: str, actual: Array, expected: Array) -> Tally:
    try:
        return assert_same_bits(actual, expected)
    except DisagreementError as difference:
        raise DisagreementError(f"{what}: {difference}") from None


def _history(strategy: SearchStrategy[History]) -> Check:
    def check(subject: Subject, run: Run) -> None:
        run.draw(strategy, lambda h: assert_same_trace(subject.perform("train", h), training_oracle.run_history(h)))

    return check


def _skips_change_nothing(subject: Subject, run: Run) -> None:
    def one(history: History) -> Tally:
        tally = Tally()
        trace = subject.perform("train", history)
        for before, after in pairwise(trace):
            if not after.applied:
                pairs = [*zip(after.masters, before.masters, strict=True)]
                pairs += [*zip(after.parameters, before.parameters, strict=True)]
                pairs += [(a[name], b[name]) for a, b in zip(after.slots, before.slots, strict=True) for name in b]
                for actual, expected in pairs:
                    tally.add(_same_array("after a skipped step", actual, expected))
        return tally

    run.draw(histories(), one)


def _clip(subject: Subject, run: Run) -> None:
    def one(drawn: tuple[tuple[Array, ...], float]) -> Tally:
        gradients, max_norm = drawn
        norm, clipped = subject.perform("clip", list(gradients), max_norm=max_norm)
        lists = [values_of(g) for g in gradients]
        expected = training_oracle.norm_of(lists)
        if norm != expected:
            raise DisagreementError(f"the norm of {lists} is {norm!r}, the exact oracle says {expected!r}")
        wanted = training_oracle.clip(lists, expected, max_norm)
        tally = Tally(1)
        for got, values, given in zip(clipped, wanted, gradients, strict=True):
            tally.add(
                assert_same_bits(
                    got + np.float32(0), np.array(values).astype(np.float32) + np.float32(0), inputs=(given,)
                )
            )
        return tally

    run.draw(st.tuples(tensors(), st.sampled_from((1.0, 0.1, 1e-3, 1e4, 1e30))), one)


def _optimizer(kind: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        def one(history: History) -> Tally:
            gradients = [window[0] for window in history.windows]
            trail = subject.perform(
                "optimizer", list(history.parameters), gradients, kind=kind, settings=history.settings
            )
            now = [values_of(p) for p in history.parameters]
            states: list[list[dict[str, float]]] = [[{} for _ in tensor] for tensor in now]
            tally = Tally()
            for t, row in enumerate(gradients, 1):
                for i, tensor in enumerate(row):
                    for j, g in enumerate(values_of(tensor)):
                        now[i][j], states[i][j] = training_oracle.update(
                            kind, history.settings, now[i][j], g, states[i][j], t
                        )
                for i, values in enumerate(now):
                    expected = np.array(values, np.float64).astype(np.float32)
                    tally.add(_same_array(f"{kind} step {t}, parameter {i}", trail[t - 1][i], expected))
            return tally

        run.draw(histories(precisions=("fp32",), finite=True, optimizers=(kind,)), one)

    return check


def _claim(id: str, sentence: str, operation: str, check: Callable[..., None], **extra: Any) -> Claim:  # noqa: A002  # the row's
    return Claim(
        id=id, sentence=sentence, source=extra.pop("source", _ORDER), agreement=Bits(), operation=operation,
        check=check, **extra,
    )  # fmt: skip


def _fused(subject: Subject, run: Run) -> None:
    def one(history: History) -> Tally:
        return assert_same_trace(subject.perform("train_fused", history), reference_training.train_fused(history))

    run.draw(histories(precisions=("fp32", "fp16-mixed", "bf16-mixed")), one)


def _fused_bound(kind: str) -> Check:
    """One update at a time, from what the subject itself held before it: errors do not add up."""

    def check(subject: Subject, run: Run) -> None:
        def one(drawn: History) -> Tally:
            calm = tuple(tuple(tuple(_calm(g) for g in micro) for micro in window) for window in drawn.windows)
            first = tuple(_calm(p) for p in drawn.parameters)
            history = replace(drawn, windows=calm, parameters=first, max_grad_norm=None)
            rule = reference_training.optimizer_of(kind, history.settings)
            now, states, tally = first, [OptimizerState()] * len(first), Tally()
            for t, (entry, window) in enumerate(zip(subject.perform("fused_updates", history), calm, strict=True), 1):
                for w, g, state, after in zip(now, window[0], states, entry.masters, strict=True):
                    exact = rule.update(w, g, state)[0].astype(np.float64)
                    tally.add(assert_within_bound(after, exact, update_bound(rule, w, g, state), inputs=(w, g)))
                now = entry.masters
                states = [OptimizerState(step=t, slots=dict(slots)) for slots in entry.slots]
            return tally

        run.draw(histories(precisions=("fp32",), finite=True, optimizers=(kind,), accumulates=(1,)), one)

    return check


def _calm(values: Array) -> Array:
    """Only what neither overflows nor underflows when squared: the bound speaks of relative errors."""
    magnitude = np.abs(values)
    return np.where((magnitude > 1e-12) & (magnitude < 1e12), values, np.float32(0))


CLAIMS: tuple[Claim, ...] = (
    _claim(
        "clipping.norm",
        "clipping by norm measures the exact norm rounded once, multiplies every gradient by one fp32 coefficient, and "
        "overflows for no finite gradients",
        "clip",
        _clip,
    ),
    *(
        _claim(
            f"optimizer.{kind}",
            f"every update of {kind} on fp32 masters is the row's equations, each operation rounded once",
            "optimizer",
            _optimizer(kind),
            source=f"mp_reference.spec.optimizers.equations_of({kind!r})",
            options={"kind": kind},
        )
        for kind in ("sgd", "adam", "adamw")
    ),
    *(
        _claim(
            f"step.{precision}",
            f"a run in {precision} over any history of finite, infinite and NaN gradients leaves the oracle's bits in "
            "every parameter, master, moment and loss scale",
            "train",
            _history(histories(precisions=(precision,))),
            options={"precision": precision},
        )
        for precision in ("fp32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true")
    ),
    _claim(
        "step.skip",
        "a step that meets an infinity or a NaN changes no bit of parameters, masters and moments",
        "train",
        _skips_change_nothing,
    ),
    _claim(
        "accumulation.mean",
        "an update over a window is that of the mean of its micro-steps, also for a short last window",
        "train",
        _history(histories(accumulates=(2, 3, 4))),
    ),
    _claim(
        "step.fused",
        "with update='fused' a run leaves the bits of the reference's model of torch's fused CPU kernels",
        "train_fused",
        _fused,
        source="mp_reference.amp.fused",
        devices=("cpu",),
    ),
    *(
        replace(
            _claim(
                f"optimizer.{kind}.fused",
                f"with update='fused' every update of {kind} lies within a derived bound of the separately rounded one",
                "fused_updates",
                _fused_bound(kind),
                source="mp_reference.amp.fused.update_bound",
                options={"kind": kind},
            ),
            agreement=Bound("twice k u / (1 - k u), u = 2**-24, of the terms' magnitudes; k counts the roundings"),
        )
        for kind in ("sgd", "adam", "adamw")
    ),
    _claim(
        "step.tiny-scale",
        "with a loss scale below 1, what overflows by unscaling is found, because the unscaled gradient is checked",
        "train",
        _history(histories(precisions=("fp16-mixed",), tiny_scale=True)),
    ),
    _claim(
        "resume.true-precision",
        "saving and resuming with low-precision parameters keeps the fp32 masters, not their rounded copies",
        "train",
        _history(histories(precisions=("bf16-true", "fp16-true"), resume=True)),
    ),
    _claim(
        "resume.anywhere",
        "saving, rebuilding from nothing and loading after any micro-step changes no later bit",
        "train",
        _history(histories(resume=True)),
    ),
)
