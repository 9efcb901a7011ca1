"""AmpEngine on an NPU that computes on the CPU, in saturation mode or with infinities, as a subject."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mp_conformance.fake_devices import run_script
from mp_conformance.implementations import NotOfferedError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SaturatingNPUSubject"]

_SCRIPT = """
import hashlib, json
from mp_torch import AmpEngine, LossScale
from mp_torch.devices.npu import NPUDevice

if {deaf}:
    NPUDevice.overflow = lambda self: None

def digest(model, engine):
    engine.settle()
    held = [*model.state_dict().values(), *engine.masters().values()]
    held += [one for state in engine.optimizers[0].state.values() for one in state.values()]
    return hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in held)).hexdigest()

def windows(history):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2).to("npu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    engine = AmpEngine(model, optimizer, precision="fp16-mixed", accumulate_steps={micro_steps},
                       loss_scale=LossScale(init_scale={init_scale}, growth_interval={growth_interval}))
    x, found = torch.ones(1, 2, device="npu"), []
    for window in history:
        before = digest(model, engine)
        for bad in window:
            with engine.autocast():
                loss = model(x).float().square().sum()
            engine.backward(loss * (1e6 if bad else 1.0))
            report = engine.step()
        after = digest(model, engine)
        found.append([report.applied, report.skipped, report.next_loss_scale, before == after])
    return found

print(json.dumps([windows(history) for history in {histories}]))
"""


class SaturatingNPUSubject:
    """The engine there; a process of its own for each question.

    Args:
        deaf: leave the overflow flag unread, which is what the claims have to notice.
    """

    name = "npu-on-cpu"
    device = "cpu"

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Windows with overflows."""
        del options
        return operation == "overflow_windows"

    def perform(self, operation: str, *operands: Any, **options: Any) -> list[list[list[Any]]]:
        """Train through every history and say what each window did."""
        if operation != "overflow_windows":
            raise NotOfferedError(f"the NPU has no {operation}")
        (histories,) = operands
        script = _SCRIPT.format(
            deaf=self.deaf, histories=histories, micro_steps=len(histories[0][0]), init_scale=options["init_scale"],
            growth_interval=options["growth_interval"],
        )  # fmt: skip
        told: list[list[list[Any]]] = json.loads(run_script("npu", script, saturate=options["saturate"]))
        return told
