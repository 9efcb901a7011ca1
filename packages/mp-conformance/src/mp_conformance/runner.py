"""Ask one subject about one claim, with a time limit, and say what came of it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_conformance import gaps
from mp_conformance.compare import DisagreementError
from mp_conformance.implementations import NotOfferedError, NotReachedError
from mp_conformance.isolation import Apart, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mp_conformance.claims.rows import Claim, Run
    from mp_conformance.implementations import Subject

__all__ = ["FAILURES", "Result", "ask", "ask_all", "not_reached", "questions"]

FAILURES = ("broken", "error", "hung", "gap closed")
"""The statuses that make a run fail; the others are kept, gap, not offered and not reached."""


_ENOUGH = 200
"""Draws below which a known gap may hide by luck, so that its absence says nothing."""


class _TimeLimitError(BaseException):
    """Raised inside a claim's thread when its time is over; a BaseException, so that no check swallows it."""


@dataclass
class Result:
    """What came of one claim on one subject; the report's cell.

    ``status`` is one of ``kept``, ``broken`` (the claim is false), ``error`` (the subject raised), ``hung`` (it took
    too long), ``gap`` (false, known and dated), ``gap closed`` (a known gap that is none), ``not offered`` and
    ``not reached``.

    >>> Result("format.fp16.facts", "torch", "cpu", "broken").failed
    True
    """

    claim: str
    subject: str
    device: str
    status: str
    drawn: int = 0
    compared: int = 0
    histogram: dict[str, int] = field(default_factory=dict)
    worst: dict[str, Any] | None = None
    message: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether this makes the run fail."""
        return self.status in FAILURES


def ask(claim: Claim, subject: Subject, run: Run, *, limit: float = 60.0) -> Result:
    """Test one claim on one subject.

    Args:
        claim: the row.
        subject: who is asked.
        run: budget and seed; its tally ends up in the result.
        limit: seconds after which the claim counts as hung.

    Returns:
        The result; no exception of the subject leaves this function, and what it wrote into its operands or into the
        global state of Python, NumPy and torch changes no other claim.

    Source: this project.

    >>> from mp_conformance.claims import Run, select
    >>> from mp_conformance.implementations import subject_named
    >>> ask(select("format.fp16.facts")[0], subject_named("reference"), Run()).status
    'kept'
    """
    started = time.perf_counter()
    gap = gaps.find(claim.id, subject)
    run.shrink = run.shrink and gap is None  # what is known needs no smallest example

    def check() -> None:
        if not subject.offers(claim.operation, claim.options):
            raise NotOfferedError(f"{subject.name} does not offer {claim.operation} with {dict(claim.options)}")
        claim.check(Apart(subject), run)

    with undisturbed(run.remarks):
        status, message = _bounded(check, limit)
    if gap and status == "broken":  # a subject that raises or hangs is never known
        status, message = "gap", f"known since {gap.since}: {gap.reason} ({gap.link})\n{message}"
    elif gap and status == "kept" and (claim.exhaustive or run.examples >= _ENOUGH):
        status = "gap closed"
        message = f"{claim.id} holds on {subject.name} although gaps.toml lists it ({gap.reason}); remove the entry"
    return Result(
        claim=claim.id, subject=subject.name, device=subject.device, status=status, drawn=run.drawn,
        compared=run.tally.compared, histogram=dict(run.tally.histogram),
        worst=asdict(run.tally.worst) if run.tally.worst else None, message=message,
        seconds=time.perf_counter() - started, notes=run.notes, remarks=run.remarks,
    )  # fmt: skip


def _bounded(check: Callable[[], None], limit: float) -> tuple[str, str]:
    """Run ``check`` in a thread of its own, so that one that never returns costs its limit and no more."""
    outcome: list[tuple[str, str]] = []

    def body() -> None:
        try:
            with np.errstate(all="ignore"):  # what overflows or is invalid here is data, and compared as such
                check()
        except NotOfferedError as reason:
            outcome.append(("not offered", str(reason)))
        except NotReachedError as reason:
            outcome.append(("not reached", str(reason)))
        except DisagreementError as difference:
            outcome.append(("broken", str(difference)))
        except _TimeLimitError:
            return
        except BaseException as reason:  # whatever a subject raises is the claim's result, never the run's end
            outcome.append(("error", _told(reason)))
        else:
            outcome.append(("kept", ""))

    worker = threading.Thread(target=lambda: _quietly(body), daemon=True, name="claim")
    worker.start()
    try:
        worker.join(limit)
    except KeyboardInterrupt:
        _end(worker)
        raise
    if worker.is_alive() and not outcome:
        _end(worker)
        return "hung", f"no answer within {limit:g} s; run the claim alone, or raise --limit"
    return outcome[0]


def _told(reason: BaseException) -> str:
    """The error's own words in the first line, where a summary finds them, then the trace."""
    words = traceback.format_exception_only(reason)[0].strip().splitlines() or [type(reason).__name__]
    return "\n".join([words[0], "", *traceback.format_exc(limit=-12).splitlines()])


