"""Subjects: whatever can be asked for an operation on NumPy arrays. Generator, subject and verifier stay apart.

A subject is a name, a device and two methods. ``offers`` says whether it can honour an operation with these options;
``perform`` does it. Everything crosses the border as NumPy arrays (ml_dtypes' dtypes for the narrow formats) and plain
Python values, so a claim never knows what it tests.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "OPERATIONS",
    "NotOfferedError",
    "NotReachedError",
    "Subject",
    "absent",
    "names",
    "subject_named",
    "subjects_for",
]

OPERATIONS: Mapping[str, str] = {
    "facts": "(format) -> dict of the format's numbers: bits, max, min_normal, min_subnormal, epsilon",
    "cast": "(x, to, rounding, overflow, subnormals) -> array of the dtype of format `to`",
    "add": "(a, b, rounding) -> array of the operands' dtype; so are sub, mul and div",
    "sqrt": "(a, rounding) -> array of the operand's dtype",
    "fma": "(a, b, c, rounding) -> array of the operands' dtype, one rounding",
    "minimum": "(a, b) -> array of the operands' dtype; so is maximum",
    "less": "(a, b) -> array of bool; so are less_equal and equal",
    "flags": "(operands, of, rounding) -> list of sets of the flags that operation `of` raises, one an element",
    "elementary": "(x, function, layout) -> array of the operand's dtype",
    "norm": "(x,) -> 0-dim array, the Euclidean norm",
    "write_back": "(fraction, seed, count) -> bf16 array: 1 + fraction of an ulp, written back stochastically",
    "sum": "(x,) -> 0-dim array of the operand's dtype",
    "matmul": "(a, b) -> array of the operands' dtype",
    "emulated_matmul": "(a, b, accumulator) -> array, the declared accumulator row followed bit by bit",
    "op_rules": "(device, fmt) -> dict from op name to op rule",
    "loss_scale": "(settings, flags) -> list of (scale, growth_tracker) after each flag; settings may name a preset",
    "clip": "(gradients, max_norm) -> (norm, clipped gradients)",
    "optimizer": "(kind, settings, parameters, gradients) -> list over steps of lists of fp32 arrays",
    "train": "(history) -> list of what each step of the history left behind, see `histories`",
    "stochastic": "(x, to, seed) -> array of format `to`, rounded stochastically with that seed",
    "ranks": "(histories, layout) -> for every rank, for every history, what each step left behind, see `layouts`",
    "train_fused": "(history) -> as train, by the fused kernels",
    "fused_updates": "(history) -> as train_fused, where the device's kernels may contract products and sums",
    "autocast_calls": "(fmt) -> dict from call to its results and gradients, see `autocast_cases`",
    "autocast_training": "(kind, fmt) -> losses and parameters of a small training, see `autocast_cases`",
    "emulated_product": "(a, b, c, arithmetic, arch) -> array of the operands' dtype, c + a @ b",
    "differentiate_low": "(inputs, op) -> the same of 16-bit inputs, with exact products",
    "differentiate": "(inputs, op) -> output and gradients of an operation, float64",
    "two_trainings": "(kind, fmt, kernels, steps) -> list of what each step computed and left, see `two_trainings`",
    "overflow_windows": "(histories, saturate, init_scale, growth_interval) -> what each window of each history did",
    "vectors": "(operands, name) -> the results that a golden file holds for these operands",
}
"""What a subject can be asked for. The operand arrays come first, the options by keyword."""


class NotOfferedError(Exception):
    """The subject cannot honour this operation with these options; the claim is not about it."""


class NotReachedError(Exception):
    """The subject could honour this, but not on this machine: too few devices, and how many it takes."""


@runtime_checkable
class Subject(Protocol):
    """Anything that claims are tested on.

    >>> from mp_conformance import subject_named
    >>> subject_named("reference").name
    'reference'
    """

    name: str
    device: str

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Whether ``perform`` would honour this operation with these options."""

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it."""


_EVERYWHERE = {
    "reference": ("mp_conformance.implementations.reference", "ReferenceSubject"),
    "ml_dtypes": ("mp_conformance.implementations.numpy_family", "NumpySubject"),
    "vectors": ("mp_conformance.implementations.golden", "GoldenSubject"),
}
_ON_THE_CPU = {
    "emulation": ("mp_conformance.implementations.emulation", "EmulationSubject"),
    "autograd": ("mp_conformance.implementations.autograd", "AutogradSubject"),
    "npu-on-cpu": ("mp_conformance.implementations.saturating_npu", "SaturatingNPUSubject"),
    "emulated-engine": ("mp_conformance.implementations.emulated_engine", "EmulatedEngineSubject"),
}
_ON_DEVICES = {
    "torch": ("mp_conformance.implementations.torch_device", "TorchSubject"),
    "engine": ("mp_conformance.implementations.engine", "EngineSubject"),
    "ranks": ("mp_conformance.implementations.ranks", "RanksSubject"),
}
_OPTIONAL = {
    "softfloat": ("softfloatpy", "mp_conformance.implementations.softfloat", "SoftFloatSubject"),
    "jax": ("jax", "mp_conformance.implementations.jax_cpu", "JaxSubject"),
}


def names() -> tuple[str, ...]:
    """The subjects that the package knows, installed or not.

    Source: this project.

    >>> names()[0]
    'torch'
    """
    return (*_ON_DEVICES, *_EVERYWHERE, *_ON_THE_CPU, *_OPTIONAL)


def subject_named(name: str, device: str = "cpu") -> Subject:
    """Build one subject.

    Args:
        name: ``reference``, ``ml_dtypes``, ``torch``, ``engine``, ``emulation`` and the like, one of the extras
            ``softfloat`` and ``jax``, or ``module:Class`` for one of your own.
        device: for ``torch``, ``engine`` and ``ranks``, where tensors live.

    Returns:
        The subject.

    Raises:
        ValueError: no subject has this name, the extra's package is not installed, or the class is no subject.

    Source: this project.

    >>> subject_named("reference").name
    'reference'
    """
    if ":" in name:
        return _plugged(name)
    if name in _ON_DEVICES:
        module, attribute = _ON_DEVICES[name]
        placed: Subject = getattr(import_module(module), attribute)(device)
        return placed
    if name in _EVERYWHERE or name in _ON_THE_CPU:
        module, attribute = {**_EVERYWHERE, **_ON_THE_CPU}[name]
    elif name in _OPTIONAL:
        if name in absent():
            raise ValueError(f"subject {name!r} {absent()[name]}")
        _, module, attribute = _OPTIONAL[name]
    else:
        raise ValueError(
            f"subject {name!r} is not one of {', '.join(names())}, nor module:Class; docs/subjects.md shows how to "
            "add one"
        )
    built: Subject = getattr(import_module(module), attribute)()
    return built


def _plugged(name: str) -> Subject:
    module, _, attribute = name.partition(":")
    try:
        built = getattr(import_module(module), attribute)()
    except Exception as reason:  # the module is the caller's own
        raise ValueError(
            f"subject {name!r}: {type(reason).__name__}: {reason}; write module:Class, with a module on PYTHONPATH "
            "and a class without arguments"
        ) from reason
    lacking = [member for member in ("name", "device", "offers", "perform") if not hasattr(built, member)]
    if lacking:
        raise ValueError(f"subject {name!r} has no {', '.join(lacking)}; docs/subjects.md shows what a subject needs")
    plugged: Subject = built
    return plugged


def absent() -> dict[str, str]:
    """The extras that cannot be asked here.

    Returns:
        Name to reason: its package is not installed, or raises when it is imported.

    Source: this project.

    >>> set(absent()) <= {"softfloat", "jax"}
    True
    """
    reasons = {}
    for name, (package, module, _) in _OPTIONAL.items():
        if find_spec(package) is None:
            reasons[name] = f"needs the package {package}; pip install {package}"
            continue
        try:
            import_module(module)
        except Exception as reason:  # a broken installation of an extra is no reason to ask nobody
            reasons[name] = f"cannot be asked: importing {package} raised {type(reason).__name__}: {reason}"
    return reasons


def subjects_for(device: str) -> list[Subject]:
    """The subjects of a run: torch and the engine on the device, and on the CPU also everything else that is installed.

    Args:
        device: ``cpu``, ``cuda``, ``npu``, ``xpu`` or ``mps``.

    Returns:
        Subjects, the reference first.

    Raises:
        ValueError: this torch has no such device.

    Source: this project.

    >>> [subject.name for subject in subjects_for("cpu")][:2]
    ['reference', 'ml_dtypes']
    """
    if device != "cpu":
        return [subject_named(name, device) for name in _ON_DEVICES]
    extras = [name for name in _OPTIONAL if name not in absent()]
    return [subject_named(name) for name in (*_EVERYWHERE, *_ON_DEVICES, *_ON_THE_CPU, *extras)]
