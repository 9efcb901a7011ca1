"""What an engine promises and why, in words: dtypes by role, precision by module, a summary."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from mp_reference.spec.op_rules import DEVICES, rule_of
from mp_torch.devices import rules_followed
from mp_torch.errors import AmpStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from mp_torch.assembly import Assembly
    from mp_torch.scaling import MovingScale

__all__ = ["DtypeContract", "Explanation", "ModuleRule", "dtype_contract", "explanation", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeContract:
    """Which dtypes hold what; several, separated by commas, where modules differ.

    Args:
        parameter: the model's trained parameters.
        compute: matmuls and convolutions in forward and backward.
        gradient: what backward leaves in ``parameter.grad``.
        accumulation: the sum of gradients over a window.
        reduction: norms and the decision.
        moments: the optimizers' state.
        master: what the update works on.
        buffers: the model's floating buffers.
    """

    parameter: str
    compute: str
    gradient: str
    accumulation: str
    reduction: str
    moments: str
    master: str
    buffers: str

    def __str__(self) -> str:
        """One line for each role."""
        return _table(["role", "dtype"], list(asdict(self).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """One module: what it computes in, and the rule that decided.

    Args:
        name: dotted, "" for the whole model.
        kind: its class.
        parameter: dtypes of its own parameters, "" if it has none.
        compute: dtype, or "as its inputs".
        rule: in words.
    """

    name: str
    kind: str
    parameter: str
    compute: str
    rule: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every module that computes by itself, in the model's order."""

    modules: tuple[ModuleRule, ...]

    def __getitem__(self, name: str) -> ModuleRule:
        """The module of this name."""
        return next(one for one in self.modules if one.name == name)

    def __str__(self) -> str:
        """One line for each module."""
        rows = [(one.name or "(model)", one.kind, one.parameter, one.compute, one.rule) for one in self.modules]
        return _table(["module", "class", "parameters", "computes in", "because of"], rows)


def dtype_contract(assembly: Assembly) -> DtypeContract:
    """The dtypes by role, read from the tensors.

    Raises:
        AmpStateError: a parameter, moment or master has another dtype than the precision promises.
    """
    assembly.admitted.check_dtypes()
    row, parts = assembly.row, assembly.parts
    parameters = [part.weight.parameter for part in parts]
    moments = [
        one
        for optimizer in assembly.optimizers
        for state in optimizer.state.values()
        for key, one in state.items()
        if isinstance(one, torch.Tensor) and one.is_floating_point() and key != "step"
    ]
    _promise("parameter", parameters, {row.parameter, torch.float32})
    _promise("moment", moments, {torch.float32})
    _promise("master", [part.weight.load() for part in parts], {torch.float32})
    summed = ["float32" if assembly.config.accumulate == "fp32" else _word(row.parameter)]
    compute = "tf32" if row.tf32 else _word(row.compute or torch.float32)
    kept = {_word(dtype) for dtype, _ in assembly.regions.values()}
    return DtypeContract(
        parameter=_words(parameters),
        compute=", ".join([compute, *sorted(kept - {compute})]),
        gradient=_words(parameters),
        accumulation=", ".join(summed),
        reduction="float64" if assembly.device.supports_float64 else "float32",
        moments=_words(moments) or "float32",
        master={"stochastic": "none (stochastic rounding)", "compensation": "float32 (16 + 16 bits, compensated)"}.get(
            row.carrier, _master_words(assembly)
        ),
        buffers=_words([one for one in assembly.model.buffers() if one.is_floating_point()]) or "none",
    )


def explanation(assembly: Assembly) -> Explanation:
    """What each module computes in, and why."""
    modules = [
        (name, module)
        for name, module in assembly.model.named_modules()
        if name in assembly.regions
        or not list(module.children())
        or any(True for _ in module.parameters(recurse=False))
    ]
    return Explanation(tuple(_explained(assembly, name, module) for name, module in modules))


