"""Options of the suite: how many examples, and whether it may take an hour."""

from __future__ import annotations

import os

import pytest

from mp_conformance.claims.rows import Run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="5,000 examples a drawn claim and all 2**32 float32 inputs")


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    deep = bool(request.config.getoption("--deep"))
    return Run(examples=int(os.environ.get("MP_EXAMPLES", "5000" if deep else "200")), deep=deep)
