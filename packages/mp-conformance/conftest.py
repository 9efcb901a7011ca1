"""Leaves the subjects whose extra is not installed out of collection."""

from __future__ import annotations

from importlib.util import find_spec

_SUBJECTS = {"jax": "jax_cpu.py", "softfloatpy": "softfloat.py"}

collect_ignore = [
    f"src/mp_conformance/implementations/{module}" for extra, module in _SUBJECTS.items() if find_spec(extra) is None
]
