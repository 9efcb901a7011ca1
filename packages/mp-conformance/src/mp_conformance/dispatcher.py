"""Which cast autocast makes before each op: found out on the installed torch, for any device, without the device.

Tensors that hold no data are given to each op that is registered for a device's autocast key. In inference mode even
composite ops arrive undecomposed below autocast, where the tensors tell which dtypes the op was given; no kernel runs.
"""

# ruff: noqa: SLF001  # torch offers no public way to list a dispatch key's registrations or to make such tensors

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from mp_torch.emulate.dispatcher import op_overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch._ops import OpOverload

__all__ = ["AUTOCAST_KEYS", "Seen", "listed_by_torch", "probe", "rule_seen"]

AUTOCAST_KEYS = {
    "cuda": "AutocastCUDA", "cpu": "AutocastCPU", "xpu": "AutocastXPU", "mps": "AutocastMPS", "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
}  # fmt: skip
"""The dispatch key of each device that torch itself knows; an npu's rules are registered by its own package."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What reached the op below autocast.

    Args:
        op: the overload that was called, which may be another one than was asked for.
        dtypes: of the floating tensors among its arguments, in order.
        dtype: its ``dtype`` argument.
    """

    op: str
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype | None


class _Reached(BaseException):
    """Carries what was seen out of the dispatcher, past every handler of ordinary exceptions."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self.seen = seen


class _Shadow(torch.Tensor):
    """A tensor with a dtype and a device and no data."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: str) -> _Shadow:
        """A 2 x 2 tensor."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: _Shadow = make(cls, (2, 2), dtype=dtype, device=device)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's own signature lacks the defaults
        """Answer casts, and stop at anything else."""
        given = dict(kwargs or {})
        name: str = func.name()  # type: ignore[no-untyped-call]  # torch's own
        if name in ("aten::to.dtype", "aten::_to_copy"):
            return _Shadow(given.get("dtype") or args[1], args[0].device.type)
        leaves = tree_leaves((args, given))
        dtypes = tuple(x.dtype for x in leaves if isinstance(x, _Shadow) and x.is_floating_point())
        asked = [x for x in leaves if isinstance(x, torch.dtype)]
        raise _Reached(Seen(name, dtypes, asked[0] if asked else None))


def _arguments(op: OpOverload, device: str, dtypes: Sequence[torch.dtype]) -> tuple[list[Any], dict[str, Any]]:
    """Some arguments of the right types; the tensors' dtypes in turn."""
    made = 0

    def tensor() -> _Shadow:
        nonlocal made
        made += 1
        return _Shadow(dtypes[(made - 1) % len(dtypes)], device)

    plain = {"int": 1, "number": 1.5, "float": 1.0, "bool": False, "str": "ij,jk->ik" if "einsum" in str(op) else "fro"}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            value: Any = tensor()
        elif kind == "List[Tensor]":
            value = [tensor(), tensor()]
        elif kind == "List[Optional[Tensor]]":
            value = [_Shadow(torch.int64, device)]
        elif kind.startswith("Optional"):
            value = None
        elif argument.has_default_value():
            value = argument.default_value
        else:
            value = [kind == "List[bool]" or 1] if kind.startswith("List") else plain[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _see(op: OpOverload, device: str, dtypes: Sequence[torch.dtype]) -> Seen | str:
    """What reaches the op, or the message of its refusal."""
    args, kwargs = _arguments(op, device, dtypes)
    try:
        op(*args, **kwargs)
    except _Reached as reached:
        return reached.seen
    except RuntimeError as refusal:
        return str(refusal)
    return "nothing was dispatched"


def rule_seen(op: str, device: str, low: torch.dtype) -> str:
    """The rule of one op, from what reaches it under autocast.

    Args:
        op: a full overload name.
        device: a device type, whose autocast must be on with dtype ``low``.
        low: the 16-bit dtype.

    Returns:
        A name of ``spec.op_rules.RULES``, "none", or "unclear: " and what was seen.

    Source: ATen/autocast_mode.h defines what each rule does to dtypes.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
    ...     rule_seen("aten::mm", "cpu", torch.bfloat16), rule_seen("aten::relu", "cpu", torch.bfloat16)
    ('lower_precision_fp', 'none')
    """
    single, overload = torch.float32, op_overload(op)
    choices = ((single,), (low,), (single, low), (low, single))
    seen = [_see(overload, device, dtypes) for dtypes in choices]
    refused = [one for one in seen if isinstance(one, str)]
    if refused:
        return "banned" if len(refused) == len(seen) else f"unclear: {refused[0]}"
    all_single, all_low, *mixed = [one for one in seen if isinstance(one, Seen)]
    if all_low.op != op:
        return "fp32_append_dtype"
    if all_low.dtype is single:
        return "fp32_set_opt_dtype"
    if set(all_single.dtypes) == {low}:
        return "lower_precision_fp"
    if set(all_low.dtypes) == {single}:
        return "fp32"
    if all(set(one.dtypes) == {single} for one in mixed):
        return "promote"
    return "none"


def probe(device: str, low: torch.dtype, ops: Iterable[str] | None = None) -> dict[str, str]:
    """The rule of every op that torch has registered for a device's autocast.

    Args:
        device: a key of ``AUTOCAST_KEYS``.
        low: what autocast casts to.
        ops: full overload names; those registered unless given.

    Returns:
        As ``rule_seen``, by full overload name.

    Raises:
        KeyError: a device whose autocast torch does not know.

    Source: the dispatcher of the installed torch.

    >>> probe("cuda", torch.float16)["aten::binary_cross_entropy"]
    'banned'
    """
    if ops is None:
        ops = torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST_KEYS[device])
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_enabled(device, True)  # the context manager would refuse a device that is not there
        torch.set_autocast_dtype(device, low)
        torch.set_autocast_cache_enabled(False)
        with torch.inference_mode():
            return {op: rule_seen(op, device, low) for op in sorted(ops)}
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])


def listed_by_torch(kind: str) -> dict[str, str]:
    """The ops of torch's own autocast test lists, read from their source without running it.

    Args:
        kind: "AutocastTestLists" (CUDA's) or "AutocastCPUTestLists".

    Returns:
        By bare op name, the rule that its list stands for: "lower_precision_fp", "fp32" (any of the three rules that
        give fp32), "promote" or "banned".

    Raises:
        FileNotFoundError: this torch comes without its test lists.

    Source: torch/testing/_internal/autocast_test_lists.py.

    >>> listed_by_torch("AutocastTestLists")["layer_norm"]
    'fp32'
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise FileNotFoundError("torch is not installed; pip install torch")
    path = Path(found.origin).parent / "testing" / "_internal" / "autocast_test_lists.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lists = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    rules: dict[str, str] = {}
    for node in ast.walk(lists):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
            continue
        rule = _rule_of_list(node.targets[0].attr)
        if rule and isinstance(node.value, ast.List):
            for row in node.value.elts:
                if isinstance(row, ast.Tuple) and isinstance(row.elts[0], ast.Constant):
                    rules[str(row.elts[0].value)] = rule
    return rules


def _rule_of_list(name: str) -> str | None:
    if name.startswith("methods") or "builtin" in name:
        return None  # operators and ops that promote without autocast
    for ending, rule in (("fp16", "lower_precision_fp"), ("16", "lower_precision_fp"), ("fp32", "fp32"),
                         ("need_autocast_promote", "promote"), ("banned", "banned")):  # fmt: skip
        if name.endswith(ending):
            return rule
    return None
