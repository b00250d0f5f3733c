"""Runs torch's profiler over windows of steps, and writes traces and summaries."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from forge_resilience.verdict import Verdict
from torch.profiler import ProfilerActivity, profile, record_function

from forge_trainer.console import emit
from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.profile.axes import axis_of
from forge_trainer.profile.snapshots import Snapshots
from forge_trainer.profile.summary import STEPS, line_of, markdown, summarize
from forge_trainer.profile.trace import SPAN_MARK, WINDOW_MARK, read
from forge_trainer.progress import Progress
from forge_trainer.run_dir.files import RunFiles
from forge_trainer.steps.base import StepOutput

if TYPE_CHECKING:
    from forge_trainer.hooks.profile import ProfileConfig

QUIET = "KINETO_LOG_LEVEL"
"""The variable that silences the profiler's message on stderr that there is no GPU."""

TRACE, SUMMARY, PAGE = "trace.json.gz", "summary.json", "summary.md"


class Profile(Hook):
    """The hook of `ProfileConfig`.

    Args:
        config: configuration of the hook.
        run: the run.
    """

    span = "profile"

    def __init__(self, config: ProfileConfig, run: RunView) -> None:
        self._config, self._run = config, run
        self._folder = RunFiles(run.directory).profile
        self._is_mine = run.env.rank in config.ranks
        self._window: Window | None = None
        self._snapshots: Snapshots | None = None
        if self._is_mine and run.mesh.device.type == "cuda":
            self._snapshots = Snapshots(
                self._folder, run.env.rank, config.snapshot_step, config.snapshot_on_oom, run.directory
            )
        run.clock.watchers.append(self._watch)

    def on_start(self, progress: Progress) -> None:
        """See `Hook.on_start`."""
        self._begin(progress)

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device when a window begins or ends."""
        if self._snapshots is not None:
            self._snapshots.after(progress.step)
        if self._window is not None and (progress.step == self._window.last or progress.complete):
            self._end(progress)
        if not progress.complete:
            self._begin(progress)

    def on_end(self, progress: Progress, verdict: Verdict) -> None:
        """See `Hook.on_end`: a window that ends early counts only its steps."""
        self._end(progress)

    def rewind(self, progress: Progress) -> None:
        """See `Hook.rewind`."""
        self._drop()
        self._begin(progress)

    def close(self) -> None:
        """See `Hook.close`."""
        self._drop()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._watch in self._run.clock.watchers:
            self._run.clock.watchers.remove(self._watch)

    def _begin(self, progress: Progress) -> None:
        """Begin a window if the next step belongs to one."""
        if not self._is_mine:
            return
        if self._snapshots is not None:
            self._snapshots.before(progress.step + 1)
        due = self._config.window(progress.step + 1)
        if due is None or self._window is not None or progress.complete:
            return
        try:
            self._window = Window(progress.step + 1, due[-1], self._config.details, self._run.mesh.device)
        except RuntimeError as error:  # another profiler is at work
            emit(f"steps {progress.step + 1} to {due[-1]} are not profiled: {error}\n", sys.stderr)

    def _end(self, progress: Progress) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        steps, rank = progress.step - window.first + 1, self._run.env.rank
        window.stop()
        if steps < 1:
            return
        folder = self._folder / f"step-{window.first:08d}" / f"rank-{rank}"
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._write(window, steps, partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except (OSError, ValueError, RuntimeError) as error:  # a full disk is no reason to end
            emit(f"the profile of step {window.first} could not be written: {error}\n", sys.stderr)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _write(self, window: Window, steps: int, folder: Path) -> None:
        job, env = self._run.job, self._run.env
        plain = folder / "trace.json"
        window.export(plain)
        line = read(plain, axis_of(self._run.mesh, job.mesh.sizes(env.world_size)))
        device = self._run.mesh.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        facts: dict[str, Any] = {
            "rank": env.rank,
            "ranks": env.world_size,
            "device": name,
            "torch": str(torch.__version__),
            "first_step": window.first,
            "steps": steps,
        }
        summary = facts | summarize(line, steps)
        with plain.open("rb") as source, gzip.open(folder / TRACE, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        plain.unlink()
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
        (folder / PAGE).write_text(markdown(summary))
        emit(f"step {window.first + steps - 1:>6}  {line_of(summary)}\n", sys.stdout)

    def _drop(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            with suppress(RuntimeError):  # of a device that has failed
                window.stop()

    def _watch(self, name: str) -> None:
        if self._window is not None:
            self._window.enter(name)


class Window:
    """The profiler during a window of steps; it starts when the window is built.

    Args:
        first: the first step, from 1.
        last: the last step.
        details: see `ProfileConfig`.
        device: device of the computation.

    Raises:
        RuntimeError: another profiler runs in this process.
    """

    def __init__(self, first: int, last: int, details: tuple[str, ...], device: torch.device) -> None:
        self.first, self.last, self._device = first, last, device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:
            os.environ.setdefault(QUIET, "99")
        self._wait()
        self._profile = profile(
            activities=activities,
            record_shapes="shapes" in details,
            with_stack="stacks" in details,
            profile_memory="memory" in details,
        )
        self._profile.start()
        self._mark: tuple[str, record_function] | None = None
        self._whole = record_function(WINDOW_MARK)
        self._whole.__enter__()

    def enter(self, span: str) -> None:
        """Mark that the host enters another span of the clock."""
        if self._mark is not None:
            if self._mark[0] == span:
                return
            self._mark[1].__exit__(None, None, None)
        if span not in STEPS:
            self._wait()  # what steps have begun is theirs
        mark = record_function(SPAN_MARK + span)
        mark.__enter__()
        self._mark = span, mark

    def stop(self) -> None:
        """Stop the profiler once pending device work has ended."""
        self._wait()
        if self._mark is not None:
            self._mark[1].__exit__(None, None, None)
            self._mark = None
        self._whole.__exit__(None, None, None)
        self._profile.stop()

    def export(self, path: Path) -> None:
        """Write the trace as JSON.

        Raises:
            OSError: torch wrote no file, without an error.
        """
        self._profile.export_chrome_trace(str(path))
        if not path.is_file():
            raise OSError(f"torch has written no trace to {path.parent}; is the disk full?")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
