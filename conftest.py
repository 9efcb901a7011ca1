"""Settings of every test run: the Hypothesis profiles, and one OpenMP thread."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Two threads on a busy machine can be forty times slower than one; torch reads this when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_SLOW_IS_FINE = [HealthCheck.too_slow]  # exhaustive comparisons of a format draw whole arrays at once

settings.register_profile("dev", deadline=None, max_examples=100, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile(
    "ci", deadline=None, max_examples=200, derandomize=True, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile("nightly", deadline=None, max_examples=5000, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
