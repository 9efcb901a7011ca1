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
    """Rounding that shares short arrays too; answers with how many parts each call dealt out."""
    dealt = []

    def share(parts, run, threads):
        dealt.append(len(parts))
        crew.share(parts, run, threads)

    def prepare(fmt, mode, carrier, chunk):
        monkeypatch.setattr(rounding, "_WORTH_SHARING", 100)
        monkeypatch.setattr(rounding, "share", share)
        monkeypatch.setattr(kernel_for(fmt, mode, "ieee", "", carrier), "shared_chunk", chunk)
        return dealt

    return prepare


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


def test_helpers_are_kept_for_the_next_call():
    assert crew._pool(1, os.getpid()) is crew._pool(1, os.getpid())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_helpers_of_its_own(shared):
    dealt = shared(mp.FP16, "nearest-even", "float32", 64)
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    wanted = mp.round_to(x, mp.FP16, threads=2)
    assert dealt == [16]
    child = os.fork()
    if not child:
        same = differing_bits(mp.round_to(x, mp.FP16, threads=2), wanted) == 0
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("mode", ["nearest-even", "nearest-away", "toward-zero", "stochastic"])
@pytest.mark.parametrize("carrier", ["float32", "float64"])
@pytest.mark.parametrize("fmt", [mp.E4M3FN, mp.BF16], ids=lambda fmt: fmt.name)
def test_shared_chunks_meet_without_a_seam(fmt, mode, carrier, shared):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((100, 101)).astype(carrier)
    before = x.copy()
    random = rng.integers(0, 65536, x.shape, dtype=np.uint16) if mode == "stochastic" else None
    wanted = mp.round_to(x, fmt, mode, random_bits=random)
    dealt = shared(fmt, mode, carrier, 999)
    for threads in (2, 3):
        assert differing_bits(mp.round_to(x, fmt, mode, random_bits=random, threads=threads), wanted) == 0
        assert differing_bits(x, before) == 0
        in_place = x.copy()
        mp.round_to(in_place, fmt, mode, random_bits=random, out=in_place, threads=threads)
        assert differing_bits(in_place, wanted) == 0
    assert dealt == [11] * 4


def test_what_overlaps_or_draws_its_own_bits_is_done_by_one_thread(monkeypatch):
    memory = np.random.default_rng(3).standard_normal(5001).astype(np.float32)
    wanted = mp.round_to(memory[:-1].copy(), mp.FP16)
    monkeypatch.setattr(rounding, "_WORTH_SHARING", 1000)
    monkeypatch.setattr(rounding, "share", None)  # would be called
    drawn = [
        mp.round_to(memory, mp.FP16, "stochastic", random_bits=np.random.default_rng(9), threads=n) for n in (1, 2)
    ]
    assert differing_bits(*drawn) == 0
    mp.round_to(memory[:-1], mp.FP16, out=memory[1:], threads=2)
    assert differing_bits(memory[1:], wanted) == 0
