"""Claims about hardware that saturates: what it hides from gradients, the engine reads from the chip's flag."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, DisagreementError, Tally
from mp_reference.amp.loss_scale import LossScale

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject

__all__ = ["CLAIMS"]

_MICRO_STEPS, _INIT_SCALE, _GROWTH_INTERVAL = 3, 1024.0, 2
_SOURCE = "CANN, INF_NAN_MODE_ENABLE (saturation mode); contract 6: what the finite check rejects changes nothing"


def _windows(saturate: bool) -> Check:
    def check(subject: Subject, run: Run) -> None:
        good, late = [False] * _MICRO_STEPS, [False] * (_MICRO_STEPS - 1) + [True]
        every = [list(one) for one in product((False, True), repeat=_MICRO_STEPS)]
        histories = [[good, window, after, good] for window in every for after in (good, late)]
        found = subject.perform(
            "overflow_windows", histories, saturate=saturate, init_scale=_INIT_SCALE, growth_interval=_GROWTH_INTERVAL
        )
        policy = LossScale(init_scale=_INIT_SCALE, growth_interval=_GROWTH_INTERVAL)
        for history, told in zip(histories, found, strict=True):
            run.drawn += 1
            state = policy.initial()
            for place, (micro_steps, (applied, skipped, scale, unchanged)) in enumerate(
                zip(history, told, strict=True)
            ):
                overflow = any(micro_steps)
                state = policy.next(state, overflow)
                expected = (not overflow, overflow, state.scale, overflow)
                if (applied, skipped, scale, unchanged) != expected:
                    raise DisagreementError(
                        f"history {history}, window {place}: (applied, skipped, next loss scale, no bit changed) is "
                        f"{(applied, skipped, scale, unchanged)}, expected {expected}"
                    )
            run.record(Tally(compared=len(told)))

    return check


CLAIMS: tuple[Claim, ...] = tuple(
    Claim(
        id=f"saturation.{mode}.fp16",
        sentence=f"On an NPU {how}, an overflow in any micro-step skips the window's update once and changes no bit",
        source=_SOURCE,
        agreement=Bits(),
        operation="overflow_windows",
        check=_windows(saturate),
        format="fp16",
        devices=("cpu",),
        exhaustive=True,
    )
    for mode, how, saturate in (
        ("flag", "that saturates, where gradients stay finite", True),
        ("inf-nan", "with infinities", False),
    )
)
