"""Threads that share one array: every part once, errors kept, forks survived, no bit changed."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import mp_reference as mp
from mp_reference.numerics import crew, rounding
from mp_reference.numerics.bits import differing_bits
from mp_reference.numerics.rounding_kernels import kernel_for


@pytest.fixture
def shared(monkeypatch):
    """Rounding that shares short arrays too; answers with how many parts each call dealt out, and how."""
    dealt = []

    def spy(name):
        whole = getattr(crew, name)

        def deal(parts, *rest):
            dealt.append((name, len(parts)))
            whole(parts, *rest)

        monkeypatch.setattr(rounding, name, deal)

    monkeypatch.setattr(rounding, "_WORTH_SHARING", 100)
    monkeypatch.setattr(rounding, "_SHARED", 999)
    monkeypatch.setattr(rounding, "BUFFER_BYTES", 400)
    monkeypatch.setattr(rounding, "_RELAYED", 5)
    spy("share")
    spy("relay")
    return dealt


def test_every_part_is_done_once_by_whoever_is_free():
    for threads in (1, 2, 3, 8):
        done = []
        crew.share(range(100), done.extend, threads)
        assert sorted(done) == list(range(100))


def test_a_helper_does_parts_while_the_caller_is_busy():
    names = set()
    both = threading.Barrier(2, timeout=30)

    def run(parts):
        for _ in parts:
            both.wait()
            names.add(threading.current_thread().name)

    crew.share(range(2), run, 2)
    assert len(names) == 2
    assert any(name.startswith("mp_reference") for name in names)


def test_a_helper_that_never_began_is_not_waited_for():
    release, begun = threading.Event(), threading.Event()
    pool = crew._pool(1, os.getpid())
    busy = pool.submit(lambda: (begun.set(), release.wait(30)))
    assert begun.wait(30)
    done = []
    crew.share(range(3), done.extend, 2)
    assert done == [0, 1, 2]
    assert not busy.done()
    release.set()


def test_what_a_helper_raises_reaches_the_caller():
    both = threading.Barrier(2, timeout=30)

    def run(parts):
        for _ in parts:
            both.wait()
            if threading.current_thread() is not threading.main_thread():
                raise ValueError("of the helper")

    with pytest.raises(ValueError, match="of the helper"):
        crew.share(range(2), run, 2)


def test_a_relay_prepares_every_part_once_and_finishes_them_in_order():
    for threads in (2, 3, 8):
        prepared, finished = [], []

        def finish(part, prepared=prepared, finished=finished):
            assert prepared.count(part) == 1
            finished.append(part)

        crew.relay(range(100), prepared.append, finish, threads)
        assert sorted(prepared) == finished == list(range(100))


def test_a_helper_prepares_what_comes_while_the_caller_finishes_what_came():
    both = threading.Barrier(2, timeout=30)
    names = {}

    def prepare(part):
        names[part] = threading.current_thread().name
        if part == 1:
            both.wait()

    crew.relay(range(2), prepare, lambda part: both.wait() if part == 0 else None, 2)
    assert names[1].startswith("mp_reference")


def test_the_caller_prepares_what_no_helper_has_begun():
    release, begun = threading.Event(), threading.Event()
    busy = crew._pool(1, os.getpid()).submit(lambda: (begun.set(), release.wait(30)))
    assert begun.wait(30)
    done = []
    crew.relay("ab", lambda part: done.append(part.upper()), done.append, 2)
    assert done == ["A", "a", "B", "b"]
    assert not busy.done()
    release.set()


def test_what_preparing_raises_reaches_the_caller_before_the_part_is_finished():
    finished = []

    def prepare(part):
        if part == 2:
            raise ValueError("of part 2")

    with pytest.raises(ValueError, match="of part 2"):
        crew.relay(range(9), prepare, finished.append, 2)
    assert finished == [0, 1]


def test_nothing_is_prepared_any_more_when_finishing_has_failed():
    started, running, prepared = threading.Event(), threading.Event(), []

    def prepare(part):
        if part == 1:
            started.set()
            assert running.wait(30)
        prepared.append(part)

    def finish(part):
        assert started.wait(30)
        threading.Timer(1, running.set).start()  # long after the rest has been cancelled
        raise ValueError(f"of part {part}")

    with pytest.raises(ValueError, match="of part 0"):
        crew.relay(range(9), prepare, finish, 2)
    assert prepared == [0, 1]


def test_helpers_are_kept_for_the_next_call():
    assert crew._pool(1, os.getpid()) is crew._pool(1, os.getpid())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_helpers_of_its_own(shared):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    wanted = mp.round_to(x, mp.FP16, threads=2)
    assert shared == [("relay", 2)]
    child = os.fork()
    if not child:
        same = differing_bits(mp.round_to(x, mp.FP16, threads=2), wanted) == 0
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("mode", ["nearest-even", "nearest-away", "toward-zero", "toward-positive", "stochastic"])
@pytest.mark.parametrize("carrier", ["float32", "float64"])
@pytest.mark.parametrize("fmt", [mp.E4M3FN, mp.BF16], ids=lambda fmt: fmt.name)
def test_shared_chunks_meet_without_a_seam(fmt, mode, carrier, shared):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((100, 101)).astype(carrier)
    before = x.copy()
    random = rng.integers(0, 65536, x.shape, dtype=np.uint16) if mode == "stochastic" else None
    wanted = mp.round_to(x, fmt, mode, random_bits=random)
    for threads in (2, 3):
        assert differing_bits(mp.round_to(x, fmt, mode, random_bits=random, threads=threads), wanted) == 0
        assert differing_bits(x, before) == 0
        in_place = x.copy()
        mp.round_to(in_place, fmt, mode, random_bits=random, out=in_place, threads=threads)
        assert differing_bits(in_place, wanted) == 0
    if kernel_for(fmt, mode, "ieee", "", carrier).long_calls:
        assert shared == [("share", 11)] * 4
    else:  # in place there is nothing to copy ahead
        assert shared == [("relay", {"float32": 21, "float64": 41}[carrier])] * 2


def test_what_overlaps_or_draws_its_own_bits_is_done_by_one_thread(monkeypatch):
    memory = np.random.default_rng(3).standard_normal(5001).astype(np.float32)
    wanted = mp.round_to(memory[:-1].copy(), mp.FP16)
    monkeypatch.setattr(rounding, "_WORTH_SHARING", 1000)
    for name in ("share", "relay"):
        monkeypatch.setattr(rounding, name, None)  # would be called
    drawn = [
        mp.round_to(memory, mp.FP16, "stochastic", random_bits=np.random.default_rng(9), threads=n) for n in (1, 2)
    ]
    assert differing_bits(*drawn) == 0
    mp.round_to(memory[:-1], mp.FP16, out=memory[1:], threads=2)
    assert differing_bits(memory[1:], wanted) == 0
