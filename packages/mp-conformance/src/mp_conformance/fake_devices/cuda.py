"""A CUDA device on the CPU, so that the real C++ autocast kernels for CUDA run anywhere.

A few lines of C++ make torch believe in one device. They must be loaded before torch is imported and are compiled on
first use with the machine's own C++ compiler (``CXX``, g++ or clang++) into a cache, once for each torch version.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_conformance.fake_devices import FakeDeviceUnavailable

if TYPE_CHECKING:
    from mp_conformance.fake_devices.backed import BackedDevice

__all__ = ["install", "library"]

_SOURCE = Path(__file__).with_name("cuda_hooks.cpp")


def install(name: str = "NVIDIA A100 (on the CPU)", capability: tuple[int, int] = (8, 0)) -> BackedDevice:
    """Make torch believe in one CUDA device and give it the CPU's kernels.

    Args:
        name: what the device says it is.
        capability: the compute capability that it claims.

    Returns:
        The device; ``torch.device("cuda")`` works from here on, in this process and until its end.

    Raises:
        FakeDeviceUnavailable: there is no C++ compiler, or torch was imported before.

    Source: torch's CUDAHooksInterface and DeviceGuardImplInterface.
    """
    if "torch" in sys.modules:
        raise FakeDeviceUnavailable(
            "torch is imported already, and looks for CUDA hooks only while it is; install the fake cuda device first, "
            "in a process of its own (mp_conformance.fake_devices.run_script)"
        )
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    import torch

    from mp_conformance.fake_devices.backed import BackedDevice, BackedEvent

    cuda: Any = torch.cuda

    def always(answer: object) -> Any:
        return lambda *_args, **_kwargs: answer

    cuda._lazy_init = always(None)  # noqa: SLF001  # the check for a CUDA build
    cuda.amp.common.amp_definitely_not_available = always(False)
    cuda.is_available = always(True)
    cuda.is_bf16_supported = always(True)
    cuda.synchronize = always(None)
    cuda.get_device_name = always(name)
    cuda.get_device_capability = always(capability)
    fake = BackedDevice(torch.device("cuda", 0), "CUDA", substitutes=_substitutes())
    cuda.current_stream = always(None)
    cuda.Event = lambda **_: BackedEvent(fake.host_syncs)
    return fake


def library() -> Path:
    """The compiled hooks, from the cache or made now.

    Returns:
        Path of a shared library for the installed torch.

    Raises:
        FakeDeviceUnavailable: there is no C++ compiler, or it refused the source.

    Source: ``cuda_hooks.cpp`` beside this module.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise FakeDeviceUnavailable("torch is not installed; pip install torch")
    torch_folder = Path(found.origin).parent
    key = hashlib.sha256(_SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mp-conformance"
    built = cache / f"fake-cuda-{key}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(torch_folder, built)
    return built


def _compile(torch_folder: Path, built: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FakeDeviceUnavailable("the fake cuda device needs a C++ compiler; install g++ or clang++, or set CXX")
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        libraries = torch_folder / "lib"
        done = subprocess.run(
            [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(_SOURCE),
             "-o", str(fresh), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise FakeDeviceUnavailable(f"{compiler} could not compile {_SOURCE.name}: {done.stderr[:2000]}")
        fresh.replace(built)  # at once, so that a second process never sees half a file


def _substitutes() -> dict[str, Any]:
    """Operators that torch picks for CUDA alone, in terms of the CPU's."""
    import torch

    from mp_torch.emulate import fused_cells

    aten = torch.ops.aten

    def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        result: torch.Tensor = aten._softmax(x.float() if half_to_float else x, dim, False)  # noqa: SLF001
        return result

    def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        result: torch.Tensor = aten._log_softmax(x.float() if half_to_float else x, dim, False)  # noqa: SLF001
        return result

    def softmax_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = aten._softmax_backward_data(grad, y, dim, y.dtype)  # noqa: SLF001
        return result.to(dtype)

    def log_softmax_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        result: torch.Tensor = aten._log_softmax_backward_data(grad, y, dim, y.dtype)  # noqa: SLF001
        return result.to(dtype)

    return {
        "aten::_softmax": softmax,
        "aten::_log_softmax": log_softmax,
        "aten::_softmax_backward_data": softmax_backward,
        "aten::_log_softmax_backward_data": log_softmax_backward,
        **fused_cells.kernels(),
    }
