"""What a run says at its end: a summary that fits a screen, and what changed since another run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_conformance.runner import Result

__all__ = ["STATUSES", "change_lines", "changes", "settings_changed", "summary_lines"]

STATUSES = ("kept", "gap", "broken", "error", "hung", "gap closed", "not reached", "not offered")
"""What can come of a claim, in the order in which it is counted out."""

_NOBODY = "not asked"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, str]]:
    """What differs between two runs: devices, versions of torch, or two days.

    Args:
        old: a document, from ``read_json``.
        new: this run's document.

    Returns:
        One row a claim and subject whose status or worst distance changed, then one for each that only one run asked.

    Source: this project.
    """
    sides = [{(r["claim"], r["subject"]): r for r in side["results"]} for side in (old, new)]
    rows = []
    for key in sorted(set(sides[0]) | set(sides[1])):
        texts = [_short(side.get(key)) for side in sides]
        if texts[0] != texts[1]:
            rows.append({"claim": key[0], "subject": key[1], "before": texts[0], "now": texts[1]})
    return sorted(rows, key=_asked_once)


def _asked_once(row: Mapping[str, str]) -> bool:
    return _NOBODY in (row["before"], row["now"])


def settings_changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the circumstances of two runs: device, versions, machine, seed and draws.

    Args:
        old: a document, from ``read_json``.
        new: this run's document.

    Returns:
        Texts such as ``torch 2.12.0 -> 2.13.0``.

    Source: this project.

    >>> one = {"environment": {"torch": "2.12.0"}, "seed": 0, "max_examples": 200}
    >>> settings_changed(one, {**one, "environment": {"torch": "2.13.0"}, "seed": 1})
    ['torch 2.12.0 -> 2.13.0', 'seed 0 -> 1']
    """
    sides = [{**side["environment"], **{key: side[key] for key in ("seed", "max_examples")}} for side in (old, new)]
    names = dict.fromkeys((*sides[0], *sides[1]))
    return [
        f"{name} {sides[0].get(name, 'absent')} -> {sides[1].get(name, 'absent')}"
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    ]


def _short(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return _NOBODY
    worst = result.get("worst")
    return str(result["status"]) + (f", worst {worst['distance']:.3g}" if worst else "")


def summary_lines(
    results: Sequence[Result], seconds: float, compared: Sequence[str] = (), width: int = 100, height: int = 24
) -> list[str]:
    """The outcome on one screen.

    Args:
        results: in order.
        seconds: how long the run took.
        compared: lines of ``change_lines``.
        width: characters a line at most; a longer one ends with three dots.
        height: lines at most, as long as the subjects leave room for it.

    Returns:
        Lines: one a subject with its counts, the first failures and remarks, the comparison, what was not reached.

    Source: this project.
    """
    lines = _counts(results)
    failures = [r for r in results if r.failed]
    end = []
    late = [r.claim for r in results if r.status == "not reached"]
    if late:
        families = ", ".join(sorted({claim.split(".")[0] for claim in late}))
        end.append(f"not reached: {len(late)} claims of {families}")
    verdict = "every claim that was reached is kept" if not failures else f"{len(failures)} claims are not kept"
    end.append(f"{verdict}; {len(results)} questions in {seconds:.1f} s")
    end = [*compared[: max(2, height - len(lines) - len(end) - 2)], *end]
    told = [f"  {r.status.upper()} {r.claim} [{r.subject}]: {(r.message.splitlines() or [''])[0]}" for r in failures]
    told += [f"  REMARK {r.claim} [{r.subject}]: {remark}" for r in results for remark in r.remarks]
    room = max(2, height - len(lines) - len(end))
    if len(told) > room:
        told[room - 1 :] = [f"  ... and {len(told) - room + 1} more; --report or --json has them all"]
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in (*lines, *told, *end)]


def _counts(results: Sequence[Result]) -> list[str]:
    lines = []
    for subject in dict.fromkeys(f"{r.subject} on {r.device}" for r in results):
        mine = [r for r in results if f"{r.subject} on {r.device}" == subject]
        counts = Counter(r.status for r in mine)
        shown = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        lines.append(f"{subject:<20} {shown}; {sum(r.compared for r in mine):,} values compared")
    return lines


def change_lines(old: Mapping[str, Any], new: Mapping[str, Any], most: int = 6) -> list[str]:
    """What ``changes`` found, in a few lines.

    Args:
        old: a document, from ``read_json``.
        new: this run's document.
        most: how many changed answers are shown.

    Returns:
        Lines: what the runs have been, how many answers changed, the first of them.

    Source: this project.
    """
    rows = changes(old, new)
    changed = [row for row in rows if not _asked_once(row)]
    lines = [f"compared with the run of {old['when']}: {'; '.join(settings_changed(old, new)) or 'same settings'}"]
    count = f"{len(changed)} answers changed"
    alone = [sum(row[side] == _NOBODY for row in rows) for side in ("now", "before")]
    lines.append(f"{count}; {alone[0]} questions were asked then alone, {alone[1]} now alone" if any(alone) else count)
    lines += [f"  {row['claim']} [{row['subject']}]: {row['before']} -> {row['now']}" for row in changed[:most]]
    if len(changed) > most:
        lines.append(f"  ... and {len(changed) - most} more; --report has them all")
    return lines
