"""Whatever a subject does to what everybody shares, the next claim finds it as it was."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from mp_conformance.claims import Run, select
from mp_conformance.implementations import subject_named
from mp_conformance.isolation import Apart, undisturbed
from mp_conformance.runner import ask

CLAIM = select("cast.float32.fp16")[0]


class Careless:
    """The reference, after something that it should not have done."""

    name, device = "careless", "cpu"

    def __init__(self, act: Any) -> None:
        self.act = act
        self.reference = subject_named("reference")

    def offers(self, operation: str, options: Any) -> bool:  # noqa: ARG002  # the Protocol's names
        return True

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        result = self.reference.perform(operation, *operands, **options)
        self.act()
        return result


class Spoiler(Careless):
    """It writes into what it was given."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        result = super().perform(operation, *operands, **options)
        for x in operands:
            x[...] = 0
        return result


@pytest.mark.parametrize(
    ("act", "read", "remark"),
    [
        (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype, "default dtype was left at"),
        (lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled, "left at True"),
        (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision, "left at medium"),
    ],
)
def test_a_setting_that_a_subject_leaves_changed_is_put_back_and_remarked(act: Any, read: Any, remark: str) -> None:
    before = read()
    result = ask(CLAIM, Careless(act), Run(3))
    assert result.status == "kept"
    assert read() == before
    assert len(result.remarks) == 1
    assert remark in result.remarks[0]


def test_random_states_are_put_back_without_a_word() -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    said: list[str] = []
    with undisturbed(said):
        np.random.seed(1)  # noqa: NPY002  # the state that everybody shares is the subject here
        expected = np.random.random()  # noqa: NPY002
        np.random.seed(1)  # noqa: NPY002
        with undisturbed(said):
            random.seed(1)
            torch.manual_seed(1)
            np.random.seed(2)  # noqa: NPY002
        assert np.random.random() == expected  # noqa: NPY002
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert said == []


def test_the_number_of_threads_that_a_claims_thread_set_is_not_that_of_the_next() -> None:
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(torch.get_num_threads).result()
    assert ask(CLAIM, Careless(lambda: torch.set_num_threads(before + 6)), Run(3)).status == "kept"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == before


def test_a_numpy_error_state_stays_in_the_claim_that_set_it() -> None:
    before = np.geterr()
    assert ask(CLAIM, Careless(lambda: np.seterr(all="raise")), Run(3)).status == "kept"
    assert np.geterr() == before


def test_a_subject_that_writes_into_its_operands_spoils_no_other_subjects_claim() -> None:
    claim = select("arithmetic.add.every-pair.float8_e5m2")[0]  # all subjects are handed the same table
    assert ask(claim, Spoiler(), Run(3)).status == "kept"
    assert ask(claim, subject_named("reference"), Run(3)).status == "kept"


def test_settings_and_lists_are_copies_too() -> None:
    class Takes(Careless):
        def perform(self, operation: str, *operands: Any, **options: Any) -> Any:  # noqa: ARG002  # the Protocol's names
            operands[0].append(2)
            options["settings"]["growth_interval"] = 0

    flags, settings = [True], {"growth_interval": 2}
    Apart(Takes(None)).perform("loss_scale", flags, settings=settings)
    assert (flags, settings) == ([True], {"growth_interval": 2})
