"""Whatever a subject does, its claim has a result and the other claims still run."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from mp_conformance import gaps, implementations
from mp_conformance.claims import UnknownClaimError, registered, select
from mp_conformance.claims.families import FAMILIES
from mp_conformance.claims.rows import Run
from mp_conformance.compare import Bound, Ulp
from mp_conformance.implementations import NotOfferedError, Subject, subject_named, subjects_for
from mp_conformance.runner import Result, ask, ask_all

CLAIM = select("cast.float32.fp16")[0]
# the exception that ends a hung claim may land inside a weak reference's callback, where Python can only print it
ENDS_A_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Odd:
    """A subject that does what it is told to."""

    name = "odd"
    device = "cpu"

    def __init__(self, act: Any) -> None:
        self.act = act

    def offers(self, operation: str, options: Any) -> bool:  # noqa: ARG002  # the Protocol's names
        return operation == "cast"

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:  # noqa: ARG002  # as above
        return self.act(operands[0])


def hang(x: Any) -> Any:
    while True:
        time.sleep(0.01)


def raises(x: Any) -> Any:
    raise RuntimeError("the kernel is not compiled")


@ENDS_A_THREAD
@pytest.mark.parametrize(
    ("act", "status", "message"),
    [
        (raises, "error", "RuntimeError: the kernel is not compiled"),
        (hang, "hung", "no answer within 0.3 s; run the claim alone, or raise --limit"),
        (lambda x: x, "broken", "the subject returned dtype float32, the claim needs float16"),
        (lambda x: np.float16(x[:3]), "broken", r"the subject returned shape (3,), the claim needs (16,)"),
        (lambda x: x.tolist(), "broken", "the subject returned list, the claim needs a NumPy array"),
        (lambda x: np.zeros_like(x, np.float16), "broken", "values differ; first at flat index"),
    ],
)
def test_an_odd_subject_is_a_failed_claim_with_its_reason(act: Any, status: str, message: str) -> None:
    result = ask(CLAIM, Odd(act), Run(5), limit=0.3 if status == "hung" else 60)
    assert (result.status, result.failed) == (status, True)
    assert message in result.message


def leaves(x: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize("act", [raises, leaves])
def test_the_first_line_of_an_errors_message_is_the_error_itself(act: Any) -> None:
    first = ask(CLAIM, Odd(act), Run(5)).message.splitlines()[0]
    assert first in ("RuntimeError: the kernel is not compiled", "SystemExit: 3")


class Unsure(Odd):
    """It cannot even say what it offers."""

    name = "unsure"

    def offers(self, operation: str, options: Any) -> bool:  # noqa: ARG002  # the Protocol's names
        raise RuntimeError("no runtime on this machine")


def test_a_subject_that_raises_when_asked_what_it_offers_is_a_failed_claim_and_the_others_still_run() -> None:
    results = list(ask_all([CLAIM], [Unsure(raises), subject_named("reference")], lambda: Run(5)))
    assert [r.status for r in results] == ["error", "kept"]
    assert results[0].message.startswith("RuntimeError: no runtime on this machine\n")


def test_a_claim_is_not_asked_of_a_subject_that_does_not_offer_its_operation() -> None:
    result = ask(select("sum.*.fp16")[0], Odd(raises), Run(5))
    assert result.status == "not offered"
    assert result.message.startswith("odd does not offer sum with ")


def test_a_subject_that_declines_late_is_not_asked() -> None:
    def declines(x: Any) -> Any:
        raise NotOfferedError("not in this build")

    result = ask(CLAIM, Odd(declines), Run(5))
    assert (result.status, result.message, result.failed) == ("not offered", "not in this build", False)


@ENDS_A_THREAD
def test_after_a_hang_and_an_error_the_next_claims_still_run_and_no_thread_is_left() -> None:
    subjects = [Odd(hang), Odd(raises), subject_named("reference")]
    results = list(ask_all([CLAIM], subjects, lambda: Run(5), limit=5.0))
    assert [r.status for r in results] == ["hung", "error", "kept"]
    assert not [t for t in threading.enumerate() if t.name == "claim"]


def test_what_comes_after_the_total_is_not_reached_and_said_so() -> None:
    results = list(ask_all([CLAIM], [subject_named("reference")], lambda: Run(5), total=0.0))
    assert results[0].status == "not reached"
    assert results[0].message == "the total of 0 s was used up before this claim's turn; raise --minutes"


@ENDS_A_THREAD
def test_a_claim_that_the_total_cuts_short_is_not_reached_and_no_failure() -> None:
    results = list(ask_all([CLAIM], [Odd(hang)], lambda: Run(5), limit=60.0, total=0.5))
    assert (results[0].status, results[0].failed) == ("not reached", False)
    assert results[0].message == "the total of 0.5 s was used up while it was asked; raise --minutes"


@pytest.mark.parametrize("status", ["error", "hung"])
@ENDS_A_THREAD
def test_a_gap_excuses_no_error_and_no_hang(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gap = gaps.Gap(claim="cast.*", producer="torch", versions=">=2", since="2026-01-01", reason="r", link="l")
    monkeypatch.setattr(gaps, "known", lambda: (gap,))
    torch = subject_named("torch")
    monkeypatch.setattr(torch, "perform", lambda _, x, **_options: raises(x) if status == "error" else hang(x))
    assert ask(CLAIM, torch, Run(5), limit=0.3 if status == "hung" else 60).status == status


def test_a_gap_explains_a_failure_and_a_gap_that_closed_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gap = gaps.Gap(
        claim="cast.float32.*", producer="torch", versions=">=2", since="2026-01-01", reason="known", link="here"
    )
    monkeypatch.setattr(gaps, "known", lambda: (gap,))
    torch = subject_named("torch")
    assert ask(CLAIM, torch, Run(5)).status == "kept", "five draws say nothing about a gap"
    closed = ask(CLAIM, torch, Run(200))
    assert (closed.status, closed.failed) == ("gap closed", True)
    assert closed.message == (
        "cast.float32.fp16 holds on torch although gaps.toml lists it (known); remove the entry"
    )  # fmt: skip
    monkeypatch.setattr(torch, "perform", lambda _, x, **_options: x)
    known = ask(CLAIM, torch, Run(5))
    assert (known.status, known.failed) == ("gap", False)
    assert known.message.startswith("known since 2026-01-01: known (here)\nthe subject returned dtype")


def test_every_gap_names_a_claim_that_exists_and_a_day() -> None:
    for gap in gaps.known():
        assert select(gap.claim)
        assert len(gap.since.split("-")) == 3
        assert gaps.within("2.13.0", gap.versions) or gap.producer != "torch"


@pytest.mark.parametrize(
    ("installed", "versions", "inside"),
    [
        ("2.13.0+cpu", ">=2.11,<3", True),
        ("2.10.1", ">=2.11", False),
        ("3.0", "<3", False),
        ("0.6.0", "==0.6", True),
        ("0.6.1", "<=0.6", False),
        ("2.14.0.dev2026", ">2.13", True),
        ("2.13.rc1", "<=2.13", True),
    ],
)
def test_versions_are_compared_by_their_numbers(installed: str, versions: str, inside: bool) -> None:
    assert gaps.within(installed, versions) is inside


def test_a_gap_with_a_wrong_key_or_version_sign_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"gap 'x': missing \['link', 'producer'.*unknown \['why'\]; an entry has exactly"
    ):
        gaps.parse('[[gap]]\nclaim = "x"\nwhy = "y"\n')
    with pytest.raises(ValueError, match=r"versions='~=2': '~=2' must begin with >=, <=, ==, < or >"):
        gaps.within("2.0", "~=2")


ENTRY = {
    "claim": "cast.float64.fp16", "producer": "torch", "versions": ">=2", "since": "2026-01-01", "reason": "r",
    "link": "l",
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("claim", '"casting.*"', "no claim matches 'casting.*'; ids begin with one of"),
        ("producer", '"pytorch"', "no subject is called 'pytorch'; it is one of torch, engine"),
        ("devices", '["gpu"]', r"devices=\['gpu'\] must be some of cpu, cuda, npu, xpu, mps"),
        ("devices", "[]", r"devices=\[\] must be some of"),
        ("since", '"yesterday"', "Invalid isoformat string: 'yesterday'"),
        ("versions", '"2.13"', "'2.13' must begin with >=, <=, ==, < or >"),
    ],
)
def test_a_gap_that_would_cover_nothing_is_refused_and_named(key: str, value: str, message: str) -> None:
    rows = {name: f'"{text}"' for name, text in ENTRY.items()} | {key: value}
    text = "[[gap]]\n" + "\n".join(f"{name} = {entry}" for name, entry in rows.items())
    claim = "casting" if key == "claim" else "cast.float64.fp16"
    with pytest.raises(ValueError, match=rf"gap '{claim}.*' of \w+: .*{message}"):
        gaps.parse(text)


def test_a_misspelt_table_of_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown tables \['gaps'\]; every entry is a \[\[gap\]\]"):
        gaps.parse('[[gaps]]\nclaim = "x"\n')


def test_every_gap_covers_a_claim_that_its_producer_is_asked() -> None:
    subjects = subjects_for("cpu")
    covering = {gaps.find(c.id, s) for c in registered() for s in subjects if c.concerns(s)}
    installed = {subject.name for subject in subjects}
    assert [gap.claim for gap in gaps.known() if gap not in covering and gap.producer in installed] == []


def test_a_gap_is_dated_by_the_package_that_its_subject_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    gap = gaps.Gap(claim="*", producer="engine", versions="<1", since="2026-01-01", reason="r", link="l")
    monkeypatch.setattr(gaps, "known", lambda: (gap,))
    assert gaps.find("step.skip", subject_named("engine")) is gap


def test_a_gap_of_a_package_that_is_not_installed_covers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gap = gaps.Gap(claim="*", producer="odd", versions=">=0", since="2026-01-01", reason="r", link="l")
    monkeypatch.setattr(gaps, "known", lambda: (gap,))
    assert gaps.find("cast.float32.fp16", Odd(raises)) is None


def test_every_claim_states_a_sentence_a_source_and_why_its_tolerance() -> None:
    for claim in registered():
        assert len(claim.sentence) > 20, claim.id
        assert claim.source, claim.id
        assert claim.id.split(".")[0] in FAMILIES
        if isinstance(claim.agreement, Ulp):
            assert claim.agreement.n >= 0
            assert len(claim.agreement.reason) > 20
        if isinstance(claim.agreement, Bound):
            assert len(claim.agreement.derivation) > 20


def test_every_claim_concerns_a_subject_of_the_cpu() -> None:
    subjects = subjects_for("cpu")
    lonely = [claim.id for claim in registered() if not any(claim.concerns(subject) for subject in subjects)]
    optional = [c for c in lonely if c.startswith("flags.")]
    assert set(lonely) <= set(optional)


def test_subjects_are_subjects_and_an_unknown_one_lists_the_known() -> None:
    assert all(isinstance(subject, Subject) for subject in subjects_for("cpu"))
    with pytest.raises(ValueError, match=r"subject 'x' is not one of torch, engine, .*docs/subjects.md"):
        subject_named("x")


def test_an_extra_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(implementations._OPTIONAL, "absent", ("no_such_package", "x", "y"))
    with pytest.raises(ValueError, match="subject 'absent' needs the package no_such_package; pip install"):
        subject_named("absent")


def test_an_extra_that_cannot_be_imported_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "_OPTIONAL", {"broken": ("json", "mp_conformance.no_such_module", "x")})
    assert implementations.absent()["broken"].startswith("cannot be asked: importing json raised ModuleNotFoundError")
    assert "broken" not in [subject.name for subject in subjects_for("cpu")]
    with pytest.raises(ValueError, match="subject 'broken' cannot be asked: importing json raised"):
        subject_named("broken")


def test_a_subject_of_ones_own_is_plugged_in_by_module_and_class() -> None:
    assert subject_named("mp_conformance.implementations.reference:ReferenceSubject").name == "reference"
    with pytest.raises(ValueError, match=r"subject 'no_such:X': ModuleNotFoundError: .*; write module:Class"):
        subject_named("no_such:X")
    with pytest.raises(ValueError, match="subject 'collections:Counter' has no name, device, offers, perform; docs"):
        subject_named("collections:Counter")


def test_an_unknown_glob_lists_the_families() -> None:
    with pytest.raises(UnknownClaimError, match=r"no claim matches 'nothing.\*'; ids begin with one of accumulation, "):
        select("nothing.*")


def test_a_result_knows_whether_it_makes_the_run_fail() -> None:
    assert not Result("c", "s", "cpu", "kept").failed
    assert not Result("c", "s", "cpu", "not reached").failed
    assert Result("c", "s", "cpu", "gap closed").failed


def test_a_run_with_one_seed_draws_the_same_inputs_again() -> None:
    seen: list[list[bytes]] = [[], []]
    for inputs in seen:

        def keep(x: Any, inputs: list[bytes] = inputs) -> Any:
            inputs.append(x.tobytes())
            return subject_named("reference").perform("cast", x, to="fp16")

        ask(CLAIM, Odd(keep), Run(20, seed=3))
    assert seen[0] == seen[1]
