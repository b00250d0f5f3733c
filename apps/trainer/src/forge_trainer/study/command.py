"""`forge study`: lists the runs of a study, runs or submits them, and writes their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_resilience.exit_codes import ExitCode

from forge_trainer.console import emit
from forge_trainer.run_dir.files import write_whole
from forge_trainer.study.config import StudyConfig, load_study
from forge_trainer.study.points import Point, points_of
from forge_trainer.study.results import row_of, write_results
from forge_trainer.study.state import State, last_line, log_of, state_of, summary

CONFIGS = "configs"


def run_study(options: argparse.Namespace) -> int:
    """Run a study as its options say.

    Raises:
        ConfigError: the study or one of its runs is not valid.
    """
    path = Path(options.study)
    study, root = load_study(path)
    points = points_of(study, path, root)
    if options.analyse:
        from forge_trainer.study.analyse import analyse

        return analyse(study, points, root)
    if options.coordinates:
        from forge_trainer.study.coordinates import check_coordinates

        return check_coordinates(points, options.coordinates)
    states = [state_of(point, root) for point in points]
    left = [
        point
        for point, state in zip(points, states, strict=True)
        if state.kind not in ("complete", "running")
    ]
    if options.dry_run and options.cluster is None:
        sys.stdout.write("\n".join(listed(study, points, states)) + "\n")
        return ExitCode.DONE
    if not options.dry_run:
        write_configs(points, root, path.parent / study.base)
    if options.cluster is not None:
        from forge_trainer.study.array import submit

        return submit(options, study.name, left, root)
    from forge_trainer.study.local import run_here

    sys.stdout.write(f"{study.name}: {summary(states)}; {len(left)} to run, {options.jobs} at a time\n")
    is_over = run_here(left, root, root / CONFIGS, options.jobs, lambda line: emit(f"{line}\n", sys.stdout))
    return ended(points, root, is_over)


def write_configs(points: Sequence[Point], root: Path, base: Path) -> None:
    """Write the configuration of each run; `forge train` also accepts it directly."""
    folder = root / CONFIGS
    folder.mkdir(parents=True, exist_ok=True)
    for point in points:
        write_whole(folder / f"{point.name}.toml", point.toml(base))


def ended(points: Sequence[Point], root: Path, is_over: bool) -> int:
    """Write the results, and print which runs failed and why; return the exit code."""
    states = [state_of(point, root) for point in points]
    rows = [row_of(point, state, root) for point, state in zip(points, states, strict=True)]
    written = write_results(rows, root)
    for point, state in zip(points, states, strict=True):
        if state.kind in ("failed", "stopped"):
            reason = state.reason or last_line(log_of(root, point.name))
            sys.stderr.write(
                f"{point.name}: {state.kind} at step {state.step}, exit code {state.code}: {reason}\n"
            )
    sys.stdout.write(f"{summary(states)}\nwrote {', '.join(map(str, written))}\n")
    if not is_over:
        return ExitCode.PREEMPTED
    return ExitCode.DONE if all(state.kind == "complete" for state in states) else ExitCode.FAILED


def listed(study: StudyConfig, points: Sequence[Point], states: Sequence[State]) -> Iterator[str]:
    """Yield one line for each run, and the total cost."""
    yield f"{study.name}: {len(points)} runs, {summary(states)}"
    width = max(len(point.name) for point in points)
    yield f"{'run':<{width}}  parameters   tokens  steps  batch (tokens)        lr   FLOPs  state"
    for point, state in zip(points, states, strict=True):
        m, job = point.measures, point.job
        yield (
            f"{point.name:<{width}}  {m['parameters']:10.3g}  {m['tokens']:7.2g}  {job.train.steps:5d}  "
            f"{m['batch_tokens']:14.0f}  {job.optimizer.lr:8.3g}  {m['flops']:6.1e}  {state.kind}"
        )
    yield f"{sum(point.measures['flops'] for point in points):.3g} FLOPs in all"
