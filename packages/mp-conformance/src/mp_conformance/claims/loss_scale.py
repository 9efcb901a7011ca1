"""Claims about the loss scale: every recorded trace of the field's scalers, and drawn policies over drawn flags."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, DisagreementError, Tally
from mp_conformance.histories import flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject

__all__ = ["CLAIMS"]

_RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {}),
    "sharded": ("sharded", {}),
    "megatron": ("megatron", {}),
    "apex_amp": ("apex", {}),
    "apex_amp_min1": ("apex", {"min_scale": 1.0}),
    "apex_fp16_utils": ("apex-fp16-utils", {}),
    "apex_hyst_kernel": ("apex-hysteresis", {}),
    "jmp": ("jmp", {}),
    "flax": ("flax", {}),
    "npu_dynamic": ("torch_npu", {}),
    "npu_static": ("torch_npu-static", {}),
    "ds_h2": ("deepspeed", {}),
    "ds_h2_noraise": ("deepspeed", {"on_floor": "keep"}),
    "ds_h2_consec": ("deepspeed-consecutive", {}),
    "ds_h1": ("deepspeed", {"hysteresis": 1}),
    "ds_fused": ("deepspeed-fused", {}),
}
"""A recording's key -> the preset and the knobs that the recording turned besides start and interval."""


@cache
def _traces() -> dict[str, dict[str, Any]]:
    text = files("mp_conformance.vectors").joinpath("loss_scale_traces.json").read_text(encoding="utf-8")
    return {f"{t['key']}.{'AB'[t['flags'][0] == 'X']}": t for t in json.loads(text)["traces"] if t["key"] in _RECORDED}


def _trace(key: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        trace = _traces()[key]
        preset, knobs = _RECORDED[trace["key"]]
        settings = {"preset": preset, "init_scale": 16.0, "growth_interval": 4, **knobs}
        seen = subject.perform("loss_scale", settings, [flag == "X" for flag in trace["flags"]])
        run.record(_same(seen, [_recorded(trace["fields"], row) for row in trace["steps"]], trace["flags"]))

    return check


def _recorded(fields: Sequence[str], row: Sequence[Any]) -> tuple[Any, ...]:
    if "RAISE" in row:
        return ("raise",)
    named = dict(zip(fields, row, strict=True))
    counter = next(
        (named[name] for name in ("growth_tracker", "unskipped", "counter", "fin_steps") if name in named), None
    )
    return (float(named["scale"]), counter)


def _same(seen: Sequence[Any], expected: Sequence[Any], told: Sequence[Any]) -> Tally:
    for index, wanted in enumerate(expected):
        got = tuple(seen[index]) if index < len(seen) else ("ended",)
        pairs = [(g, w) for g, w in zip(got, wanted, strict=False) if w is not None]
        if len(got) < len(wanted) or any(g != w for g, w in pairs):
            raise DisagreementError(
                f"after step {index} of {''.join(map(str, told))} the subject has {got}, expected {wanted} "
                "(scale, growth tracker, hysteresis tracker; None is not recorded)"
            )
    return Tally(sum(len(row) for row in expected))


@st.composite
def _policies(draw: st.DrawFn) -> dict[str, Any]:
    """Policies whose every number is a power of two, so that the expected scale needs no rounding."""
    low = draw(st.integers(-20, 3))
    high = draw(st.integers(low + 1, 127))
    return {
        "init_scale": 2.0 ** draw(st.integers(low, high)),
        "growth_factor": 2.0 ** draw(st.integers(1, 3)),
        "backoff_factor": 2.0 ** draw(st.integers(-3, -1)),
        "growth_interval": draw(st.integers(1, 4)),
        "hysteresis": draw(st.integers(1, 3)),
        "hysteresis_refill": draw(st.sampled_from(("on-growth", "on-good-step"))),
        "min_scale": 2.0**low,
        "max_scale": 2.0**high,
        "on_floor": draw(st.sampled_from(("keep", "keep", "raise"))),
        "skip_limit": draw(st.sampled_from((None, 100, 2))),
        "dynamic": draw(st.integers(0, 5)) > 0,
    }


def expected_states(policy: Mapping[str, Any], found: Sequence[bool]) -> list[tuple[Any, ...]]:
    """The rules restated in integers: the scale is an exponent of two.

    Args:
        policy: from ``_policies``.
        found: ``found_inf`` of each step.

    Returns:
        (scale, growth_tracker, hysteresis_tracker) after each step, ("raise",) where the run ends.

    Source: ``mp_reference.spec.loss_scale.LossScalePolicy``.
    """
    power = {name: _exponent(policy[name]) for name in ("init_scale", "growth_factor", "backoff_factor")}
    low, high = _exponent(policy["min_scale"]), _exponent(policy["max_scale"])
    scale, good, left, skips, out = power["init_scale"], 0, policy["hysteresis"], 0, list[tuple[Any, ...]]()
    for bad in found:
        if bad:
            skips, good = skips + 1, 0
            backoff = policy["dynamic"] and left - 1 <= 0
            over = policy["skip_limit"] is not None and skips > policy["skip_limit"]
            if over or (backoff and policy["on_floor"] == "raise" and scale <= low):
                return [*out, ("raise",)]
            left -= policy["dynamic"]
            scale = max(scale + power["backoff_factor"], low) if backoff else scale
        else:
            skips, good = 0, good + policy["dynamic"]
            grow = policy["dynamic"] and good >= policy["growth_interval"]
            if grow:
                good, scale = 0, min(scale + power["growth_factor"], high)
            if policy["dynamic"] and (grow or policy["hysteresis_refill"] == "on-good-step"):
                left = policy["hysteresis"]
        out.append((2.0**scale, good, left))
    return out


def _exponent(value: float) -> int:
    import math

    return math.frexp(value)[1] - 1


def _drawn(subject: Subject, run: Run) -> None:
    def one(drawn: tuple[dict[str, Any], tuple[bool, ...]]) -> Tally:
        policy, found = drawn
        return _same(subject.perform("loss_scale", policy, list(found)), expected_states(policy, found),
                     ["X" if f else "G" for f in found])  # fmt: skip

    run.draw(st.tuples(_policies(), flags()), one)


CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            id=f"loss-scale.trace.{key}",
            sentence=f"the preset {_RECORDED[key.rsplit('.', 1)[0]][0]!r} moves as the recorded run {key} did",
            source=f"recorded by running the real code: {trace['engine']}",
            agreement=Bits(),
            operation="loss_scale",
            options={"preset": _RECORDED[key.rsplit(".", 1)[0]][0]},
            check=_trace(key),
            exhaustive=True,
        )
        for key, trace in _traces().items()
    ),
    Claim(
        id="loss-scale.machine",
        sentence="the loss scale backs off, waits, grows, stops at its bounds and ends the run as its policy says",
        source="mp_reference.spec.loss_scale.LossScalePolicy",
        agreement=Bits(),
        operation="loss_scale",
        check=_drawn,
    ),
)
