"""Devices that nobody needs to own: an Ascend NPU and a CUDA GPU whose kernels run on the CPU.

Both change the process for good (a device's name and its kernels can be registered once), so tests run them in a
process of their own: ``run_script``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal

__all__ = ["FakeDeviceUnavailable", "run_script"]


class FakeDeviceUnavailable(RuntimeError):  # noqa: N818  # a state of this machine, which tests skip on
    """This machine cannot build the fake device; the message says what is missing."""


def run_script(device: Literal["cuda", "npu"], script: str, timeout: float = 300.0, **options: object) -> str:
    r"""Run Python code in a new process where a fake device is installed.

    Args:
        device: ``"cuda"`` or ``"npu"``.
        script: Python code; ``torch`` is imported in it and ``fake`` is the installed device.
        timeout: seconds that it may take.
        options: arguments of that device's ``install``.

    Returns:
        What the script printed.

    Raises:
        FakeDeviceUnavailable: there is no compiler for the fake CUDA device.
        AssertionError: the script failed; the message holds its output.

    Source: this package.

    >>> run_script("npu", "print(torch.zeros(2, device='npu').device)")
    'npu:0\n'
    """
    if device == "cuda":
        from mp_conformance.fake_devices.cuda import library

        library()  # here, so that a missing compiler is an exception of this process
    head = (
        f"from mp_conformance.fake_devices.{device} import install\n"
        f"fake = install(**{options!r})\nimport torch\ntorch.set_num_threads(1)\n"
    )
    # Autograd keeps a thread for every device, and a made-up one's may still run when a process takes itself apart.
    tail = "\nimport os, sys\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:__main__", "-c", head + script + tail],
        capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"the script on the fake {device} failed\n{done.stdout}\n{done.stderr}")
    return done.stdout
