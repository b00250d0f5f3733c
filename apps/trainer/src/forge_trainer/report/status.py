"""`forge status`: shows the progress of a run from its files alone."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from forge_ckpt.lease import read_holder
from forge_ckpt.store import Store
from forge_resilience.exit_codes import ExitCode
from forge_resilience.goodput import add_up
from forge_resilience.hang import VERDICT

from forge_trainer.config.eval import losses_of
from forge_trainer.hooks.ledger import read_ledger
from forge_trainer.report.runs import curve, goodput_line, listing, runs_in
from forge_trainer.run_dir.files import (
    Outline,
    RunFiles,
    read_ended,
    read_history,
    read_job,
    read_lines,
    read_outline,
)
from forge_trainer.slurm.futile import FUTILE, crash_loop, futile_starts
from forge_trainer.track.console import duration

SAME_AGAIN = {ExitCode.CONFIG, ExitCode.NOT_FINITE, ExitCode.DIVERGED}
"""Exit codes after which a new start would end in the same way."""

INCIDENTS = 5
"""The number of incidents that are shown, the last ones."""


def show_status(options: argparse.Namespace) -> int:
    """Run `forge status`: print steps, numbers, checkpoints, how the run ended and what the next start does.

    With `--parameters` it prints how each parameter is trained instead, and imports modules of the run.

    Returns:
        0; with `--exit-code` the exit code of the last start, or 1 if it was killed or still runs.
    """
    directory = Path(options.directory)
    if not options.exit_code and not options.parameters and (runs := runs_in(directory)):
        sys.stdout.write("\n".join(listing(runs)) + "\n")
        return ExitCode.DONE
    if options.exit_code:
        return (read_ended(directory) or {}).get("code", ExitCode.FAILED)
    if options.parameters:
        from forge_trainer.report.plan import plan_lines

        sys.stdout.write("\n".join(plan_lines(read_job(directory))) + "\n")
        return ExitCode.DONE
    sys.stdout.write("\n".join(_lines(directory)) + "\n")
    return ExitCode.DONE


def _lines(directory: Path) -> Iterator[str]:
    run, files = read_outline(directory), RunFiles(directory)
    until = _last_step(directory, run.train.steps)
    data = f", of which there were data for {until}" if until < run.train.steps else ""
    yield f"{directory}: {run.train.steps} steps of {_batch(run)}{data}"
    if run.code:
        yield f"  not decoded   what needs {', '.join(run.code)}: looking at a run imports nothing of it"
    records = read_lines(files.metrics, "step")
    if logged := next((r for r in reversed(records) if "loss" in r), None):
        speed = _number(logged, "tokens_per_s", ",.0f")
        yield f"  last logged   step {logged['step']}, loss {_number(logged, 'loss')}, {speed} tokens/s"
        if isinstance(when := logged.get("time"), int | float):
            yield f"                at {datetime.fromtimestamp(when):%Y-%m-%d %H:%M:%S}, {_ago(when)}"
        yield from _dead_experts(logged)
    losses = [(r["step"], r["loss"]) for r in records if isinstance(r.get("loss"), int | float)]
    yield from (f"  {line}" for line in curve(losses))
    evaluated = next((r for r in reversed(records) if losses_of(r)), {})
    for name, loss in losses_of(evaluated).items():
        yield f"  {name:<13} step {evaluated['step']}, loss {_number({name: loss}, name)}"
    if (goodput := add_up(read_ledger(directory))).wall_s:
        yield f"  goodput       {goodput_line(goodput)}"
    for event in read_history(directory):
        values = f"{event.get('old')} -> {event.get('new')}"
        yield f"  changed       {event['key']}: {values} at step {event.get('step')}"
    for incident in read_lines(files.incidents, "kind")[-INCIDENTS:]:
        yield f"  {incident['kind']!s:<13} {summary(incident)}"
    store = Store(files.checkpoints, marks=files.progress_marks)
    try:
        steps = store.steps()
        lost = not steps and (highest := store.progress()) >= 0
    except OSError as error:
        yield f"  checkpoints   cannot be read: {error}"
        return
    none = f"none, and there was one of step {highest}" if lost else "none"
    yield f"  checkpoints   {', '.join(map(str, steps)) or none}"
    yield from _state(directory, steps, until, lost)


def _dead_experts(logged: dict[str, Any]) -> Iterator[str]:
    """Name layers with experts that no token chose in the last logged step, at most three."""
    end = "/dead_experts"
    dead = {
        key.removesuffix(end): int(value)
        for key, value in logged.items()
        if key.endswith(end) and isinstance(value, int | float) and 0 < value < float("inf")
    }
    if dead:
        named = ", ".join(f"{count} of {layer}" for layer, count in list(dead.items())[:3])
        more = f" and of {len(dead) - 3} more layers" if len(dead) > 3 else ""
        yield f"  dead experts  {named}{more}: no token chose them in step {logged['step']}"


def _batch(run: Outline) -> str:
    """Describe the batch of a step in words."""
    train, max_tokens = run.train, run.max_tokens
    if max_tokens is None or not train.sequences(max_tokens):
        return f"{train.global_batch_tokens or '?'} tokens"
    sizes = [stage.global_batch for stage in train.batch_warmup] + [train.sequences(max_tokens)]
    return f"{' to '.join(map(str, sizes))} x {max_tokens} tokens"


def _last_step(directory: Path, steps: int) -> int:
    """Return the step at which a run is complete; an earlier one if it ended with its data."""
    ended = read_ended(directory) or {}
    step = ended.get("step")
    return min(steps, step) if ended.get("code") == ExitCode.DONE and isinstance(step, int) else steps


def _state(directory: Path, steps: list[int], until: int, lost: bool) -> Iterator[str]:
    holder, ended = read_holder(RunFiles(directory).lease), read_ended(directory)
    if holder is not None and holder.is_alive() is not False:
        elsewhere = "" if holder.is_alive() else ", as far as can be told from here"
        yield f"  running       {holder}{elsewhere}"
        failed = futile_starts(directory)
        newest = steps[-1] if steps else 0
        if len(failed) == FUTILE - 1 and failed[0]["step"] == newest:
            yield f"  last chance   {len(failed)} starts failed at step {newest}; a third is the last"
        return
    if ended is not None:
        yield f"  last ended    exit code {ended.get('code')} at {ended.get('when')}: {ended.get('reason')}"
    elif holder is not None:
        yield f"  last ended    without a word (killed?); it was {holder}"
    if ended is None and (verdict := _verdict(RunFiles(directory).hang)):
        yield f"  {verdict} (see hang/)"
    if (futile := crash_loop(directory)) is not None:
        yield f"  {futile}"
    begins = f"the next start begins at step {steps[-1] if steps else 0}"
    if steps and steps[-1] >= until:
        yield "  complete      starting it again does nothing"
    elif lost:
        yield "  not complete  the next start refuses to begin at step 0: the checkpoints are gone"
    elif ended is not None and ended.get("code") in SAME_AGAIN:
        yield f"  not complete  {begins}, and ends the same way unless something is changed"
    else:
        yield f"  not complete  {begins}"


def _verdict(folder: Path) -> str:
    """Return the first line of the report of a hang; empty without a report."""
    try:
        return next(iter((folder / VERDICT).read_text(errors="replace").splitlines()), "")
    except OSError:
        return ""


def summary(incident: Mapping[str, Any]) -> str:
    """Describe an incident in words."""
    if incident["kind"] == "rollback":
        data = " without their data" if incident.get("skip") else ""
        first, end = incident.get("first"), incident.get("end")
        last = end - 1 if isinstance(end, int) else end
        return f"steps {first} to {last}: {incident.get('why')}; back to step {incident.get('to')}{data}"
    if incident["kind"] == "repeated":
        suspect = ": suspect the hardware" if incident.get("exact", True) else ", as sums on a GPU may be"
        again = f"was finite then{suspect}" if incident.get("finite") else "was not finite again"
        return f"step {incident.get('step')} was not finite, and {again}"
    return str(incident.get("why"))


def _number(record: Mapping[str, Any], key: str, form: str = ".4f") -> str:
    """Format a number; null in the file stands for a number that was not finite."""
    value = record.get(key)
    return format(value, form) if isinstance(value, int | float) else "not finite"


def _ago(when: float) -> str:
    return f"{duration(max(0.0, time.time() - when))} ago"
