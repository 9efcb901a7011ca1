"""What the right answer is: mixed precision, bit for bit, in NumPy and ml_dtypes.

Formats are rows (``FP16``, ``BF16``, ``E4M3FN``, ...), ``round_to`` and ``cast`` put numbers into them, and what is
built on top computes as the accelerator would. Names load on first use, so that the spec alone needs only the standard
library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers; tests hold the two lists together
    from mp_reference.amp.autocast import (
        autocast as autocast,
    )
    from mp_reference.amp.loss_scale import (
        LossScale as LossScale,
    )
    from mp_reference.numerics.arithmetic import (
        add as add,
    )
    from mp_reference.numerics.arithmetic import (
        div as div,
    )
    from mp_reference.numerics.arithmetic import (
        fma as fma,
    )
    from mp_reference.numerics.arithmetic import (
        mul as mul,
    )
    from mp_reference.numerics.arithmetic import (
        sqrt as sqrt,
    )
    from mp_reference.numerics.arithmetic import (
        sub as sub,
    )
    from mp_reference.numerics.bounds import (
        bound as bound,
    )
    from mp_reference.numerics.codec import (
        cast as cast,
    )
    from mp_reference.numerics.matmul import (
        matmul as matmul,
    )
    from mp_reference.numerics.reductions import (
        sum as sum,  # noqa: A004  # mp.sum, as np.sum
    )
    from mp_reference.numerics.rounding import (
        round_to as round_to,
    )
    from mp_reference.spec.accumulators import (
        blocked as blocked,
    )
    from mp_reference.spec.accumulators import (
        kahan as kahan,
    )
    from mp_reference.spec.accumulators import (
        pairwise as pairwise,
    )
    from mp_reference.spec.accumulators import (
        sequential as sequential,
    )
    from mp_reference.spec.accumulators import (
        split_k as split_k,
    )
    from mp_reference.spec.formats import (
        BF16 as BF16,
    )
    from mp_reference.spec.formats import (
        E2M1FN as E2M1FN,
    )
    from mp_reference.spec.formats import (
        E2M3FN as E2M3FN,
    )
    from mp_reference.spec.formats import (
        E3M2FN as E3M2FN,
    )
    from mp_reference.spec.formats import (
        E4M3FN as E4M3FN,
    )
    from mp_reference.spec.formats import (
        E4M3FNUZ as E4M3FNUZ,
    )
    from mp_reference.spec.formats import (
        E5M2 as E5M2,
    )
    from mp_reference.spec.formats import (
        E5M2FNUZ as E5M2FNUZ,
    )
    from mp_reference.spec.formats import (
        E8M0FNU as E8M0FNU,
    )
    from mp_reference.spec.formats import (
        FP16 as FP16,
    )
    from mp_reference.spec.formats import (
        FP32 as FP32,
    )
    from mp_reference.spec.formats import (
        TF32 as TF32,
    )
    from mp_reference.spec.formats import (
        FloatFormat as FloatFormat,
    )
    from mp_reference.spec.tensor_cores import (
        tensor_core as tensor_core,
    )

_MENU = {
    "FloatFormat": "spec.formats",
    "FP32": "spec.formats",
    "TF32": "spec.formats",
    "FP16": "spec.formats",
    "BF16": "spec.formats",
    "E4M3FN": "spec.formats",
    "E5M2": "spec.formats",
    "E4M3FNUZ": "spec.formats",
    "E5M2FNUZ": "spec.formats",
    "E8M0FNU": "spec.formats",
    "E2M3FN": "spec.formats",
    "E3M2FN": "spec.formats",
    "E2M1FN": "spec.formats",
    "LossScale": "amp.loss_scale",
    "autocast": "amp.autocast",
    "add": "numerics.arithmetic",
    "cast": "numerics.codec",
    "div": "numerics.arithmetic",
    "fma": "numerics.arithmetic",
    "mul": "numerics.arithmetic",
    "round_to": "numerics.rounding",
    "sqrt": "numerics.arithmetic",
    "sub": "numerics.arithmetic",
    "sum": "numerics.reductions",
    "matmul": "numerics.matmul",
    "tensor_core": "spec.tensor_cores",
    "sequential": "spec.accumulators",
    "pairwise": "spec.accumulators",
    "blocked": "spec.accumulators",
    "bound": "numerics.bounds",
    "split_k": "spec.accumulators",
    "kahan": "spec.accumulators",
}

__version__ = "0.1.0"
__all__ = sorted(_MENU)  # noqa: PLE0605  # the menu is the one list of names


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _MENU:
        raise AttributeError(f"module 'mp_reference' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"mp_reference.{_MENU[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The menu."""
    return [*__all__, "__version__"]
