"""Options of the suite: how many examples, whether it may take an hour, and where its report goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mp_conformance import registered, report
from mp_conformance.claims.rows import Run
from mp_conformance.runner import Result

_KEY = "conformance result"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--deep", action="store_true", help="5,000 examples a drawn claim and all 2**32 float32 inputs")
    group.addoption("--conformance-report", type=Path, metavar="OUT.html", help="write the results as a page")
    group.addoption("--conformance-json", type=Path, metavar="OUT.json", help="write the results as JSON")


def _examples(config: pytest.Config) -> int:
    return int(os.environ.get("MP_EXAMPLES", "5000" if config.getoption("--deep") else "200"))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    return Run(examples=_examples(request.config), deep=bool(request.config.getoption("--deep")))


class _Collector:
    """Gathers the results that the tests recorded, also from the workers of a parallel run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.results: list[Result] = []
        self.written: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.results += [Result(**value) for key, value in report.user_properties if key == _KEY]

    def pytest_sessionfinish(self) -> None:
        page, data = (self.config.getoption(f"--conformance-{kind}") for kind in ("report", "json"))
        if not self.results or not (page or data):
            return
        place = {claim.id: index for index, claim in enumerate(registered())}  # workers answer in any order
        document = report.document(
            sorted(self.results, key=lambda result: place[result.claim]),
            device="cpu",
            seed=0,
            examples=_examples(self.config),
            pattern="*",
            deep=bool(self.config.getoption("--deep")),
        )
        for path in (page, data):
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
        if data:
            report.write_json(data, document)
        if page:
            page.write_text(report.html(document), encoding="utf-8")
        self.written = [str(path) for path in (page, data) if path]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        gaps = sum(result.status == "gap" for result in self.results)
        if gaps:
            terminalreporter.write_line(
                f"x: {gaps} claims that are known to be false of a library, listed in gaps.toml"
            )
        for path in self.written:
            terminalreporter.write_line(f"written: {path}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config))
