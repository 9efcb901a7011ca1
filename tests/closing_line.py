"""Add up the closing lines of all pytest runs in a log and print one of the same form: ``closing_line.py LOG``."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

CLOSING = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+) in ([\d.]+)s(?: \(.*\))? ?=*$", re.MULTILINE)
ORDER = ["failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors"]
ONE_WORD = {"error": "errors", "warning": "warnings"}


def total(log: str) -> tuple[Counter[str], float]:
    """Outcomes and seconds of every run in the log.

    >>> total("== 3 passed, 1 skipped in 2.50s ==\\n1 failed, 2 passed in 61.00s (0:01:01)\\n")
    (Counter({'passed': 5, 'skipped': 1, 'failed': 1}), 63.5)
    """
    outcomes: Counter[str] = Counter()
    seconds = 0.0
    for counts, spent in CLOSING.findall(re.sub(r"\x1b\[[\d;]*m", "", log)):
        seconds += float(spent)
        for number, word in re.findall(r"(\d+) (\w+)", counts):
            outcomes[ONE_WORD.get(word, word)] += int(number)
    return outcomes, seconds


def main(path: str) -> int:
    """Print the line; an error if nothing ran or something failed."""
    outcomes, seconds = total(Path(path).read_text(errors="replace"))
    words = sorted(outcomes, key=lambda word: ORDER.index(word) if word in ORDER else len(ORDER))
    line = ", ".join(f"{outcomes[word]} {word}" for word in words) or "no tests ran"
    print(f"{f' {line} in {seconds:.2f}s ':=^100}")
    return int(not outcomes["passed"] or outcomes["failed"] > 0 or outcomes["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
