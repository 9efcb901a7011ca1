"""What carries the bits that a 16-bit parameter cannot: one small class for each way.

The update always works on fp32 values. ``load`` gives them, ``store_`` writes the parameter from them. A ``Weight``
also knows where its gradient is, in the parameter's own dtype or accumulated in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mp_torch.ranks import local, place_of
from mp_torch.remainder import join, split
from mp_torch.stochastic import random_bits16

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

__all__ = [
    "BareWeight",
    "CompensatedWeight",
    "MasterWeight",
    "RemainderWeight",
    "StochasticWeight",
    "Weight",
    "WriteBack",
]


_FEW = 1024
"""Elements of a parameter that are looked at in each step; of smaller ones all."""

_PRIME = 7919
"""How far the look moves on, so that it comes everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBack:
    """What a write-back depends on besides the value.

    Args:
        update_index: updates before this one.
        key: place of the parameter among all that are trained.
        skipped: on an accelerator, whether the update did not happen, a boolean scalar; the write then changes no bit.
    """

    update_index: int = 0
    key: int = 0
    skipped: Tensor | None = None


class Weight:
    """An fp32 parameter: the update works on it directly.

    Args:
        name: the model's name for the parameter.
        parameter: the model's own tensor.
        original: its fp32 values before it was cast to the storage dtype; the parameter itself where it was not.

    >>> weight = Weight("bias", torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    >>> weight.load() is weight.parameter.data or weight.load().data_ptr() == weight.parameter.data_ptr()
    True
    """

    keeps_every_bit = True
    """Whether an update too small for the parameter's dtype still counts."""

    def __init__(self, name: str, parameter: nn.Parameter, original: Tensor) -> None:
        del original
        self.name = name
        self.parameter = parameter
        self.accumulated: Tensor | None = None
        self._version = _version(self.held)

    def __getstate__(self) -> dict[str, Any]:
        """With what torch leaves behind when it copies a parameter: its gradient, and how often it was written."""
        return {**self.__dict__, "_version": self._version == _version(self.held), "gradient": self.parameter.grad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As the original stood to its parameter."""
        known, gradient = state.pop("_version"), state.pop("gradient")
        self.__dict__.update(state)
        self.parameter.grad = gradient
        self._version = _version(self.held) if known else -1

    @property
    def trained(self) -> Tensor:
        """What the optimizer's parameter group holds."""
        return self.parameter

    @property
    def held(self) -> Tensor:
        """The parameter's part on this rank: all of it, unless it is sharded."""
        return local(self.parameter.detach())

    def relayout_(self, parameter: nn.Parameter, cut: Callable[[Tensor], Tensor]) -> None:
        """Go over to another tensor of the same values, laid out over the ranks.

        Args:
            parameter: the model's new tensor.
            cut: gives this rank's part of a tensor of the whole parameter's shape.
        """
        del cut  # nothing is carried beside the parameter
        self.parameter = parameter
        self.touch()

    def load(self) -> Tensor:
        """The fp32 values that the update works on; may be changed in place."""
        return self.held

    def store_(self, value: Tensor, how: WriteBack) -> None:
        """Write the parameter from updated fp32 values.

        Args:
            value: fp32, what ``load`` gave, after the update.
            how: of this step.
        """
        del value, how  # the parameter itself was updated
        self.touch()

    def touch(self) -> None:
        """Take the parameter's present bits as the engine's own."""
        self._version = _version(self.held)

    def reconcile_(self, *, look: bool = True) -> bool:
        """Follow a change that somebody else made to the parameter.

        Args:
            look: values may be read without waiting.

        Returns:
            Whether bits that this weight carries had to be rebuilt.
        """
        del look
        return False

    def accumulate_(self) -> None:
        """Move a 16-bit gradient into the fp32 sum of the window."""
        gradient = self.stored()
        if gradient is None or (gradient.dtype == torch.float32 and self.accumulated is None):
            return
        wide = gradient.float()
        if self.accumulated is None:
            self.accumulated = wide
        elif self.accumulated.is_sparse and not wide.is_sparse:
            self.accumulated = wide + self.accumulated
        else:
            self.accumulated += wide
        self.parameter.grad = None

    def gradient(self) -> Tensor | None:
        """The stored gradient of the window, still scaled."""
        if self.accumulated is not None:
            self.accumulate_()
            return self.accumulated
        return self.stored()

    def stored(self) -> Tensor | None:
        """This rank's part of what backward left in ``parameter.grad``."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    def clear_gradient(self) -> None:
        """Forget the window's gradient."""
        self.parameter.grad = None
        self.accumulated = None

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep besides the parameter."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state`` gave, and write the parameter that belongs to it."""


class BareWeight(Weight):
    """A 16-bit parameter alone: what an update loses in rounding is lost."""

    keeps_every_bit = False

    def load(self) -> Tensor:
        """The parameter, widened."""
        return self.held.float()

    def store_(self, value: Tensor, how: WriteBack) -> None:
        """Round to nearest, ties to even."""
        del how
        self.held.copy_(value)
        self.touch()


class StochasticWeight(BareWeight):
    """A bf16 parameter alone, written with unbiased random rounding: on average nothing is lost."""

    keeps_every_bit = True

    def __init__(self, name: str, parameter: nn.Parameter, original: Tensor, *, seed: int) -> None:
        super().__init__(name, parameter, original)
        self.seed = seed

    def store_(self, value: Tensor, how: WriteBack) -> None:
        """Add 16 random bits below the kept ones and cut; a value that bf16 holds stays."""
        self.held.copy_(_cut(value, self._bits(value, how)))
        self.touch()

    def _bits(self, value: Tensor, how: WriteBack) -> Tensor:
        """Random bits by the elements' places in the whole parameter, so that every layout draws the same."""
        offset, whole = place_of(self.parameter)

        def drawn(start: int, count: int) -> Tensor:
            return random_bits16(self.seed, how.update_index, how.key, start=start, count=count, device=value.device)

        if value.shape[1:] == whole[1:]:  # rows of the whole follow each other
            start = offset[0] * math.prod(whole[1:]) if offset else 0
            return drawn(start, value.numel()).reshape(value.shape)
        part = tuple(slice(first, first + size) for first, size in zip(offset, value.shape, strict=True))
        return drawn(0, math.prod(whole)).reshape(whole)[part]


class CompensatedWeight(BareWeight):
    """A bf16 parameter and, in bf16, what its last write-back rounded away (Kahan's compensation)."""

    keeps_every_bit = True

    def __init__(self, name: str, parameter: nn.Parameter, original: Tensor) -> None:
        super().__init__(name, parameter, original)
        self.compensation = (local(original) - self.held.float()).to(parameter.dtype)

    def relayout_(self, parameter: nn.Parameter, cut: Callable[[Tensor], Tensor]) -> None:
        """Cut what is carried as well."""
        super().relayout_(parameter, cut)
        self.compensation = cut(self.compensation).clone()

    def load(self) -> Tensor:
        """Parameter plus compensation."""
        return self.held.float() + self.compensation.float()

    def store_(self, value: Tensor, how: WriteBack) -> None:
        """Round to nearest, and keep the rest, rounded to nearest in turn."""
        rounded = value.to(self.parameter.dtype)
        rest = (value - rounded.float()).to(self.parameter.dtype)
        if how.skipped is not None:
            rounded = torch.where(how.skipped, self.held, rounded)
            rest = torch.where(how.skipped, self.compensation, rest)
        self.held.copy_(rounded)
        self.compensation.copy_(rest)
        self.touch()

    def reconcile_(self, *, look: bool = True) -> bool:  # noqa: ARG002  # whatever it is, it is added to what is there
        """Compensation belongs to weights that are no more; start afresh."""
        if _version(self.held) == self._version:
            return False
        self.compensation.zero_()
        self.touch()
        return True

    def state(self) -> dict[str, Tensor]:
        """The compensation."""
        return {"compensation": self.compensation}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back the compensation; the parameter is the model's own state."""
        self.compensation.copy_(state["compensation"])
        self.touch()


class MasterWeight(Weight):
    """A 16-bit parameter with an fp32 master, which the optimizer's group holds in its place."""

    def __init__(self, name: str, parameter: nn.Parameter, original: Tensor) -> None:
        super().__init__(name, parameter, original)
        values = local(original.detach()).clone().float()
        self.master = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        self._looks = 0
        self._written = _version(self.master)

    def touch(self) -> None:
        """Take the master's present bits as the engine's own as well."""
        super().touch()
        self._written = _version(self.master)

    @property
    def trained(self) -> Tensor:
        """The master."""
        return self.master

    def relayout_(self, parameter: nn.Parameter, cut: Callable[[Tensor], Tensor]) -> None:
        """Cut what is carried as well."""
        super().relayout_(parameter, cut)
        self.master = torch.nn.Parameter(cut(self.master.detach()).clone(), requires_grad=parameter.requires_grad)

    def load(self) -> Tensor:
        """The master."""
        return self.master.detach()

    def store_(self, value: Tensor, how: WriteBack) -> None:
        """Round the master to nearest, ties to even; a master that did not change gives the same bits again."""
        del how
        self.held.copy_(value)
        self.touch()

    def reconcile_(self, *, look: bool = True) -> bool:
        """Where the parameter is no longer the rounded master, take the parameter as the new master.

        ``parameter.data`` changes uncounted: a look at some finds most; from uncounted NaNs the master is kept.
        """
        present = self.held
        counted = _version(present) != self._version
        if not counted:
            if _version(self.master) != self._written:  # somebody wrote the master: the parameter follows it
                self.store_(self.load(), WriteBack())
                return False
            if not (look and self._seems_changed()):
                return False
        rounded = self.master.detach().to(present.dtype)
        same = (present == rounded) | (present.isnan() & rounded.isnan() if counted else present.isnan())
        changed = not bool(same.all())
        if changed:
            self.master.detach().copy_(torch.where(same, self.master.detach(), present.float()))
        self.touch()
        return changed

    def _seems_changed(self) -> bool:
        """Whether some elements, others at each step, are no longer the rounded master's."""
        present, master = self.held, self.master.detach()
        if present.numel() > _FEW and present.is_contiguous() and master.is_contiguous():
            stride, self._looks = present.numel() // _FEW, self._looks + 1
            some = slice(self._looks * _PRIME % stride, None, stride)
            present, master = present.view(-1)[some], master.view(-1)[some]
        rounded = master.to(present.dtype)
        return not torch.equal(present, rounded) and bool(((present != rounded) & ~present.isnan()).any())

    def state(self) -> dict[str, Tensor]:
        """The master."""
        return {"master": self.master.detach()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back the master, and round it into the parameter."""
        self.master.detach().copy_(state["master"])
        self.store_(self.load(), WriteBack())


class RemainderWeight(Weight):
    """A bf16 parameter and the 16 bits below it: together the fp32 master, in half the memory of a separate one."""

    def __init__(self, name: str, parameter: nn.Parameter, original: Tensor) -> None:
        super().__init__(name, parameter, original)
        high, self.remainder = split(local(original.detach()).float())
        self.held.copy_(high)
        self.touch()

    def relayout_(self, parameter: nn.Parameter, cut: Callable[[Tensor], Tensor]) -> None:
        """Cut what is carried as well."""
        super().relayout_(parameter, cut)
        self.remainder = cut(self.remainder).clone()

    def load(self) -> Tensor:
        """Parameter and remainder, joined."""
        return join(self.held, self.remainder)

    def store_(self, value: Tensor, how: WriteBack) -> None:
        """Split; a value that did not change gives the same bits again."""
        del how
        high, low = split(value)
        self.held.copy_(high)
        self.remainder.copy_(low)
        self.touch()

    def reconcile_(self, *, look: bool = True) -> bool:  # noqa: ARG002  # whatever it is, it completes what is there
        """The remainder belongs to weights that are no more; start afresh."""
        if _version(self.held) == self._version:
            return False
        self.remainder.zero_()
        self.touch()
        return True

    def state(self) -> dict[str, Tensor]:
        """The remainder."""
        return {"remainder": self.remainder}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back the remainder; the parameter is the model's own state."""
        self.remainder.copy_(state["remainder"])
        self.touch()


def _version(tensor: Tensor) -> int:
    """How often a tensor was written in place; ``load_state_dict`` counts, ``.data`` does not."""
    return tensor._version  # noqa: SLF001  # torch gives it no public name


def _cut(value: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16: add the random bits below the kept ones, then cut; infinities and NaNs are left to the cast."""
    pattern = value.view(torch.int32)
    cut = ((pattern + bits) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(value.isfinite(), cut, value.to(torch.bfloat16))
