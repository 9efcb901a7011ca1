"""What a run leaves behind: JSON, one self-contained HTML page, a summary that fits a screen, README's table."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mp_conformance.claims import registered
from mp_conformance.claims.families import FAMILIES
from mp_conformance.compare import Bound, Ulp
from mp_conformance.runner import FAILURES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mp_conformance.claims import Claim
    from mp_conformance.runner import Result

__all__ = ["changes", "document", "environment", "guarantees_table", "html", "summary_lines"]

STATUSES = ("kept", "gap", "broken", "error", "hung", "gap closed", "not reached", "not offered")
_PACKAGES = (
    "mp-reference",
    "mp-torch",
    "mp-conformance",
    "torch",
    "numpy",
    "ml_dtypes",
    "hypothesis",
    "jax",
    "softfloatpy",
)


def environment(device: str) -> dict[str, str]:
    """Versions and machine, as far as they can change a bit.

    Args:
        device: the device type of the run.

    Returns:
        Name to text.

    Source: the running interpreter.

    >>> environment("cpu")["device"]
    'cpu'
    """
    found = {"device": device, "python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    import torch

    found["cpu capability"] = torch.backends.cpu.get_cpu_capability()
    found["torch threads"] = str(torch.get_num_threads())
    if device == "cuda" and torch.cuda.is_available():
        found["device name"] = torch.cuda.get_device_name(0)
        found["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return found


def document(results: Sequence[Result], *, device: str, seed: int, examples: int, pattern: str) -> dict[str, Any]:
    """The run as one JSON-able mapping.

    Args:
        results: in order.
        device: the device type.
        seed: of every draw.
        examples: per drawn claim.
        pattern: the glob that chose the claims.

    Returns:
        What ``--json`` writes and ``--compare`` reads.

    Source: this project.
    """
    asked = {result.claim for result in results}
    rows = {row.id: _claim_row(row) for row in registered() if row.id in asked}
    return {
        "what": "mp-conformance results",
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "environment": environment(device),
        "device": device,
        "seed": seed,
        "max_examples": examples,
        "claims": pattern,
        "rows": rows,
        "results": [asdict(result) for result in results],
    }


def _claim_row(row: Claim) -> dict[str, Any]:
    why = row.agreement.reason if isinstance(row.agreement, Ulp) else ""
    why = row.agreement.derivation if isinstance(row.agreement, Bound) else why
    return {
        "sentence": row.sentence, "source": row.source, "agreement": str(row.agreement), "why": why,
        "family": row.family, "format": row.format, "exhaustive": row.exhaustive,
    }  # fmt: skip


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, str]]:
    """What differs between two runs: devices, versions of torch, or two days.

    Args:
        old: a document, read from ``--compare``.
        new: this run's document.

    Returns:
        One row a claim and subject whose status or worst distance changed, or that only one run has.

    Raises:
        ValueError: ``old`` is no document of this tool.

    Source: this project.
    """
    if old.get("what") != new["what"]:
        raise ValueError("--compare needs a file that --json wrote; this one has no 'what': 'mp-conformance results'")
    sides = [{(r["claim"], r["subject"]): r for r in side["results"]} for side in (old, new)]
    rows = []
    for key in sorted(set(sides[0]) | set(sides[1])):
        texts = [_short(side.get(key)) for side in sides]
        if texts[0] != texts[1]:
            rows.append({"claim": key[0], "subject": key[1], "before": texts[0], "now": texts[1]})
    return rows


def _short(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "not asked"
    worst = result.get("worst")
    return str(result["status"]) + (f", worst {worst['distance']:.3g}" if worst else "")


def summary_lines(results: Sequence[Result], seconds: float) -> list[str]:
    """The outcome in at most 24 lines of at most 100 characters.

    Args:
        results: in order.
        seconds: how long the run took.

    Returns:
        Lines: one a subject with its counts, then the first failures, then what was not reached.

    Source: this project.
    """
    lines = []
    for subject in dict.fromkeys(f"{r.subject} on {r.device}" for r in results):
        mine = [r for r in results if f"{r.subject} on {r.device}" == subject]
        counts = Counter(r.status for r in mine)
        shown = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        lines.append(f"{subject:<20} {shown}; {sum(r.compared for r in mine):,} values compared"[:100])
    failures = [r for r in results if r.failed]
    for result in failures[:8]:
        first = (result.message.strip().splitlines() or [""])[-1 if result.status == "error" else 0]
        lines.append(f"  {result.status.upper()} {result.claim} [{result.subject}]: {first}"[:100])
    if len(failures) > 8:
        lines.append(f"  ... and {len(failures) - 8} more; --report or --json has them all")
    late = [r.claim for r in results if r.status == "not reached"]
    if late:
        families = ", ".join(sorted({claim.split(".")[0] for claim in late}))
        lines.append(f"not reached in time: {len(late)} claims of {families}"[:100])
    verdict = "every claim that was reached is kept" if not failures else f"{len(failures)} claims are not kept"
    lines.append(f"{verdict}; {len(results)} questions in {seconds:.1f} s")
    return lines


def html(data: Mapping[str, Any], diff: Sequence[Mapping[str, str]] = ()) -> str:
    """The run as one page that needs no network.

    Args:
        data: from ``document``.
        diff: from ``changes``.

    Returns:
        HTML.

    Source: ``templates/report.html.j2``.
    """
    from jinja2 import Environment

    template = files("mp_conformance").joinpath("templates", "report.html.j2").read_text(encoding="utf-8")
    sources = list(dict.fromkeys(row["source"] for row in data["rows"].values()))
    numbered = {source: number + 1 for number, source in enumerate(sources)}
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    results = [{**r, **data["rows"][r["claim"]], "rerun": rerun_command(data, r)} for r in data["results"]]
    text: str = page.render(
        data=data, diff=diff, statuses=STATUSES, failures=FAILURES, numbered=numbered, link=_linked,
        subjects=list(dict.fromkeys(f"{r['subject']} on {r['device']}" for r in results)),
        matrix=_matrix(results), columns=_columns(results), bars=_bars, results=results,
        counts=Counter(r["status"] for r in results),
    )  # fmt: skip
    return text


def rerun_command(data: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The command that asks one question again, with the draws it had.

    >>> rerun_command({"seed": 0, "max_examples": 200}, {"claim": "cast.x", "device": "cpu", "subject": "torch"})
    "mp-conformance --device cpu --claims 'cast.x' --subjects torch --seed 0 --max-examples 200"
    """
    return (
        f"mp-conformance --device {result['device']} --claims '{result['claim']}' --subjects {result['subject']} "
        f"--seed {data['seed']} --max-examples {data['max_examples']}"
    )


