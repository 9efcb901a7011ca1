"""The pool itself: a rank that fails or hangs is reported, and the next test runs as if nothing had been."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import distributed


def sum_of_ranks(scale: float) -> float:
    total = torch.tensor(scale * distributed.get_rank())
    distributed.all_reduce(total)
    return total.item()


def fail_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        raise ValueError(f"rank {rank} fails on purpose")


def sleep_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        time.sleep(60)


@pytest.mark.parametrize("world", [2, 4])
def test_a_job_runs_on_every_rank(pool, world):
    assert pool.run(sum_of_ranks, world, 2.0) == [2.0 * sum(range(world))] * world


def test_the_traceback_of_the_rank_that_failed_is_reported(pool):
    with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*ValueError: rank 1 fails on purpose"):
        pool.run(fail_on, 2, 1)


def test_a_rank_that_hangs_is_named_and_the_next_job_runs(pool):
    with pytest.raises(AssertionError, match=r"ranks \[1\] did not answer within 3.0 s"):
        pool.run(sleep_on, 2, 1, timeout=3.0)
    assert pool.run(sum_of_ranks, 2, 1.0) == [1.0, 1.0]


def process() -> int:
    return os.getpid()


def test_after_a_group_that_could_not_be_made_the_next_job_gets_new_processes(pool, monkeypatch):
    before = pool.run(process, 2)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_store", lambda folder, rank: "nowhere://" if rank else f"file://{folder}/store")
        with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*init_process_group"):
            pool.run(process, 2, timeout=3.0)
    assert not set(before) & set(pool.run(process, 2))
