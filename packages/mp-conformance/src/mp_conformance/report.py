"""What a run leaves behind: JSON, one self-contained HTML page, README's table."""

from __future__ import annotations

import json
import math
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
from mp_conformance.implementations import absent
from mp_conformance.runner import FAILURES
from mp_conformance.summary import STATUSES, changes, settings_changed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from mp_conformance.claims import Claim
    from mp_conformance.runner import Result

__all__ = ["document", "environment", "guarantees_table", "html", "read_json", "write_json"]

_WHAT = "mp-conformance results"
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
    found |= {f"not asked: {name}": reason for name, reason in absent().items()}
    module = getattr(torch, device)
    if device != "cpu" and module.is_available():
        found["device name"] = str(getattr(module, "get_device_name", lambda: "unnamed")())
    if device == "cuda" and module.is_available():
        found["compute capability"] = ".".join(map(str, module.get_device_capability(0)))
    return found


def document(
    results: Sequence[Result],
    *,
    device: str,
    seed: int,
    examples: int,
    pattern: str,
    deep: bool = False,
    asked_as: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The run as one JSON-able mapping.

    Args:
        results: in order.
        device: the device type.
        seed: of every draw.
        examples: per drawn claim.
        pattern: the glob that chose the claims.
        deep: whether exhaustive claims took their widest table.
        asked_as: a subject's name -> how the command line names it, where that differs.

    Returns:
        What ``--json`` writes and ``--compare`` reads.

    Source: this project.
    """
    asked = {result.claim for result in results}
    rows = {row.id: _claim_row(row) for row in registered() if row.id in asked}
    return {
        "what": _WHAT,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "environment": environment(device),
        "device": device,
        "seed": seed,
        "max_examples": examples,
        "deep": deep,
        "asked_as": dict(asked_as or {}),
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


def html(data: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """The run as one page that needs no network.

    Args:
        data: from ``document``.
        before: an earlier run's document, to show what changed since.

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
        data=data, before=before, diff=changes(before, data) if before else [],
        settings=settings_changed(before, data) if before else [],
        statuses=STATUSES, failures=FAILURES, numbered=numbered, link=_linked,
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
    subject = data.get("asked_as", {}).get(result["subject"], result["subject"])
    return (
        f"mp-conformance --device {result['device']} --claims '{result['claim']}' --subjects {subject} "
        f"--seed {data['seed']} --max-examples {data['max_examples']}{' --deep' if data.get('deep') else ''}"
    )


def _linked(source: str) -> str:
    found = re.search(r"https?://\S+", source)
    return found.group(0).rstrip(").,;") if found else ""


def _columns(results: Iterable[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(r["format"] for r in results)
    return sorted(names, key=lambda name: name != "-")  # "any format" first, the others in their order


def _matrix(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Family -> format -> results of every subject."""
    table: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for result in results:
        table.setdefault(result["family"], {}).setdefault(result["format"], []).append(result)
    return table


def _bars(histogram: Mapping[str, int]) -> list[tuple[str, int, float]]:
    """Label, count, and the bar's width in percent, on a logarithmic scale because most values agree."""
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


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a document where ``--compare`` can read it."""
    path.write_text(json.dumps(data, indent=1, sort_keys=True), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A document that ``write_json`` wrote.

    Args:
        path: the file.

    Returns:
        The document.

    Raises:
        ValueError: the file is no such document; the message names it.
        OSError: the file cannot be read.

    Source: this project.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as reason:
        raise ValueError(f"{path} is no JSON ({reason}); --compare needs a file that --json wrote") from reason
    if not isinstance(data, dict) or data.get("what") != _WHAT:
        raise ValueError(f"{path} has no 'what': '{_WHAT}'; --compare needs a file that --json wrote")
    return data
