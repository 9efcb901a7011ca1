"""The command line: which claims does this device keep?"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_conformance import report
from mp_conformance.claims import DEVICES, UnknownClaimError, select
from mp_conformance.claims.rows import Run
from mp_conformance.implementations import subject_named, subjects_for
from mp_conformance.runner import ask_all
from mp_reference.spec.formats import format_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mp_conformance.claims import Claim
    from mp_conformance.implementations import Subject
    from mp_conformance.runner import Result

__all__ = ["main"]

KEPT, BROKEN, MISUSED = 0, 1, 2
"""Exit statuses: every claim that was reached is kept; some are not; the command was not understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; the process's own unless given.

    Returns:
        ``KEPT``, ``BROKEN`` or ``MISUSED``.

    Source: this project.

    >>> main(["run", "--claims", "format.fp16.facts", "--subjects", "reference", "--quiet"])
    reference on cpu     1 kept; 5 values compared
    every claim that was reached is kept; 1 questions in ... s
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["run", *arguments]
    options = _parser().parse_args(arguments)
    try:
        status: int = options.act(options)
    except (UnknownClaimError, ValueError, OSError) as misuse:
        print(f"mp-conformance: {misuse}", file=sys.stderr)
        return MISUSED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mp-conformance", description=__doc__, epilog="Without a command, `run` is meant."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser("run", help="test the claims on a device")
    run.add_argument("--device", default="cpu", help=f"one of {', '.join(DEVICES)}")
    run.add_argument("--claims", default="*", metavar="GLOB", help="globs of claim ids, separated by commas")
    run.add_argument("--subjects", default="", metavar="NAMES", help="ask only these, separated by commas")
    run.add_argument("--max-examples", type=int, default=200, metavar="N", help="draws of a drawn claim")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--deep", action="store_true", help="5,000 draws, and all 2**32 float32 inputs")
    run.add_argument("--limit", type=float, default=0.0, metavar="S", help="seconds a claim may take (60; deep 3,000)")
    run.add_argument("--minutes", type=float, default=0.0, help="stop after so long (4 on an accelerator, else never)")
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
    vectors.add_argument("--folder", type=Path, help="where to write; the package's own folder unless given")
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

    if options.what == "write":
        folder = options.folder or Path(vectors.__file__).parent
        print(f"{len(vectors.write(folder))} files written")
        return KEPT
    stale = vectors.check()
    print(f"{len(vectors.names())} files, {len(stale)} differ from the oracle: {', '.join(stale) or 'none'}")
    return BROKEN if stale else KEPT


def _probe(options: argparse.Namespace) -> int:
    from mp_conformance.probes import find_out

    subject = subject_named("torch", _known(options.device))
    found = []
    for name in options.formats.split(","):
        finding = find_out(lambda a, b: subject.perform("matmul", a, b), format_named(name), options.device)
        print("\n".join(finding.lines()))
        found.append(asdict(finding))
    if options.json:
        report.write_json(str(options.json), {"environment": report.environment(options.device), "findings": found})
    return KEPT if all(finding["row"] for finding in found) else BROKEN


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


def _run(options: argparse.Namespace) -> int:
    _known(options.device)
    if options.max_examples < 1:
        raise ValueError(f"--max-examples {options.max_examples} must be at least 1")
    claims = select(options.claims)
    names = [name for name in options.subjects.split(",") if name]
    asked = [subject_named(name, options.device) for name in names] or subjects_for(options.device)
    before = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else None
    logging.getLogger("mp_torch").setLevel(logging.ERROR)  # every skip is drawn on purpose
    started = time.perf_counter()
    results = _asked(claims, asked, options)
    data = report.document(
        results, device=options.device, seed=options.seed, examples=options.max_examples, pattern=options.claims
    )
    diff = report.changes(before, data) if before is not None else []
    if options.json:
        report.write_json(str(options.json), data)
    if options.report:
        options.report.write_text(report.html(data, diff), encoding="utf-8")
    _print(report.summary_lines(results, time.perf_counter() - started), diff, before is not None)
    return BROKEN if any(result.failed for result in results) else KEPT


def _print(lines: Iterable[str], diff: Sequence[dict[str, str]], compared: bool) -> None:
    for line in lines:
        print(line)
    if compared:
        print(f"{len(diff)} answers changed since the run compared with")
    for row in diff[:8]:
        print(f"  {row['claim']} [{row['subject']}]: {row['before']} -> {row['now']}"[:100])


def _asked(claims: Sequence[Claim], subjects: Sequence[Subject], options: argparse.Namespace) -> list[Result]:
    examples = 5000 if options.deep and options.max_examples == 200 else options.max_examples
    limit = options.limit or (3000.0 if options.deep else 60.0)
    minutes = options.minutes or (4.0 if options.device != "cpu" and not options.deep else 0.0)
    questions = sum(claim.concerns(subject) for claim in claims for subject in subjects)
    answers = ask_all(
        claims, subjects, lambda: Run(examples, options.seed, options.deep), limit=limit,
        total=60 * minutes if minutes else None,
    )  # fmt: skip
    return list(answers if options.quiet else _shown(answers, questions))


def _shown(answers: Iterable[Result], questions: int) -> Iterable[Result]:
    """Pass results through and draw a progress bar on the standard error stream."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<38.38}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting", total=questions)
        for result in answers:
            progress.update(bar, advance=1, description=f"{result.claim} {result.subject}")
            yield result