def _quietly(body: Callable[[], None]) -> None:
    """Let nothing escape that arrives while a thread is being ended."""
    with contextlib.suppress(BaseException):
        body()


def _end(worker: threading.Thread) -> None:
    """End a loop in Python, again and again, because Hypothesis runs a failing test once more.

    A hang inside C keeps its thread, which is a daemon and dies with the process.
    """
    for _ in range(20):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(_TimeLimitError))
        worker.join(0.1)
        if not worker.is_alive():
            return


def questions(claims: Iterable[Claim], subjects: Iterable[Subject]) -> list[tuple[Claim, Subject]]:
    """Every claim with every subject that it concerns, in order.

    Args:
        claims: rows.
        subjects: who could be asked; one that raises when asked what it offers is asked, so that this has a result.

    Returns:
        The pairs.

    Source: this project.

    >>> from mp_conformance import select, subject_named
    >>> len(questions(select("format.fp16.*"), [subject_named("reference")]))
    2
    """
    asked = list(subjects)
    return [(claim, subject) for claim in claims for subject in asked if _concerned(claim, subject)]


def _concerned(claim: Claim, subject: Subject) -> bool:
    try:
        return claim.concerns(subject)
    except Exception:  # the same call is made again where its trace becomes the result
        return True


def not_reached(claim: Claim, subject: Subject, why: str) -> Result:
    """The result of a question that nobody came to ask."""
    return Result(claim.id, subject.name, subject.device, "not reached", message=why)


def ask_all(
    claims: Iterable[Claim],
    subjects: Iterable[Subject],
    make_run: Callable[[], Run],
    *,
    limit: float = 60.0,
    total: float | None = None,
    before: Callable[[Claim, Subject], object] = lambda _claim, _subject: None,
) -> Iterator[Result]:
    """Every claim on every subject that it concerns, lazily, until the total time is over.

    Args:
        claims: rows.
        subjects: who is asked.
        make_run: a fresh budget for each question.
        limit: seconds a claim may take.
        total: seconds the whole run may take; what is left over then is ``not reached``.
        before: called with each question before it is asked.

    Yields:
        One result a question, in order.

    Source: this project.

    >>> from mp_conformance import Run, select, subject_named
    >>> [result.status for result in ask_all(select("format.fp16.facts"), [subject_named("reference")], Run)]
    ['kept']
    """
    started = time.perf_counter()
    for claim, subject in questions(claims, subjects):
        left = float("inf") if total is None else total - (time.perf_counter() - started)
        if left <= 0:
            why = f"the total of {total:g} s was used up before this claim's turn; raise --minutes"
            yield not_reached(claim, subject, why)
            continue
        before(claim, subject)
        result = ask(claim, subject, make_run(), limit=min(limit, max(left, 1.0)))
        if result.status == "hung" and left < limit:
            result.status = "not reached"
            result.message = f"the total of {total:g} s was used up while it was asked; raise --minutes"
        yield result
