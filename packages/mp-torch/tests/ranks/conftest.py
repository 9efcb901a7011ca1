"""The worker processes that all tests of many ranks share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # a spawned worker imports ``pool`` by name
from pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Started at the first job, once per test run."""
    workers = Pool()
    yield workers
    workers.close()