def summary(assembly: Assembly, scale: MovingScale, update_index: int) -> str:
    """What ``repr(engine)`` says."""
    config, count = assembly.config, sum(part.weight.parameter.numel() for part in assembly.parts)
    clip = "off" if config.max_grad_norm is None else f"to norm {config.max_grad_norm!r}"
    kind = "dynamic" if scale.policy.dynamic else "static"
    updates = ", ".join(
        f"{type(one).__name__} ({type(updater).__name__.removesuffix('Updater').lower()})"
        for one, updater in zip(assembly.optimizers, assembly.updaters, strict=True)
    )
    return (
        f"AmpEngine(precision={config.precision!r}, model={type(assembly.model).__name__}, {count:,} parameters in "
        f"{len(assembly.parts)} tensors on {assembly.device.device}, optimizers: {updates}, loss scale "
        f"{scale.state.scale!r} ({kind}), clipping {clip}, window of {config.accumulate_steps}, "
        f"{update_index} updates applied)"
    )


def _explained(assembly: Assembly, name: str, module: nn.Module) -> ModuleRule:
    compute, rule = _decided(assembly, name, module)
    own = _words(module.parameters(recurse=False))
    return ModuleRule(name=name, kind=type(module).__name__, parameter=own, compute=compute, rule=rule)


def _decided(assembly: Assembly, name: str, module: nn.Module) -> tuple[str, str]:
    row, config = assembly.row, assembly.config
    for outer in _enclosing(name):
        if outer in assembly.regions:
            dtype, pattern = assembly.regions[outer]
            which = "lower" if dtype == row.compute else "keep_fp32" if pattern in config.keep_fp32 else "safe_ops"
            return _word(dtype), f"{which}: {pattern}" + (f" (of {outer!r})" if outer != name else "")
    if row.compute is None:
        return "tf32" if row.tf32 else "float32", f"precision={row.name}"
    if name in assembly.statistics:
        return "as its inputs", "parameters and statistics in fp32"
    ops = _functions_of(type(module))
    for source, rules in (("op_rules", config.op_rules), ("safe_ops", _safe_rules(assembly))):
        for op in ops:
            if op in rules:
                return _of_rule(rules[op], row.compute), f"{source}: {op}"
    followed = rules_followed(assembly.device.type)
    for op in ops if followed in DEVICES else ():
        device_rule = rule_of(op, followed)
        if device_rule is not None:
            emulated = "" if followed == assembly.device.type else "emulated "
            return _of_rule(str(device_rule), row.compute), f"autocast on {emulated}{followed}: {op}"
    return "as its inputs", "no rule"


_CALLS = {
    "BCELoss": "binary_cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "PReLU": "prelu",
    "MultiLabelMarginLoss": "multilabel_margin_loss", "MultiheadAttention": "linear", "RNNBase": "linear",
    "RNNCellBase": "linear",
}  # fmt: skip
"""Modules of torch whose class is not named like the function that decides for them."""


def _functions_of(kind: type) -> tuple[str, ...]:
    """Names that the function may have which a module of this class calls: its own, then those of its base classes."""
    found: list[str] = []
    for one in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", one.__name__).lower()
        found += [_CALLS.get(one.__name__, snake), snake.removesuffix("_loss"), re.sub(r"\dd$", "", snake)]
    return tuple(dict.fromkeys(found))


def _safe_rules(assembly: Assembly) -> dict[str, str]:
    if assembly.rules is None:
        return {}
    return {function.__name__: rule for function, rule in assembly.rules.table.items() if hasattr(function, "__name__")}


def _of_rule(rule: str, lower: torch.dtype) -> str:
    if rule == "lower_precision_fp":
        return _word(lower)
    return "float32" if rule.startswith("fp32") else "the widest of its inputs" if rule == "promote" else rule


def _enclosing(name: str) -> Iterable[str]:
    """The module itself, then what contains it, outwards."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _promise(role: str, tensors: Sequence[torch.Tensor], legal: set[torch.dtype]) -> None:
    wrong = [one.dtype for one in tensors if one.dtype not in legal]
    if wrong:
        raise AmpStateError(
            f"a {role} is {_word(wrong[0])}, this precision promises {', '.join(sorted(map(_word, legal)))}; somebody "
            "cast it after the engine was built: cast the model before, or build a new engine"
        )


def _master_words(assembly: Assembly) -> str:
    if assembly.row.carrier == "parameter":
        return "the parameter itself"
    return {"fp32": "float32", "remainder": "float32 (bfloat16 + 16 bits)", "none": "none"}[
        assembly.config.master_weights
    ]


def _words(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(sorted({_word(one.dtype) for one in tensors}))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(head: list[str], rows: Sequence[tuple[Any, ...]]) -> str:
    cells = [tuple(head), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
