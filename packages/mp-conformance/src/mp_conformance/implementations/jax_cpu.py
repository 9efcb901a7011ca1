"""JAX on the CPU as a subject: a third implementation, and the example of docs/subjects.md. Needs the extra ``jax``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from mp_conformance.implementations import NotOfferedError
from mp_reference.spec.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["JaxSubject"]

_OPERATIONS: dict[str, Any] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "sqrt": jnp.sqrt,
    "minimum": jnp.minimum, "maximum": jnp.maximum, "less": jnp.less, "less_equal": jnp.less_equal, "equal": jnp.equal,
}  # fmt: skip
_FORMATS = ("fp16", "bf16", "fp32")
_CASTS = (*_FORMATS, "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


class JaxSubject:
    """What XLA's CPU kernels compute: nearest-even, each dtype's own overflow."""

    name = "jax"
    device = "cpu"

    def offers(self, operation: str, options: Mapping[str, Any]) -> bool:
        """Casts from float32 and the elementwise operations of fp16, bf16 and fp32."""
        plain = {"rounding": "nearest-even", "overflow": "ieee", "subnormals": True}
        if any(options.get(name, default) != default for name, default in plain.items()):
            return False
        if operation == "cast":
            return options["to"] in _CASTS and options.get("source", "float32") == "float32"
        return operation in _OPERATIONS and options.get("format") in _FORMATS

    def perform(self, operation: str, *operands: Any, **options: Any) -> Any:
        """Do it; 64-bit arrays never reach this subject, because JAX would narrow them silently."""
        if operation == "cast":
            return np.asarray(jnp.asarray(operands[0]).astype(FORMATS[options["to"]].dtype))
        if operation in _OPERATIONS:
            return np.asarray(_OPERATIONS[operation](*(jnp.asarray(x) for x in operands)))
        raise NotOfferedError(f"JAX has no {operation} here")
