"""Known gaps: claims that a producer is known to break, each dated and explained, and removed when it closes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mp_conformance.implementations import Subject

__all__ = ["Gap", "find", "known", "parse"]

_KEYS = {"claim", "producer", "devices", "versions", "since", "reason", "link"}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One entry of ``gaps.toml``.

    Args:
        claim: a glob of claim ids.
        producer: the subject's name.
        versions: the range in which it is known, such as ``>=2.11,<3``; of the package named like the producer.
        since: the day it was seen, ISO 8601.
        reason: what the producer does instead.
        link: where that is reported or measured.
        devices: the device types on which it was seen.
    """

    claim: str
    producer: str
    versions: str
    since: str
    reason: str
    link: str
    devices: tuple[str, ...] = ("cpu",)


def parse(text: str) -> tuple[Gap, ...]:
    """Read the entries of a TOML document.

    Args:
        text: ``[[gap]]`` tables.

    Returns:
        The entries, in order.

    Raises:
        ValueError: an entry lacks a key or has an unknown one.

    Source: this project.

    >>> parse('')
    ()
    """
    rows = []
    for entry in tomllib.loads(text).get("gap", []):
        missing, unknown = _KEYS - {"devices"} - set(entry), set(entry) - _KEYS
        if missing or unknown:
            raise ValueError(
                f"gap {entry.get('claim', '?')!r}: missing {sorted(missing)}, unknown {sorted(unknown)}; an entry has "
                f"exactly the keys {', '.join(sorted(_KEYS))} (devices may be left out)"
            )
        rows.append(Gap(**{**entry, "devices": tuple(entry.get("devices", ("cpu",)))}))
    return tuple(rows)


@cache
def known() -> tuple[Gap, ...]:
    """The entries that ship with the package.

    Source: ``gaps.toml``.

    >>> all(gap.reason for gap in known())
    True
    """
    return parse(files("mp_conformance").joinpath("gaps.toml").read_text(encoding="utf-8"))


def find(claim: str, subject: Subject) -> Gap | None:
    """The gap that covers this claim on this subject, at the version that is installed.

    Args:
        claim: a claim's id.
        subject: who is asked.

    Returns:
        The first matching entry, or None.

    Source: this project.
    """
    for gap in known():
        if (
            gap.producer == subject.name
            and subject.device in gap.devices
            and fnmatchcase(claim, gap.claim)
            and _installed_within(gap)
        ):
            return gap
    return None


def _installed_within(gap: Gap) -> bool:
    try:
        installed = version({"reference": "mp-reference"}.get(gap.producer, gap.producer))
    except PackageNotFoundError:
        return False
    return within(installed, gap.versions)


def within(installed: str, versions: str) -> bool:
    """Whether a version lies in a range, by release numbers alone.

    Args:
        installed: such as ``2.13.0+cpu``.
        versions: comma-separated comparisons.

    Returns:
        Whether every comparison holds.

    Raises:
        ValueError: a comparison begins with none of ``>= <= == < >``.

    Source: the release segment of PEP 440.

    >>> within("2.13.0+cpu", ">=2.11,<3")
    True
    """
    have = _release(installed)
    for part in versions.split(","):
        part = part.strip()
        for sign in (">=", "<=", "==", "<", ">"):
            if part.startswith(sign):
                want = _release(part[len(sign) :])
                size = max(len(have), len(want))
                pair: tuple[Any, Any] = (have + (0,) * (size - len(have)), want + (0,) * (size - len(want)))
                order = {">=": pair[0] >= pair[1], "<=": pair[0] <= pair[1], "==": pair[0] == pair[1]}
                order |= {"<": pair[0] < pair[1], ">": pair[0] > pair[1]}
                if not order[sign]:
                    return False
                break
        else:
            raise ValueError(f"versions={versions!r}: {part!r} must begin with >=, <=, ==, < or >; write '>=2.11,<3'")
    return True


def _release(text: str) -> tuple[int, ...]:
    numbers = []
    for piece in text.strip().split("+")[0].split("."):
        digits = "".join(ch for ch in piece if ch.isdigit())
        if not piece[:1].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)
