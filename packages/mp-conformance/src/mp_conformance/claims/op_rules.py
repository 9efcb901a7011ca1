"""Claims about op rules: what autocast casts before each op, on every device."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, DisagreementError, Tally
from mp_conformance.implementations import NotOfferedError
from mp_reference.spec import sources
from mp_reference.spec.formats import BF16, FP16
from mp_reference.spec.op_rules import DEVICES, PROBED_RELEASE, op_rules, rule_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject

__all__ = ["CLAIMS", "compare_rules", "was_probed"]

_BY_TORCH = tuple(device for device in DEVICES if device != "npu")
_LISTS = {"cuda": "AutocastTestLists", "cpu": "AutocastCPUTestLists"}
_GIVE_FP32 = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")


def was_probed(torch_version: str) -> bool:
    """Whether the rows of every device were seen on the dispatcher of this torch release.

    Source: the rows.

    >>> was_probed("2.13.0+cpu"), was_probed("2.14.1"), was_probed("2.11.0")
    (True, False, False)
    """
    return ".".join(torch_version.split("+")[0].split(".")[:2]) == PROBED_RELEASE


def compare_rules(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Every difference of two tables, in words.

    Args:
        found: rules by op, as seen.
        expected: rules by op, as the rows say.

    Returns:
        One sentence a difference, none if there is none.

    Source: this project.

    >>> compare_rules({"aten::mm": "fp32", "aten::new": "fp32"}, {"aten::mm": "lower_precision_fp"})
    ['aten::mm is fp32, the rows say lower_precision_fp', 'aten::new is fp32, the rows have no such op']
    """
    changed = [
        f"{op} is {found.get(op, 'not registered')}, the rows say {rule}"
        for op, rule in expected.items()
        if found.get(op) != rule
    ]
    return changed + [f"{op} is {rule}, the rows have no such op" for op, rule in found.items() if op not in expected]


def _same_rules(device: str, fmt: str, installed: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        expected = {op: row.rule for op, row in op_rules(device).items()}
        differences = compare_rules(subject.perform("op_rules", device=device, fmt=fmt), expected)
        if differences and not was_probed(installed):
            run.remarks += [f"torch {installed}: {difference}" for difference in differences]
        elif differences:
            raise DisagreementError("; ".join(differences))
        run.drawn += len(expected)
        run.record(Tally(compared=len(expected)))

    return check


def _as_listed(device: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        from mp_conformance.dispatcher import listed_by_torch

        del subject  # the rows against torch's second witness
        try:
            listed = listed_by_torch(_LISTS[device])
        except FileNotFoundError as reason:
            raise NotOfferedError(str(reason)) from reason
        for op, rule in listed.items():
            known = rule_of(op, device)
            if known not in (_GIVE_FP32 if rule == "fp32" else (rule,)):
                raise DisagreementError(f"torch's own test expects {rule} of {op} on {device}, the rows say {known}")
        run.drawn += len(listed)
        run.record(Tally(compared=len(listed)))

    return check


CLAIMS = (
    *(
        Claim(
            id=f"op-rules.{device}.{fmt.name}",
            sentence=f"on {device}, {fmt.name} autocast casts the inputs of every registered op as its row says, "
            "and of no other op",
            source=sources.TORCH_AUTOCAST,
            agreement=Bits(),
            operation="op_rules",
            options={"device": device, "fmt": fmt.name},
            check=_same_rules(device, fmt.name, version("torch")),
            format=fmt.name,
            devices=("cpu",),
            producers=("torch",),
            exhaustive=True,
        )
        for device in _BY_TORCH
        for fmt in (FP16, BF16)
    ),
    *(
        Claim(
            id=f"op-rules.test-lists.{device}",
            sentence=f"torch's own test lists expect of every op on {device} what its row says",
            source="torch/testing/_internal/autocast_test_lists.py",
            agreement=Bits(),
            operation="op_rules",
            options={"device": device, "fmt": "fp16"},
            check=_as_listed(device),
            devices=("cpu",),
            producers=("torch",),
            exhaustive=True,
        )
        for device in _LISTS
    ),
    *(
        Claim(
            id=f"emulation.rules.{device}.{fmt.name}",
            sentence=f"under emulate({device!r}) and {fmt.name} autocast, CPU tensors are cast before every op as the "
            f"rows of {device} say, and before no other op",
            source=sources.TORCH_NPU_AUTOCAST if device == "npu" else sources.TORCH_AUTOCAST,
            agreement=Bits(),
            operation="op_rules",
            options={"device": device, "fmt": fmt.name},
            check=_same_rules(device, fmt.name, PROBED_RELEASE),
            format=fmt.name,
            devices=("cpu",),
            producers=("emulation",),
            exhaustive=True,
        )
        for device in DEVICES
        for fmt in (FP16, BF16)
    ),
)
