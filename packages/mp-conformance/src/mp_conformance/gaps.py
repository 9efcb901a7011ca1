"""Known gaps: claims that a producer is known to break, each dated and explained, and removed when it closes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mp_conformance.implementations import Subject

__all__ = ["Gap", "find", "known", "parse"]

_KEYS = {"claim", "producer", "devices", "versions", "since", "reason", "link"}

_PACKAGES = {
    "reference": "mp-reference", "softfloat": "softfloatpy", "autograd": "torch", "vectors": "mp-conformance",
    "engine": "mp-torch", "ranks": "mp-torch", "emulation": "mp-torch", "emulated-engine": "mp-torch",
    "npu-on-cpu": "mp-torch",
}  # fmt: skip
"""Subject -> the package whose version counts, where it has another name."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One entry of ``gaps.toml``.

    Args:
        claim: a glob of claim ids.
        producer: the subject's name.
        versions: the range in which it is known, such as ``>=2.11,<3``; of the package that the producer comes in.
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
        ValueError: an entry lacks a key or has an unknown one, or names a claim, a subject, a device or a day that does
            not exist; such an entry would cover nothing and nobody would know.

    Source: this project.

    >>> parse('')
    ()
    """
    document = tomllib.loads(text)
    if set(document) - {"gap"}:
        raise ValueError(f"gaps: unknown tables {sorted(set(document) - {'gap'})}; every entry is a [[gap]]")
    rows = []
    for entry in document.get("gap", []):
        missing, unknown = _KEYS - {"devices"} - set(entry), set(entry) - _KEYS
        if missing or unknown:
            raise ValueError(
                f"gap {entry.get('claim', '?')!r}: missing {sorted(missing)}, unknown {sorted(unknown)}; an entry has "
                f"exactly the keys {', '.join(sorted(_KEYS))} (devices may be left out)"
            )
        gap = Gap(**{**entry, "devices": tuple(entry.get("devices", ("cpu",)))})
        try:
            _require_known(gap)
        except ValueError as reason:
            raise ValueError(f"gap {gap.claim!r} of {gap.producer}: {reason}") from reason
        rows.append(gap)
    return tuple(rows)


def _require_known(gap: Gap) -> None:
    from mp_conformance.claims import DEVICES, select
    from mp_conformance.implementations import names

    select(gap.claim)
    if gap.producer not in names():
        raise ValueError(f"no subject is called {gap.producer!r}; it is one of {', '.join(names())}")
    if not gap.devices or set(gap.devices) - set(DEVICES):
        raise ValueError(f"devices={list(gap.devices)} must be some of {', '.join(DEVICES)}")
    date.fromisoformat(gap.since)
    within("0", gap.versions)


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
        installed = version(_PACKAGES.get(gap.producer, gap.producer))
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
