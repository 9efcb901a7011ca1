"""The command line: which claims does this device keep?"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_conformance import __version__, report
from mp_conformance.claims import DEVICES, UnknownClaimError, select
from mp_conformance.claims.rows import Run
from mp_conformance.implementations import absent, subject_named, subjects_for
from mp_conformance.runner import ask_all, not_reached, questions
from mp_conformance.summary import change_lines, summary_lines
from mp_reference.spec.formats import format_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mp_conformance.claims import Claim
    from mp_conformance.implementations import Subject
    from mp_conformance.runner import Result

__all__ = ["main"]

KEPT, BROKEN, MISUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: every claim that was reached is kept; some are not; the command was not understood; it was stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; the process's own unless given.

    Returns:
        ``KEPT``, ``BROKEN``, ``MISUSED`` or ``INTERRUPTED``.

    Source: this project.

    >>> main(["run", "--claims", "format.fp16.facts", "--subjects", "reference", "--quiet"])
    reference on cpu     1 kept; 5 values compared
    every claim that was reached is kept; 1 questions in ... s
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments = ["run", *arguments]
    options = _parser().parse_args(arguments)
    try:
        status: int = options.act(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return KEPT
    except (UnknownClaimError, ValueError, OSError) as misuse:
        print(f"mp-conformance: {misuse}", file=sys.stderr)
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mp-conformance",
        description=__doc__,
        epilog="Without a command, `run` is meant; `mp-conformance run --help` shows its options.",
    )
    parser.add_argument("--version", action="version", version=f"mp-conformance {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser("run", help="test the claims on a device")
    run.add_argument("--device", default="cpu", help=f"one of {', '.join(DEVICES)}")
    run.add_argument("--claims", default="*", metavar="GLOB", help="globs of claim ids, separated by commas")
    run.add_argument("--subjects", metavar="NAMES", help="ask only these, or module:Class; separated by commas")
    run.add_argument("--max-examples", type=int, metavar="N", help="draws of a drawn claim (200; deep 5,000)")
    run.add_argument("--seed", type=int, default=0, help="of every draw (0)")
    run.add_argument("--deep", action="store_true", help="more draws, and all 2**32 float32 inputs")
    run.add_argument("--limit", type=float, metavar="S", help="seconds a claim may take (60; deep 3,000)")
    run.add_argument("--minutes", type=float, help="stop after so long (4 on an accelerator, else never)")
    run.add_argument("--report", type=Path, metavar="OUT.html")
    run.add_argument("--json", type=Path, metavar="OUT.json")
    run.add_argument("--compare", type=Path, metavar="OTHER.json", help="say what changed since that run")
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    run.set_defaults(act=_run)
    listing = commands.add_parser("list", help="print every claim")
    listing.add_argument("--claims", default="*", metavar="GLOB")
    listing.set_defaults(act=_list)
    vectors = commands.add_parser("vectors", help="write or check the golden files")
    vectors.add_argument("what", choices=("write", "check"))
    vectors.add_argument("--folder", type=Path, help="where the files are; the package's own folder unless given")
    vectors.set_defaults(act=_vectors)
    probe = commands.add_parser("probe", help="find out how a device's matrix product adds")
    probe.add_argument("--device", default="cpu", help=f"one of {', '.join(DEVICES)}")
    probe.add_argument("--formats", default="fp16,bf16,fp32", metavar="NAMES")
    probe.add_argument("--json", type=Path, metavar="OUT.json")
    probe.set_defaults(act=_probe)
    mutants = commands.add_parser("mutants", help="show that every seeded fault is caught, and by which claim")
    mutants.add_argument("--max-examples", type=int, default=200, metavar="N")
    mutants.set_defaults(act=_mutants)
    commands.add_parser("guarantees", help="print README's table").set_defaults(act=_guarantees)
    return parser


def _list(options: argparse.Namespace) -> int:
    for row in select(options.claims):
        print(f"{row.id:<44} {row.agreement!s:<8} {row.sentence}")
    return KEPT


def _guarantees(options: argparse.Namespace) -> int:
    del options
    print(report.guarantees_table())
    return KEPT


def _vectors(options: argparse.Namespace) -> int:
    from mp_conformance import vectors

    if options.folder and not options.folder.is_dir():
        raise ValueError(f"--folder {options.folder} is no folder; make it first")
    if options.what == "write":
        print(f"{len(vectors.write(options.folder or Path(vectors.__file__).parent))} files written")
        return KEPT
    wrong = vectors.check(options.folder)
    for name, where in wrong.items():
        print(f"{name}.txt: {where}")
    print(f"{len(wrong)} files differ from the oracle: {', '.join(wrong) or 'none'}")
    return BROKEN if wrong else KEPT


def _probe(options: argparse.Namespace) -> int:
    from mp_conformance.probes import find_out, require_probed

    subject = subject_named("torch", _known(options.device))
    formats = [format_named(name) for name in _names(options.formats, "--formats")]
    for fmt in formats:
        require_probed(fmt)
    _require_places(options.json)
    found = []
    for fmt in formats:
        try:
            finding = find_out(lambda a, b: subject.perform("matmul", a, b), fmt, options.device)
        except Exception as reason:  # a device without such a product; the others are probed all the same
            print(f"{fmt.name} matrix product on {options.device} raised {type(reason).__name__}: {reason}"[:1000])
            continue
        print("\n".join(finding.lines()))
        found.append(asdict(finding))
    if options.json:
        report.write_json(options.json, {"environment": report.environment(options.device), "findings": found})
    return KEPT if len(found) == len(formats) and all(finding["row"] for finding in found) else BROKEN


def _mutants(options: argparse.Namespace) -> int:
    from mp_conformance.mutants import catch, seeded

    survivors = 0
    for mutant in seeded():
        complaint = catch(mutant, options.max_examples)
        survivors += not complaint
        print(f"{mutant.id:<30} {'caught by ' + mutant.caught_by if complaint else 'SURVIVES ' + mutant.caught_by}")
    print(f"{len(seeded())} seeded faults, {survivors} survive")
    return BROKEN if survivors else KEPT


def _known(device: str) -> str:
    if device not in DEVICES:
        raise ValueError(f"--device {device!r} is not one of {', '.join(DEVICES)}; give the type alone")
    return device


def _names(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"{option} {text!r} has an empty name; write names separated by commas")
    return names


def _require_places(*paths: Path | None) -> None:
    """Before the first question, not after the last: every file that will be written has a place."""
    for path in paths:
        if path is not None:
            if path.is_dir():
                raise ValueError(f"{path} is a folder; give the name of a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise ValueError(f"{path} cannot be written; choose another place")


def _settled(options: argparse.Namespace) -> argparse.Namespace:
    """The options with their defaults filled in, each in its range."""
    given = {name: getattr(options, name) for name in ("max_examples", "limit", "minutes")}
    if options.max_examples is None:
        options.max_examples = 5000 if options.deep else 200
    if options.limit is None:
        options.limit = 3000.0 if options.deep else 60.0
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            what = "at least 1" if name == "max_examples" else "a positive number"
            raise ValueError(f"--{name.replace('_', '-')} {value:g} must be {what}")
    if options.minutes is None and options.device != "cpu" and not options.deep:
        options.minutes = 4.0
    return options


def _run(options: argparse.Namespace) -> int:
    _known(options.device)
    _settled(options)
    _require_places(options.report, options.json)
    before = report.read_json(options.compare) if options.compare else None
    claims = select(options.claims)
    names = [] if options.subjects is None else _names(options.subjects, "--subjects")
    subjects = [subject_named(name, options.device) for name in names] or subjects_for(options.device)
    asked = questions(claims, subjects)
    if not asked:
        them = ", ".join(subject.name for subject in subjects)
        raise ValueError(f"none of {them} is asked about {options.claims!r}: there is no question, so no answer")
    logging.getLogger("mp_torch").setLevel(logging.ERROR)  # every skip is drawn on purpose
    started = time.perf_counter()
    results, interrupted = _asked(claims, subjects, asked, options)
    data = report.document(
        results, device=options.device, seed=options.seed, examples=options.max_examples, pattern=options.claims,
        deep=options.deep, asked_as={s.name: n for s, n in zip(subjects, names, strict=False) if s.name != n},
    )  # fmt: skip
    if options.json:
        report.write_json(options.json, data)
    if options.report:
        options.report.write_text(report.html(data, before), encoding="utf-8")
    compared = change_lines(before, data) if before else []
    screen = shutil.get_terminal_size((100, 24)) if sys.stdout.isatty() else os.terminal_size((100, 24))
    lines = summary_lines(results, time.perf_counter() - started, compared, min(max(screen.columns, 60), 100))
    print(*lines, *(f"not asked: {name} {why}" for name, why in absent().items() if not names), sep="\n")
    if interrupted:
        return INTERRUPTED
    return BROKEN if any(result.failed for result in results) else KEPT


def _asked(
    claims: Sequence[Claim],
    subjects: Sequence[Subject],
    asked: Sequence[tuple[Claim, Subject]],
    options: argparse.Namespace,
) -> tuple[list[Result], bool]:
    """Every answer, and whether control-C or a polite kill kept the last questions from being asked."""
    found: list[Result] = []
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a kernel that crashes the process leaves at least its trace
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _progress(len(asked), options.quiet) as (start, advance):
            for result in ask_all(
                claims, subjects, lambda: Run(options.max_examples, options.seed, options.deep), limit=options.limit,
                total=60 * options.minutes if options.minutes else None, before=start,
            ):  # fmt: skip
                found.append(result)
                advance()
    except KeyboardInterrupt:
        why = "the run was interrupted before this claim was answered"
        return found + [not_reached(claim, subject, why) for claim, subject in asked[len(found) :]], True
    finally:
        signal.signal(signal.SIGTERM, usual)
    return found, False


@contextmanager
def _progress(questions: int, quiet: bool) -> Iterator[tuple[Callable[[Claim, Subject], None], Callable[[], None]]]:
    """A bar on the standard error stream that shows the question being asked, and two functions that move it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<38.38}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        bar = progress.add_task("starting", total=questions)

        def start(claim: Claim, subject: Subject) -> None:
            progress.update(bar, description=f"{claim.id} {subject.name}")

        yield start, lambda: progress.advance(bar)
