"""Claims about many ranks: however a model is spread, its training is the same."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance import training_oracle
from mp_conformance.claims.rows import Claim
from mp_conformance.claims.training import assert_same_trace
from mp_conformance.compare import Bits, Bound, DisagreementError, Tally, assert_same_bits, assert_within_bound
from mp_conformance.histories import History, StepTrace, histories
from mp_conformance.implementations import reference_training
from mp_conformance.layouts import LAYOUTS
from mp_conformance.rank_histories import GRADIENT_KEEPER, drawn_histories, rounded_windows
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.histories import Wire
    from mp_conformance.implementations import Subject
    from mp_conformance.layouts import Layout
    from mp_reference.spec.formats import FloatFormat

__all__ = ["CLAIMS", "PRECISIONS", "summation_bound", "wire_bound"]

Array = np.ndarray[Any, np.dtype[Any]]

PRECISIONS = ("fp16-mixed", "fp32", "fp16-mixed", "bf16-mixed", "bf16-true")
"""What claims about whole trainings draw from."""


def _same_training(layout: Layout, precisions: tuple[str, ...]) -> Check:
    def check(subject: Subject, run: Run) -> None:
        drawn = drawn_histories(run, layout, precisions)
        ranks = subject.perform("ranks", drawn, layout=layout.name)
        for place, history in enumerate(drawn):
            expected = [_flat(entry) for entry in reference_training.train(history)]
            for rank, traces in enumerate(ranks):
                run.record(_as_expected(f"rank {rank}, history {place}", history, traces[place], expected))
            _require_one_report(f"history {place}", [traces[place] for traces in ranks])

    return check


def _as_expected(where: str, history: History, trace: list[StepTrace], expected: list[StepTrace]) -> Tally:
    try:
        return assert_same_trace(trace, expected)
    except DisagreementError as difference:
        raise DisagreementError(f"{where}, {history.optimizer} in {history.precision}: {difference}") from None


def _require_one_report(where: str, traces: Sequence[list[StepTrace]]) -> None:
    """Every rank says of every step what the first one says."""
    for rank, trace in enumerate(traces):
        for step, (mine, first) in enumerate(zip(trace, traces[0], strict=True)):
            if mine.report != first.report:
                raise DisagreementError(
                    f"{where}, step {step}: rank {rank} reports {mine.report}, rank 0 reports {first.report}"
                )


def _flat(entry: StepTrace) -> StepTrace:
    return replace(
        entry,
        parameters=tuple(one.reshape(-1) for one in entry.parameters),
        masters=tuple(one.reshape(-1) for one in entry.masters),
        slots=tuple({name: one.reshape(-1) for name, one in slots.items()} for slots in entry.slots),
    )


def summation_bound(magnitudes: Array, additions: int) -> Array:
    """How far a mean of numbers may lie from the exact one.

    Args:
        magnitudes: float64, one row an addend: the absolute values of what is averaged.
        additions: through how many fp32 additions an addend may pass.

    Returns:
        float64, for each column, k u / (1 - k u) times the mean of the magnitudes, with k additions and u = 2**-24.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 4.2: each addition multiplies by
        1 + d, |d| <= u, so an addend that passes k of them is multiplied by 1 + t, |t| <= k u / (1 - k u). Divisions
        by powers of two are exact.

    >>> float(summation_bound(np.array([[1.0], [3.0]]), 1)[0]) * 2**24
    2.0000001192092967
    """
    once = additions * 2.0**-24
    bound: Array = magnitudes.mean(axis=0) * once / (1 - once)
    return bound


def wire_bound(magnitudes: Array, additions: int, wire: FloatFormat, ranks: int) -> Array:
    """As ``summation_bound``, where what each rank has added up travels in 16 bits, and so does the mean.

    Args:
        magnitudes: float64, one row an addend.
        additions: through how many fp32 additions an addend may pass.
        wire: the format that travels.
        ranks: how many share the addends evenly.

    Returns:
        float64, for each column: an addend passes two more roundings, each to the wire's precision p, so that it is
        multiplied by up to (1 + 2**-p)**2 more; below the wire's normal numbers a rounding moves by up to half the
        smallest one: once on each rank, and once in the mean.

    Source: as ``summation_bound``.

    >>> float(wire_bound(np.array([[1.0], [3.0]]), 1, FORMATS["bf16"], 2)[0])
    0.0156...
    """
    once, kept = additions * 2.0**-24, (1 + 2.0 ** -(wire.mantissa_bits + 1)) ** 2
    lost = (ranks + 1) * wire.min_subnormal / 2 * ranks / len(magnitudes)
    bound: Array = magnitudes.mean(axis=0) * (kept / (1 - once) - 1) + lost
    return bound


def _rounded_sums(layout: Layout, wire: Wire = "fp32") -> Check:
    """Two micro-steps on each rank; an addend passes their addition and those of the ranks."""
    micro_steps, additions = 2 * layout.shares, layout.shares

    def bound_of(magnitudes: Array) -> Array:
        if wire == "fp32":
            return summation_bound(magnitudes, additions)
        return wire_bound(magnitudes, additions, FORMATS[wire], layout.shares)

    def check(subject: Subject, run: Run) -> None:
        history = rounded_windows(run, micro_steps, wire)
        traces = [rank[0] for rank in subject.perform("ranks", [history], layout=layout.name)]
        held = [np.zeros(p.size, np.float32) for p in history.parameters]
        for step, window in enumerate(history.windows):
            for place, before in enumerate(held):
                micros = np.stack([micro[place].reshape(-1) for micro in window]).astype(np.float64)
                exact = np.array([math.fsum(column) for column in micros.T]) / len(window)
                mean = traces[0][step].slots[place]["buffer"]
                run.record(assert_within_bound(mean, exact, bound_of(np.abs(micros)), inputs=tuple(micros)))
                held[place] = before - np.float32(GRADIENT_KEEPER["lr"]) * mean
                for trace in traces:
                    run.record(assert_same_bits(trace[step].slots[place]["buffer"], mean))
                    run.record(assert_same_bits(trace[step].parameters[place], held[place]))
        _require_one_report("the run", traces)

    return check


def _replicas(subject: Subject, run: Run) -> None:
    drawn: list[History] = []

    def keep(history: History) -> None:
        full = [window for window in history.windows if len(window) == 2]
        calm = [tuple(tuple(_without_dust(g) for g in micro) for micro in window) for window in full]
        drawn.append(replace(history, windows=tuple(calm)))

    run.draw(histories(accumulates=(2,), longest=4), keep)
    drawn = [history for history in drawn if history.windows]
    ranks = subject.perform("ranks", drawn, layout="ddp-2")
    for place, history in enumerate(drawn):
        expected = training_oracle.run_history(history)
        for traces in ranks:
            run.record(assert_same_trace(traces[place], expected))


def _without_dust(gradient: Array) -> Array:
    """Huge and tiny values away: half of a subnormal is rounded, and the sum of two huge numbers overflows."""
    bad = np.isfinite(gradient) & ((np.abs(gradient) < 1e-20) | (np.abs(gradient) > 1e20))
    return np.where(bad, np.float32(0), gradient)


_WORDS = {
    "one-process": "one process",
    "ddp-2": "two replicas (DDP)",
    "fsdp2-2": "two shards (FSDP2)",
    "fsdp2-4": "four shards (FSDP2)",
    "hsdp-4": "two replicas of two shards each (HSDP)",
    "tp-2": "two tensor parallel ranks",
    "pp-2": "two pipeline stages",
    "tp-fsdp2-4": "two shards of two tensor parallel ranks each (FSDP2 and TP)",
}


def _claim(
    word: str, layout: str, sentence: str, source: str, check: Check, agreement: Bits | Bound | None = None
) -> Claim:
    return Claim(
        id=".".join(part for part in ("ranks", word, layout) if part), sentence=sentence, source=source,
        agreement=agreement or Bits(), operation="ranks", check=check, options={"layout": layout},
        devices=("cpu", "cuda"),
    )  # fmt: skip


_STEP = "mp_reference.amp.step, itself under the claims step.*; every drawn sum is exact, whatever its order"
_WIRES: tuple[tuple[Wire, str], ...] = (
    ("fp16", "ddp-2"),
    ("bf16", "ddp-2"),
    ("fp16", "fsdp2-2"),
    ("bf16", "fsdp2-4"),
)
_DERIVED = (
    "k u / (1 - k u) times the mean of the magnitudes, u = 2**-24, k the additions on the longest way of an addend: "
    "the micro-steps of a rank less one, and the ranks that share a window less one (Higham, 4.2)"
)

CLAIMS: tuple[Claim, ...] = (
    replace(
        _claim(
            "",
            "ddp-2",
            "two replicas, each with half of every window, leave the bits of one process with the whole window, and "
            "skip together where one of them meets an infinity or a NaN",
            "mp_reference.spec.optimizers, and the order of a step: unscale, decide, clip, update, write back, rescale",
            _replicas,
        ),
        id="ranks.replicas",
    ),
    *(
        _claim(
            "",
            name,
            f"decisions, scales, norms and parameters of {_WORDS[name]} are the reference's, bit for bit, whichever "
            "rank an overflow falls on, and every rank reports the same",
            _STEP,
            _same_training(layout, PRECISIONS),
        )
        for name, layout in LAYOUTS.items()
    ),
    *(
        _claim(
            "rounded-sums",
            name,
            f"where sums round, the gradients of {_WORDS[name]} lie within a derived bound of the exact mean, and all "
            "ranks hold the same bits",
            "Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 4.2",
            _rounded_sums(LAYOUTS[name]),
            Bound(_DERIVED),
        )
        for name in ("ddp-2", "fsdp2-2", "fsdp2-4", "tp-fsdp2-4")
    ),
    *(
        _claim(
            f"wire.{wire}",
            name,
            f"where gradients travel in {wire}, those of {_WORDS[name]} lie within a derived bound of the exact mean, "
            "since they are added in fp32, and all ranks hold the same bits",
            "Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 4.2",
            _rounded_sums(LAYOUTS[name], wire),
            Bound(f"{_DERIVED}; two more roundings to {wire}, on each rank and of the mean"),
        )
        for wire, name in _WIRES
    ),
    *(
        _claim(
            "stochastic",
            name,
            f"in bf16-sr the random bits of {_WORDS[name]} are the reference's in every step",
            "mp_reference.amp.stochastic, after Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011)",
            _same_training(LAYOUTS[name], ("bf16-sr",)),
        )
        for name in ("one-process", "ddp-2", "fsdp2-4", "tp-2", "pp-2")
    ),
)
