"""Op rules: which cast ``torch.autocast`` makes before each op, on every device."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from mp_reference.spec import sources

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AUTOCAST_FORMATS", "BANNED_MESSAGES", "DEVICES", "PROBED_RELEASE", "PROMOTING_ARGUMENTS", "RULES", "OpRule",
    "op_rules", "overload_of", "rule_of",
]  # fmt: skip

Rule = Literal["lower_precision_fp", "fp32", "fp32_set_opt_dtype", "fp32_append_dtype", "promote", "banned"]
"""What happens to an op's floating inputs that lie on the device and are not float64.

``lower_precision_fp``: all cast to the autocast format. ``fp32``: all cast to fp32. ``fp32_set_opt_dtype``: not cast;
the op's ``dtype`` argument becomes fp32 where the caller gave none. ``fp32_append_dtype``: not cast; another overload
with ``dtype`` fp32 is called. ``promote``: all cast to the widest among them. ``banned``: the op raises.
"""

RULES: tuple[str, ...] = get_args(Rule)
"""Every rule, by name."""

DEVICES: tuple[str, ...] = ("cuda", "cpu", "xpu", "mps", "mtia", "maia", "npu")
"""Every device type that has a table."""

AUTOCAST_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {device: ("fp16", "bf16", "fp32") if device == "cuda" else ("fp16", "bf16") for device in DEVICES}
)
"""The formats that autocast accepts on each device; elsewhere fp32 turns autocast off with a warning."""

BANNED_MESSAGES: Mapping[str, str] = MappingProxyType(
    {
        "aten::binary_cross_entropy": (
            "binary_cross_entropy is banned under autocast: its backward divides by x * (1 - x), which low precision "
            "rounds to 0 near 0 and 1; call binary_cross_entropy_with_logits on the logits, or disable autocast "
            "around the call and give it fp32 inputs"
        )
    }
)
"""Why an op is banned and the way out: one message on all devices."""

PROMOTING_ARGUMENTS: Mapping[str, int] = MappingProxyType({"aten::bilinear": 3})
"""How many leading arguments take part in a promotion, where not all do: an optional one (a bias) is cast only."""

PROBED_RELEASE = "2.13"
"""The torch release whose dispatcher was probed on every device; of older ones a header is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """One row: the rule of one op overload on one device.

    Args:
        op: the overload's full name, such as ``aten::softmax.int``.
        device: a device type of ``DEVICES``.
        rule: a name of ``RULES``.
        since: the oldest torch release that was looked at and had this row.
        until: the first torch release without it; None where it still holds.
        source: what showed it.

    Source: the row's own ``source`` field.

    >>> op_rules("cuda")["aten::exp"].rule
    'fp32'
    """

    op: str
    device: str
    rule: Rule
    since: str
    until: str | None
    source: str

    def holds_in(self, torch_version: str) -> bool:
        """Whether the row holds in a release such as ``"2.13"``; local suffixes (``+cpu``) are ignored."""
        version = _release(torch_version)
        return _release(self.since) <= version and (self.until is None or version < _release(self.until))


def _release(version: str) -> tuple[int, int]:
    """``"2.13.0+cpu"`` as ``(2, 13)``: op lists change between minor releases only."""
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        raise ValueError(f"torch_version={version!r} must start with two numbers; write it like '2.13'")
    return int(parts[0]), int(parts[1])


def _source(device: str, table: Mapping[str, str]) -> str:
    """What showed the rows of one table on one device."""
    if device == "npu":
        return sources.TORCH_NPU_AUTOCAST
    if "until" in table:
        return sources.TORCH_AUTOCAST_HEADER
    older = "" if table["since"] == PROBED_RELEASE else f"; {sources.TORCH_AUTOCAST_HEADER}"
    return f"{sources.TORCH_AUTOCAST}{older}"


@cache
def _rows() -> tuple[OpRule, ...]:
    """Every row of the data beside this module."""
    tables = tomllib.loads(files("mp_reference.spec").joinpath("op_rules.toml").read_text(encoding="utf-8"))["rules"]
    return tuple(
        OpRule(
            op=f"aten::{op}",
            device=device,
            rule=table["rule"],
            since=table["since"],
            until=table.get("until"),
            source=_source(device, table),
        )
        for table in tables
        for device in table["devices"]
        for op in table["ops"]
    )


@cache
def op_rules(device: str, torch_version: str | None = None) -> Mapping[str, OpRule]:
    """The table of one device.

    Args:
        device: a device type of ``DEVICES``.
        torch_version: keep the rows that hold in this release, such as ``"2.13"``; None keeps the newest rows. Of the
            releases before 2.13 only the lists that cuda, xpu, mtia and maia share are known.

    Returns:
        Rows by the overload's full name. An op that is not in it takes its inputs as they are.

    Raises:
        ValueError: no table for this device, a version that is no version, or one from before the device's first row.

    Source: each row's ``source``.

    >>> len(op_rules("cuda")), len(op_rules("cpu")), len(op_rules("npu"))
    (119, 127, 104)
    """
    if device not in DEVICES:
        raise ValueError(
            f"device={device!r} has no op rules; the tables cover {', '.join(DEVICES)}: "
            "pass the type alone, without an index"
        )
    rows = [row for row in _rows() if row.device == device]
    held = [row for row in rows if (row.until is None if torch_version is None else row.holds_in(torch_version))]
    if not held:
        raise ValueError(
            f"torch_version={torch_version!r} is older than the first release known for {device}, "
            f"{min(rows, key=lambda row: _release(row.since)).since}; ask for a newer one"
        )
    return MappingProxyType({row.op: row for row in held})


def overload_of(op: str, device: str) -> str:
    """The full name of an op on one device.

    Args:
        op: a name with or without ``aten::`` and overload.
        device: a device type of ``DEVICES``.

    Returns:
        The overload that has a row: ``op`` itself, or the first of its listed overloads (all have one rule). Where
        none has a row: ``op`` with its namespace.

    Raises:
        ValueError: no table for this device.

    Source: the rows.

    >>> overload_of("softmax", "cuda"), overload_of("mm", "cuda"), overload_of("relu", "cuda")
    ('aten::softmax.int', 'aten::mm', 'aten::relu')
    """
    table = op_rules(device)
    full = op if "::" in op else f"aten::{op}"
    if full in table or "." in full:
        return full
    return next((name for name in table if name.startswith(f"{full}.")), full)


def rule_of(op: str, device: str) -> str | None:
    """The rule of one op on one device.

    Args:
        op: as for ``overload_of``.
        device: a device type of ``DEVICES``.

    Returns:
        A name of ``RULES``, or None where the op has no rule there.

    Raises:
        ValueError: no table for this device.

    Source: the rows.

    >>> rule_of("softmax", "cuda"), rule_of("softmax", "cpu")
    ('fp32_set_opt_dtype', None)
    """
    row = op_rules(device).get(overload_of(op, device))
    return None if row is None else row.rule