def _linked(source: str) -> str:
    found = re.search(r"https?://\S+", source)
    return found.group(0).rstrip(").,;") if found else ""


def _columns(results: Iterable[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(r["format"] for r in results if r["format"] != "-")
    return ["-", *names]


def _matrix(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Family -> format -> results of every subject."""
    table: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for result in results:
        table.setdefault(result["family"], {}).setdefault(result["format"], []).append(result)
    return table


def _bars(histogram: Mapping[str, int]) -> list[tuple[str, int, float]]:
    """Label, count, and the bar's width in percent, on a logarithmic scale because most values agree."""
    import math

    top = max((math.log10(1 + n) for n in histogram.values()), default=1.0) or 1.0
    ordered = sorted(histogram.items(), key=lambda item: float(item[0]))
    return [(label, n, 100 * math.log10(1 + n) / top) for label, n in ordered]


def guarantees_table() -> str:
    """README's guarantees as a Markdown table, one row a family, made from the claims.

    Returns:
        The table: what is guaranteed, how closely, how many claims say it, the glob that tests it.

    Raises:
        KeyError: a claim's family has no sentence in ``claims.families``.

    Source: the rows of ``claims``.

    >>> guarantees_table().splitlines()[0]
    '| guarantee | agreement | claims | test it |'
    """
    lines = ["| guarantee | agreement | claims | test it |", "|---|---|---|---|"]
    groups: dict[str, list[Claim]] = {}
    for row in registered():
        groups.setdefault(row.id.split(".")[0], []).append(row)
    for head, rows in groups.items():
        kinds = ", ".join(dict.fromkeys(str(row.agreement) for row in rows))
        lines.append(f"| {FAMILIES[head]} | {kinds} | {len(rows)} | `mp-conformance --claims '{head}.*'` |")
    return "\n".join(lines)


def write_json(path: str, data: Mapping[str, Any]) -> None:
    """Write a document where ``--compare`` can read it."""
    with open(path, "w", encoding="utf-8") as handle:
        json.dump(data, handle, indent=1, sort_keys=True)
