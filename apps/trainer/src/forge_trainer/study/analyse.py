"""`forge study --analyse`: analyses the complete runs; prints and writes Markdown, JSON and pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import write_whole
from forge_trainer.study.compare import optimizers
from forge_trainer.study.config import StudyConfig
from forge_trainer.study.findings import Finding, best_values, isoflops, law, seeds
from forge_trainer.study.points import Point
from forge_trainer.study.results import curve_of, row_of, write_results
from forge_trainer.study.state import state_of, summary
from forge_trainer.study.table import Row, complete

FOLDER = "analysis"


def analyse(study: StudyConfig, points: Sequence[Point], root: Path) -> int:
    """Analyse a study; write the results to `analysis/` in the folder of its runs.

    Raises:
        ConfigError: no complete run has the configured loss.
    """
    states = [state_of(point, root) for point in points]
    rows = [row_of(point, state, root) for point, state in zip(points, states, strict=True)]
    write_results(rows, root)
    good = complete(rows, study.analysis.loss)
    if not good:
        losses = sorted({key for row in rows for key in row if "loss" in key})
        raise ConfigError(
            f"no run of {study.name} is complete with {study.analysis.loss} ({summary(states)}; there are "
            f"{', '.join(losses)}); run it first, or set analysis.loss"
        )
    by_name = {point.name: point for point in points}
    found = findings(good, study, lambda name: curve_of(by_name[name], root))
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for one in found:
        if one.svg:
            write_whole(folder / f"{one.name}.svg", one.svg)
    numbers = {one.name: {**one.numbers, "doubts": one.doubts} for one in found}
    write_whole(folder / "analysis.json", json.dumps(numbers, indent=1) + "\n")
    text = "\n".join(report(study.name, found, len(good), len(rows))) + "\n"
    write_whole(folder / "analysis.md", text)
    sys.stdout.write(f"{text}\nwrote {folder}\n")
    return ExitCode.DONE


def findings(good: Sequence[Row], study: StudyConfig, curve: object) -> list[Finding]:
    """Return the findings of all analyses for which the runs suffice."""
    how = study.analysis
    lr_follows = ("lr",) if study.rules.lr is not None else ()
    made = [
        law(good, how),
        isoflops(good, how),
        best_values(good, how, "lr"),
        best_values(good, how, "batch_tokens", "tokens", *lr_follows),
        optimizers(good, how, curve),  # type: ignore[arg-type]
        seeds(good, how),
    ]
    return [one for one in made if one is not None]


def report(name: str, found: Sequence[Finding], good: int, total: int) -> Iterator[str]:
    """Yield the findings as lines of Markdown."""
    yield f"# {name}: {good} of {total} runs"
    if not found:
        yield "\nThese runs answer no question: vary a size, a length, a learning rate, a batch, or seeds."
    for one in found:
        yield f"\n## {one.title}\n"
        yield from (f"- {line}" for line in one.lines)
        if one.doubts:
            yield "\n**Not worth believing, or not yet:**\n"
            yield from (f"- {doubt}" for doubt in one.doubts)
        if one.svg:
            yield f"\n![{one.title}]({one.name}.svg)"
