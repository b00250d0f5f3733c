"""Runs tests of `tests/gpu` and writes what became of them, as JSON.

Run: python benchmarks/gpu/tested.py test_groups.py [-k KEYWORDS] --name groups --out FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from report import ROOT, write


class Outcomes:
    """Notes what became of each test; a plugin of pytest."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.skipped: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for setup, call and teardown of each."""
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]
        elif report.skipped:
            self.skipped[str(report.longrepr[-1] if report.longrepr else "")] += 1
        elif report.when == "call":
            self.seconds[report.nodeid] = round(report.duration, 2)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported counts as a test that failed."""
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]


def main() -> None:
    """Run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", help="in tests/gpu")
    parser.add_argument("-k", dest="keywords", default="", help="as of pytest")
    parser.add_argument("--name", required=True, help="of the results")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = Outcomes()
    # another torch than that of the lock warns of other things
    options = ["-n", "0", "-m", "gpu", "-W", "default", "-q", "--timeout", "300", "-k", chosen.keywords]
    code = pytest.main([*options, str(ROOT / "tests" / "gpu" / chosen.file)], plugins=[found])
    passed = {name: took for name, took in found.seconds.items() if name not in found.failed}
    outcomes = {"passed": passed, "failed": found.failed, "skipped": dict(found.skipped)}
    write(chosen.name, outcomes, chosen.out)
    raise SystemExit(int(code))


if __name__ == "__main__":
    main()
