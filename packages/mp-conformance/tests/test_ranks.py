"""The claims about ranks: their workers, their drawn histories, their bound, and what they need of a machine."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_conformance.claims import Run, select
from mp_conformance.claims.ranks import PRECISIONS, summation_bound
from mp_conformance.histories import History, events
from mp_conformance.implementations import ranks, reference_training, subject_named
from mp_conformance.implementations.ranks.workers import RankError, Workers
from mp_conformance.implementations.ranks.workers import workers as shared_workers
from mp_conformance.layouts import LAYOUTS, PARAMETERS
from mp_conformance.rank_histories import LENGTH, drawn_histories, rounded_windows
from mp_conformance.runner import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = ((4, 3), (4,), (3, 4), (3,), (2,))
TWO = LAYOUTS["ddp-2"]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


def drawn(layout: str, count: int = 200) -> list[History]:
    return drawn_histories(Run(count), LAYOUTS[layout], PRECISIONS)


def trained(workers: Workers, count: int = LENGTH, seconds: float | None = None) -> list[Any]:
    return workers.train(TWO, "cpu", "gloo", drawn("ddp-2", count), seconds)


def test_the_processes_are_started_once_and_leave_by_themselves() -> None:
    own = Workers()
    assert len(trained(own)) == 2
    processes = list(own._processes)
    assert len(trained(own)) == 2
    assert own._processes == processes
    own.close()
    assert [process.exitcode for process in processes] == [0] * 4


def test_ranks_that_do_not_answer_in_time_are_named_and_the_next_question_is_answered(workers: Workers) -> None:
    trained(workers)
    os.kill(workers._processes[1].pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"^ranks \[0, 1\] of 2 did not answer within 2 s$"):
        trained(workers, seconds=2.0)
    assert time.monotonic() - started < 30
    assert len(trained(workers)) == 2


def test_a_rank_that_dies_ends_the_question_at_once_and_the_next_is_answered(workers: Workers) -> None:
    trained(workers)
    histories = drawn("ddp-2", 50) * 40  # more than are trained in half a second
    timer = threading.Timer(0.5, workers._processes[1].kill)
    timer.start()
    with pytest.raises(RankError, match=r"^rank [01]: (the process died|Traceback)"):
        workers.train(TWO, "cpu", "gloo", histories)
    timer.join()
    assert len(trained(workers)) == 2


def test_a_rank_that_raises_ends_the_question_with_its_words(workers: Workers) -> None:
    with pytest.raises(RankError, match=r"^rank [01]: Traceback(.|\n)*KeyError: 'nowhere'"):
        workers.train(replace(TWO, name="nowhere"), "cpu", "gloo", [])
    assert len(trained(workers)) == 2


def test_processes_that_do_not_start_in_time_are_an_error_and_none_is_left() -> None:
    own = Workers(start=0.0)
    with pytest.raises(RankError, match=r"^the processes of the ranks did not start within 0 s$"):
        trained(own)
    assert own._processes == []


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # ending a thread may interrupt a callback
def test_a_claim_whose_ranks_hang_costs_its_limit_and_the_next_is_kept() -> None:
    claim, subject = select("ranks.ddp-2")[0], subject_named("ranks")
    assert ask(claim, subject, Run(5)).status == "kept"
    os.kill(shared_workers()._processes[0].pid, signal.SIGSTOP)
    result = ask(claim, subject, Run(5), limit=3.0)
    assert (result.status, result.failed) == ("hung", True)
    assert ask(claim, subject, Run(5)).status == "kept"


def test_too_few_devices_are_not_reached_and_a_torch_without_a_backend_is_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim, subject = select("ranks.fsdp2-4")[0], subject_named("ranks", "cuda")
    monkeypatch.setitem(ranks.BACKENDS, "cuda", "gloo")  # which every torch that has ranks has
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    result = ask(claim, subject, Run(5))
    assert (result.status, result.message) == ("not reached", "fsdp2-4 needs 4 cuda devices, this machine has 3")
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    result = ask(claim, subject_named("ranks"), Run(5))
    assert result.status == "not offered"
    assert result.message == "this torch was built without torch.distributed's gloo, so it has no ranks"
    assert not subject_named("ranks", "npu").offers("ranks", claim.options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_overflows_fall_on_each_rank_in_turn(layout: str) -> None:
    rows, hit = LAYOUTS[layout], Counter[int]()
    for history in drawn(layout):
        shapes = tuple(p.shape for p in history.parameters)
        for window in history.windows:
            places = {
                (index, place, int(element))
                for index, micro in enumerate(window)
                for place, gradient in enumerate(micro)
                for element in np.flatnonzero(~np.isfinite(gradient))
            }
            assert len(places) <= 1
            hit.update(
                rank
                for rank in range(rows.world)
                for index, place, element in places
                if index in rows.micro_steps(rank, len(window)) and (place, element) in rows.computes(rank, shapes)
            )
    assert set(hit) == set(range(rows.world))
    assert max(hit.values()) - min(hit.values()) <= 1


def test_two_hundred_drawn_windows_contain_every_event() -> None:
    seen: set[str] = set()
    with np.errstate(all="ignore"):
        for history in drawn("ddp-2"):
            seen |= events(history, reference_training.train(history))
    assert seen >= {
        "applied", "skipped", "inf", "nan", "overflow by scaling", "scale grew", "scale shrank", "window of many",
        "clipped", "skip after applied", "applied after skip",
    }  # fmt: skip


def test_every_drawn_sum_is_exact_in_any_order_and_so_is_every_norm() -> None:
    for history in drawn("fsdp2-4"):
        for window in history.windows:
            means = []
            for place in range(len(PARAMETERS)):
                micros = [micro[place] for micro in window]
                if not np.isfinite(micros).all():
                    break
                exact = np.sum(np.stack(micros).astype(np.float64), axis=0)
                for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
                    total = micros[order[0]]
                    for one in order[1:]:
                        total = total + micros[one]
                    assert (total.astype(np.float64) == exact).all()
                means += list((exact / len(window)).reshape(-1))
            squares = [mean * mean for mean in means]
            assert sum(squares) == math.fsum(squares) == sum(reversed(squares))


def test_sums_in_any_order_lie_within_the_bound_which_is_not_loose() -> None:
    history, worst = rounded_windows(Run(100), 8), 0.0
    random = np.random.default_rng(0)
    for window in history.windows:
        addends = np.stack([micro[0].reshape(-1) for micro in window])
        exact = np.array([math.fsum(column) for column in addends.T.astype(np.float64)]) / 8
        total = np.zeros(addends.shape[1], np.float32)
        for row in random.permutation(8):
            total = total + addends[row]
        error = np.abs(total.astype(np.float64) / 8 - exact)
        worst = max(worst, float(np.max(error / summation_bound(np.abs(addends.astype(np.float64)), 7))))
    assert 0.2 < worst <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_all_ranks_are_the_whole_parameter_and_their_addends_the_whole_gradient(layout: str) -> None:
    rows = LAYOUTS[layout]
    for place, shape in enumerate(SHAPES):
        held, added = np.zeros(shape, int), np.zeros(shape, np.float32)
        gradient = np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)
        ranks_of_it = [rank for rank in range(rows.world) if place in rows.trains(rank)]
        for rank in ranks_of_it:
            held[rows.held(rank, place, shape)] += 1
            added[rows.computed(rank, place, shape)] += rows.addends(rank, place, gradient)
        assert (held == held.flat[0]).all()
        assert held.flat[0] >= 1
        copies = rows.tensor if PARAMETERS[place] == "gain" else 1  # whole on every tensor parallel rank
        assert (added == gradient * rows.shares * copies).all()
