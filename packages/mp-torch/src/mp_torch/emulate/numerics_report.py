"""What a 16-bit format loses of a model's values: per module and op, in the forward and in the backward."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import mp_reference as mp
from mp_torch.emulate import advice, views
from mp_torch.emulate.arithmetic import LOW_DTYPES
from mp_torch.emulate.magnitudes import Magnitudes, measure
from mp_torch.emulate.places import Places
from mp_torch.errors import AmpConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from torch import nn

    from mp_torch.config import AmpConfig

__all__ = ["NumericsReport", "Row"]

_FORMATS = {"fp16-mixed": mp.FP16, "bf16-mixed": mp.BF16, "fp16-true": mp.FP16, "bf16-true": mp.BF16}
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass
class Row:
    """What became of the 16-bit results of one op in one module."""

    module: str
    op: str
    phase: str
    calls: int = 0
    counts: Magnitudes = field(default_factory=Magnitudes)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every op with a 16-bit result to ``note``, with the results before rounding where they can be had."""

    def __init__(self, note: Callable[[Any, Sequence[Any], Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, and look at what it gave."""
        given = dict(kwargs or {})
        inputs = tree_leaves((args, given))
        finite = None if func.is_view else _all_finite(inputs)
        out = func(*args, **given)
        if finite is not None and any(_is_low(x) for x in tree_leaves(out)):
            self._note(func, (finite, _widened(func, args, given)), inputs, out)
        return out


def _is_low(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in LOW_DTYPES


def _all_finite(inputs: Sequence[Any]) -> bool:
    floating = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
    return all(bool(x.isfinite().all()) for x in floating)


def _widened(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The op's results from the same inputs in fp32: what was rounded. None where the op cannot be repeated."""
    if func._schema.is_mutable or _RANDOM in func.tags:  # noqa: SLF001  # the schema has no public name
        return None

    def wide(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return torch.float32 if x in LOW_DTYPES else x
        return x.float() if _is_low(x) else x

    try:
        return tree_leaves(func(*tree_map(wide, tuple(args)), **tree_map(wide, dict(kwargs))))
    except (RuntimeError, NotImplementedError, TypeError):  # an op that takes 16 bits only
        return None


class NumericsReport:
    """Watches a model's 16-bit results while it is entered, and says what a format loses of them.

    Works on CPU tensors under ``emulate`` and on a real device. Every op is repeated in fp32 to see what was rounded,
    so a watched step takes a few times as long. Small gradients that vanish in fp16 hide what they would have been:
    run the watched steps with precision "bf16-mixed", whose range is that of fp32, and judge "fp16-mixed".

    Args:
        model: the model whose modules the results are attributed to.
        precision: the precision that is judged, whatever 16-bit format the run uses.
        loss_scale: what the loss is multiplied by in the run, or a function that tells it.
        subnormals: False if the device flushes subnormals.

    Raises:
        AmpConfigError: a precision that has no 16-bit format.

    >>> from mp_torch.emulate import emulate
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> torch.nn.init.constant_(layer.weight, 1e5).requires_grad
    True
    >>> with emulate("cuda", precision="fp16-mixed"), NumericsReport(layer) as report:
    ...     layer(torch.ones(1, 1)).isinf().item()
    True
    >>> [(row["module"], row["op"], row["overflows"]) for row in report.rows() if row["overflows"]]
    [('Linear', '_to_copy', 1)]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        precision: str = "fp16-mixed",
        loss_scale: float | Callable[[], float] = 1.0,
        subnormals: bool = True,
    ) -> None:
        if precision not in _FORMATS:
            raise AmpConfigError(
                f"NumericsReport: precision={precision!r} has no 16-bit format to judge; choose one of "
                f"{', '.join(_FORMATS)}"
            )
        self.precision, self.format = precision, _FORMATS[precision]
        self._model, self._loss_scale, self._subnormals = model, loss_scale, subnormals
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._places: Places | None = None
        self._exits = ExitStack()

    def __enter__(self) -> NumericsReport:
        """Begin to watch; what was counted before stays."""
        self._places = Places(self._model)
        self._exits.callback(self._places.remove)
        self._exits.enter_context(_Watch(self._note))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self._exits.close()

    def _note(self, func: Any, seen: Sequence[Any], _inputs: Any, out: Any) -> None:
        finite, wide = seen
        results = tree_leaves(out)
        assert self._places is not None
        module, backward = self._places.now()
        scale = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
        key = (module, func.name().removeprefix("aten::").split(".")[0], "backward" if backward else "forward")
        row = self._rows.setdefault(key, Row(*key))
        row.calls += 1
        for place, x in enumerate(results):
            if _is_low(x):
                values = wide[place] if wide is not None and len(wide) == len(results) else x
                counts = measure(
                    values, self.format, scale=scale if backward else 1.0, fresh=finite, subnormals=self._subnormals
                )
                row.counts.add(counts)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each module, phase and op: what ``pandas.DataFrame`` takes.

        Returns:
            In the order of first calls: module, op, phase, calls, values, overflows, underflows, subnormals, nans,
            zeros, max_abs (gradients divided by the loss scale), headroom_bits, flushed_share.
        """
        return views.as_dictionaries(self._rows.values(), self.format)

    def advice(self, *, tolerance: float = 1e-3) -> advice.Advice:
        """Whether the model will train in the judged precision, from which loss scale, and what needs fp32.

        Args:
            tolerance: the share of a module's gradients that may become zero.

        Returns:
            The verdict; ``str`` of it is a paragraph.
        """
        return advice.judge(list(self._rows.values()), self.format, self.precision, tolerance)

    def config(self, *, tolerance: float = 1e-3, **settings: Any) -> AmpConfig:
        """The advice as an ``AmpConfig``.

        Args:
            tolerance: as for ``advice``.
            settings: further fields of the configuration.

        Returns:
            The judged precision with its loss scale and ``keep_fp32``; "bf16-mixed" where no loss scale serves fp16.
        """
        return self.advice(tolerance=tolerance).config(**settings)

    def table(self) -> Any:
        """A ``rich.table.Table`` of modules and phases; print it with ``rich.print``."""
        return views.as_table(self._rows.values(), self.format, self.advice())

    def plot(self, path: str | Path | None = None) -> Any:
        """Histograms of log2 magnitudes for each module with the format's range drawn in.

        Args:
            path: write the picture there, by its extension; None writes none.

        Returns:
            The matplotlib figure.
        """
        return views.as_figure(list(self._rows.values()), self.format, path)

    def json(self, path: str | Path | None = None) -> str:
        """Rows, histograms and advice as JSON text, written to ``path`` as well if it is given."""
        return views.as_json(list(self._rows.values()), self.format, self.advice(), path)
