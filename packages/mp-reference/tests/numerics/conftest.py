"""What the tests of numerics share: values where rounding changes its mind, and the oracle over arrays."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mp_reference.numerics import exact
from mp_reference.numerics.codec import code_dtype, decode, decoder_for, encoder_for
from mp_reference.numerics.rounding_kernels import kernel_for

if TYPE_CHECKING:
    from mp_reference.spec.formats import FloatFormat


def pytest_runtest_setup() -> None:
    """mutmut asks which tests reach a line: where it looks, every test builds its own kernels."""
    if "MUTANT_UNDER_TEST" in os.environ:
        for kept in (kernel_for, encoder_for, decoder_for):
            kept.cache_clear()


def edge_values(fmt: FloatFormat, every: int = 1) -> np.ndarray:
    """Every ``every``-th number of a format, the midpoint above it, one float32 ulp to either side of both, both signs,
    the overflow edge, and the special values; float32, distinct."""
    codes = np.arange(0, 1 << (fmt.bits - fmt.signed), every, dtype=np.int64).astype(code_dtype(fmt))
    with np.errstate(invalid="ignore"):
        numbers = decode(codes, fmt).astype(np.float64)
        numbers = numbers[np.isfinite(numbers)]
        top = np.array([fmt.max, fmt.max * (1 + fmt.epsilon / 4), fmt.max * (1 + fmt.epsilon / 2), fmt.max * 2])
        base = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, top, [fmt.min_normal, fmt.min_subnormal]])
        base = base[base <= np.finfo(np.float32).max].astype(np.float32)
    with np.errstate(over="ignore"):
        neighbours = [np.nextafter(base, np.float32(towards)) for towards in (np.inf, -np.inf)]
    around = np.concatenate([base, *neighbours])
    special = np.float32([0.0, 1e-45, 1e38, 3.4028235e38, np.inf, np.nan])
    both = np.concatenate([around, -around, special, -special])
    return np.unique(both.view(np.uint32)).view(np.float32)


def oracle_array(values: np.ndarray, fmt: FloatFormat, **how: object) -> np.ndarray:
    """``round_exact`` over an array, in float64."""
    rounded = [exact.round_exact(float(value), fmt, **how) for value in values.reshape(-1)]
    return np.array(rounded, np.float64).reshape(values.shape)


@pytest.fixture(scope="session")
def edges():
    return edge_values


@pytest.fixture(scope="session")
def oracle():
    return oracle_array
