"""Formats the results of tasks as a table.

The table of the harness loses its column names with some versions of the package that draws it.
"""

from collections.abc import Mapping
from typing import Any

COLUMNS = ("task", "filter", "n-shot", "metric", "value", "stderr")


def task_table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table with a row for each metric of each task.

    Args:
        results: result of `lm_eval.evaluator.simple_evaluate`.
    """
    rows: list[tuple[str, ...]] = [COLUMNS]
    for task, found in results["results"].items():
        name, shots = found.get("alias", task), str(results.get("n-shot", {}).get(task, ""))
        for key, value in sorted(found.items()):
            metric, comma, picked = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = found.get(f"{metric}_stderr,{picked}", "")
                rows.append((name, picked, shots, metric, _number(value), _number(error)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
