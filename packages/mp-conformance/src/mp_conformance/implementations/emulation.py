"""CPU tensors under ``mp_torch.emulate`` as a subject, and the CUDA dispatcher that it is held against."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mp_conformance.autocast_cases import call_all, train
from mp_conformance.dispatcher import probe
from mp_conformance.fake_devices import FakeDeviceUnavailable, run_script
from mp_conformance.implementations import NotOfferedError
from mp_reference.spec.op_rules import op_rules
from mp_torch.emulate import EmulationWarning, emulate
from mp_torch.emulate.arithmetic import from_numpy, to_numpy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DTYPES", "EmulationSubject", "real_dispatcher"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TRAININGS = ("mlp", "transformer", "recurrent")

_SCRIPT = """
import pickle, warnings
warnings.simplefilter("ignore")
from mp_conformance.autocast_cases import call_all, train
from mp_torch.emulate import EmulationWarning, emulate
with emulate("cpu"):  # the arithmetic of the kernels below, and no other device's op rules
    found = {{kind: train(kind, "cuda", {dtype}) for kind in {trainings}}}
    found["calls"] = call_all("cuda", {dtype})
with open({path!r}, "wb") as file:
    pickle.dump(found, file)
"""


class EmulationSubject:
    """``mp_torch.emulate("cuda")`` on CPU tensors."""

    name = "emulation"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Autocast's decisions, trainings, and products under an arithmetic."""
        del options
        return operation in ("op_rules", "autocast_calls", "autocast_training", "emulated_product")

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it."""
        if operation == "op_rules":
            listed = {*op_rules(options["device"]), *op_rules("cpu")}
            with emulate(options["device"]), warnings.catch_warnings():
                warnings.simplefilter("ignore", EmulationWarning)  # the probe gives fp32 to ops without a rule
                found = probe("cpu", DTYPES[options["fmt"]], listed)
            return {op: rule for op, rule in found.items() if rule != "none"}
        if operation == "autocast_calls":
            with emulate("cuda"):
                return call_all("cpu", DTYPES[options["fmt"]])
        if operation == "autocast_training":
            with emulate("cuda"):
                return train(options["kind"], "cpu", DTYPES[options["fmt"]])
        if operation != "emulated_product":
            raise NotOfferedError(f"an emulation has no {operation}")
        a, b, c = (from_numpy(x) for x in operands)
        with emulate("cuda", options.get("arch"), arithmetic=options["arithmetic"]):
            return to_numpy(torch.addmm(c, a, b))


@cache
def real_dispatcher(fmt: str) -> dict[str, Any]:
    """What torch's C++ autocast kernels for CUDA make of the same calls and trainings, on CUDA tensors.

    Args:
        fmt: "fp16" or "bf16".

    Returns:
        "calls": as ``autocast_cases.call_all``; "mlp", "transformer" and "recurrent": as ``autocast_cases.train``.

    Raises:
        NotOfferedError: this machine has neither a CUDA device nor a compiler to fake one.

    Source: ATen's autocast kernels for CUDA, run on a CUDA device that computes on the CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found"
        try:
            run_script("cuda", _SCRIPT.format(dtype=DTYPES[fmt], trainings=TRAININGS, path=str(path)))
        except FakeDeviceUnavailable as reason:
            raise NotOfferedError(str(reason)) from reason
        found: dict[str, Any] = pickle.loads(path.read_bytes())  # our own process wrote it
    return found
