"""Claims that two implementations make one training: torch under AmpEngine, and the reference's tape and step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mp_conformance.claims.rows import Claim
from mp_conformance.compare import Bits, Bound, DisagreementError, Tally, assert_same_bits, assert_within_bound
from mp_conformance.two_trainings import CLASSES, KINDS, STEPS, TrainedStep, by_the_reference
from mp_reference.spec.tensor_cores import tensor_core

if TYPE_CHECKING:
    from mp_conformance.claims.rows import Check, Run
    from mp_conformance.implementations import Subject

__all__ = ["CLAIMS", "assert_same_training"]

_SOURCE = "the op rules of CUDA, correctly rounded products, and the kernels of mp_reference.nn.kernels"
_LOSS_UNITS = 2 * (CLASSES + 4) + 2 * 8  # half ulps: exp, sum over classes, log and difference; the mean of 8 rows


def assert_same_training(actual: list[TrainedStep], expected: list[TrainedStep]) -> Tally:
    """Two runs agree in every loss, gradient, master, loss scale and decision.

    Args:
        actual: the subject's.
        expected: the reference's.

    Returns:
        The count of compared values.

    Raises:
        DisagreementError: naming the step and the array, with both sides in hex.

    Source: this project.
    """
    if len(actual) != len(expected):
        raise DisagreementError(f"{len(actual)} steps were made, expected {len(expected)}")
    tally = Tally()
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for word in ("applied", "loss_scale", "next_loss_scale"):
            if getattr(ours, word) != getattr(theirs, word):
                raise DisagreementError(
                    f"step {number}: {word} is {getattr(ours, word)!r}, expected {getattr(theirs, word)!r}"
                )
        pairs = {"loss": (np.float32(ours.loss), np.float32(theirs.loss))}
        for part in ("gradients", "masters"):
            found, wanted = getattr(ours, part), getattr(theirs, part)
            if found.keys() != wanted.keys():
                raise DisagreementError(f"step {number}: {part} of {sorted(found)}, expected {sorted(wanted)}")
            pairs |= {f"{part}[{name}]": (found[name], wanted[name]) for name in wanted}
        for name, (found, wanted) in pairs.items():
            try:
                tally.add(assert_same_bits(found, np.asarray(wanted)))
            except DisagreementError as difference:
                raise DisagreementError(f"step {number}: {name}: {difference}") from None
    return tally


def _same_bits(kind: str, fmt: str, arch: str | None = None) -> Check:
    def check(subject: Subject, run: Run) -> None:
        run.drawn += 1
        found = subject.perform("two_trainings", kind=kind, fmt=fmt, kernels="reference", arch=arch)
        expected = by_the_reference(kind, fmt, accumulator=tensor_core(arch) if arch else "exact")
        if fmt == "fp16" and all(one.applied for one in expected):
            raise DisagreementError("no step was skipped, so the claim was not tested on a skip; raise init_scale")
        run.record(assert_same_training(found, expected))

    return check


def _own_kernels(fmt: str) -> Check:
    def check(subject: Subject, run: Run) -> None:
        run.drawn += 1
        (found,) = subject.perform("two_trainings", kind="mlp", fmt=fmt, kernels="own", steps=1)
        (expected,) = by_the_reference("mlp", fmt, steps=1)
        loss = np.asarray(expected.loss, np.float64)
        run.record(assert_within_bound(np.float32(found.loss), loss, _LOSS_UNITS * 2.0**-24 * loss))

    return check


CLAIMS = (
    *(
        Claim(
            id=f"two-trainings.{kind}.{fmt}",
            sentence=f"{STEPS} steps of a small {kind} in {fmt}-mixed, with AdamW, clipping and loss scaling, have the "
            "same bits in torch under AmpEngine and emulate(arithmetic='exact') as in the reference: losses, "
            "gradients, masters, loss scale, skips; exp, log, tanh, sums and normalisations are the reference's",
            source=_SOURCE,
            agreement=Bits(),
            operation="two_trainings",
            check=_same_bits(kind, fmt),
            format=fmt,
            devices=("cpu",),
            exhaustive=True,
        )
        for kind in KINDS
        for fmt in ("fp16", "bf16")
    ),
    *(
        Claim(
            id=f"two-trainings.{kind}.hopper.fp16",
            sentence=f"the same steps of the {kind} have the same bits on both sides when every product is added as a "
            "Hopper tensor core adds it",
            source="mp_reference.spec.tensor_cores, row hopper, and the kernels of mp_reference.nn.kernels",
            agreement=Bits(),
            operation="two_trainings",
            check=_same_bits(kind, "fp16", "hopper"),
            format="fp16",
            devices=("cpu",),
            exhaustive=True,
        )
        for kind in KINDS
    ),
    *(
        Claim(
            id=f"two-trainings.own-kernels.{fmt}",
            sentence=f"with torch's own exp and log in log_softmax and its own sums, the first loss of the mlp in "
            f"{fmt}-mixed is off by rounding errors alone: the logits have the same bits",
            source=_SOURCE,
            agreement=Bound(
                f"{_LOSS_UNITS} * 2**-24 of the loss: exp and log are good to 1 ulp, each sum of n terms to n - 1 half "
                "ulps, the difference and the mean to half an ulp each, on both sides"
            ),
            operation="two_trainings",
            check=_own_kernels(fmt),
            format=fmt,
            devices=("cpu",),
            exhaustive=True,
        )
        for fmt in ("fp16", "bf16")
    ),
)
