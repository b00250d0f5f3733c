"""Commands on several runs: report, compare."""

import argparse
from typing import Any

from forge_trainer.cli.types import add_command


def add_commands(commands: Any) -> None:
    """Add report and compare."""
    report = add_command(commands, "report", _report, "curves, events and tables of runs as one HTML page")
    report.add_argument(
        "--out", metavar="FILE", help="report.html in the folder if one is given, else in this one, if absent"
    )
    compare = add_command(commands, "compare", _compare, "runs as a table, the least validation loss first")
    compare.add_argument("--csv", metavar="FILE", help="write the table for programs, too")
    compare.add_argument(
        "--by",
        metavar="KEY,...",
        help="runs that are alike in these keys are one row; all that differ but for seeds if absent",
    )
    for command in (report, compare):
        command.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a folder of runs")


def _report(options: argparse.Namespace) -> int:
    from forge_trainer.report.page import write_report

    return write_report(options)


def _compare(options: argparse.Namespace) -> int:
    from forge_trainer.report.compare import compare_runs

    return compare_runs(options)
