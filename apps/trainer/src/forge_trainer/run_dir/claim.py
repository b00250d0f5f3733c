"""Reserves the run directory for one start of a run, and records there how the start ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forge_ckpt.error import CheckpointError, LockedError
from forge_ckpt.lease import Holder, Lease, locked, newest_epoch, read_holder, take
from forge_config import Change, ConfigError, ForgeError, Loaded
from forge_resilience.exit_codes import ExitCode
from forge_resilience.finding import Finding
from forge_resilience.signals import Stopped

from forge_trainer.config.job import Job
from forge_trainer.end_together import FailedElsewhere
from forge_trainer.hooks.base import Hook
from forge_trainer.ranks import from_first
from forge_trainer.run_dir.environment import environment
from forge_trainer.run_dir.files import (
    RunFiles,
    append_history,
    now,
    recorded_changes,
    write_config,
    write_whole,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from forge_trainer.progress import Progress
    from forge_trainer.steps.base import StepOutput


def require_free(job: Job) -> None:
    """Raise an error early if a living process of this machine writes to the run; change nothing.

    Raises:
        LockedError: such a process exists.
    """
    folder = RunFiles(job.job.directory).lease
    holder = read_holder(folder)
    if holder is not None and holder.is_alive():
        raise LockedError(locked(folder))


class Claim:
    """The right of this start to write to the run directory.

    Args:
        loaded: the configuration.
        change: whether keys that may change as a recorded event may differ from those of the run.

    Attributes:
        changes: the keys that this start changes in the run; set by `hold`.
        progress: progress of the run, set once it is built; gives the last step of a start that fails.
    """

    def __init__(self, loaded: Loaded[Job], change: bool = False) -> None:
        self.job = loaded.value
        self.changes: list[Change] = []
        self.progress: Progress | None = None
        self._imports = loaded.imports
        self._beside = loaded.files[-1].resolve().parent
        self._change = change
        self._files = RunFiles(self.job.job.directory)
        self._lease: Lease | None = None
        self._epoch = 0
        self._exit: dict[str, Any] = {}

    @contextmanager
    def hold(self, group: ProcessGroup | None) -> Iterator[int]:
        """Hold the lease of the run directory; yield the number of the lease. Collective.

        The first rank takes the lease; the others learn the result before they write anything.

        Raises:
            LockedError: another process holds the lease; raised on every rank.
            ConfigError: the run meanwhile has a configuration that this one does not fit; on every rank.
        """
        try:
            error, self._epoch, self.changes = from_first(self._take, group)
            if error is not None:
                raise error
            yield self._epoch
        except BaseException as error:
            why = str(error) if isinstance(error, FailedElsewhere) else f"{type(error).__name__}: {error}"
            self.ended(code_of(error), why)
            raise
        finally:
            self._give_back()

    def _take(self) -> tuple[Exception | None, int, list[Change]]:
        try:
            self._lease = take(self._files.lease)
            changes = recorded_changes(self.job, self._change)
            self._files.exit.unlink(missing_ok=True)
            return None, self._lease.epoch, changes
        except OSError as error:
            failure: Exception = CheckpointError(f"{self.job.job.directory} cannot be written: {error}")
        except (LockedError, ConfigError) as error:
            failure = error
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        return failure, 0, []

    def _give_back(self) -> None:
        if self._lease is None:
            return
        try:
            if self._exit and self._lease.is_held():
                write_whole(self._files.exit, json.dumps(self._exit, indent=2) + "\n")
        except OSError as error:
            import logging

            logging.getLogger(__name__).warning("%s cannot be written: %s", self._files.exit, error)
        finally:
            self._lease.release()

    def ended(self, code: ExitCode, reason: str, step: int | None = None, hosts: Sequence[str] = ()) -> None:
        """Remember for `exit.json` how this start ends and which hosts caused it; the first call counts."""
        who = Holder.me()
        if step is None and self.progress is not None:
            step = self.progress.step
        self._exit = self._exit or {
            "code": int(code),
            "name": code.name.lower(),
            "reason": reason,
            "hosts": list(hosts),
            "step": step,
            "when": now(),
            "host": who.host,
            "job": who.job,
            "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }

    def end_at_once(self, found: Finding) -> None:
        """Record that this start hangs and release the run, from any thread; the process is about to end."""
        self.ended(ExitCode.HUNG, found.why, hosts=found.hosts)
        self._give_back()

    def is_held(self) -> bool:
        """Return whether no other process took the run over."""
        if self._lease is not None:
            return self._lease.is_held()
        return newest_epoch(self._files.lease) == self._epoch

    def begin(self, step: int) -> None:
        """Write this configuration into the run directory; the history first, so that a crash loses nothing.

        Raises:
            CheckpointError: the files cannot be written.
        """
        try:
            found = json.dumps(environment(self._beside), indent=2)
            write_whole(self._files.environment, found + "\n", mode=0o600)
            append_history(self.job.job.directory, step, self.changes)
            write_config(self.job, self._imports)
        except OSError as error:
            raise CheckpointError(
                f"{self.job.job.directory} cannot be written: {error}; make room, and start again"
            ) from error


class FirstStep(Hook):
    """A hook for the first rank that writes the configuration of the run after its first step."""

    def __init__(self, claim: Claim) -> None:
        self._claim: Claim | None = claim

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`."""
        if self._claim is not None:
            self._claim.begin(progress.step - 1)
            self._claim = None


def code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a start that ends by an error."""
    if isinstance(error, FailedElsewhere):
        return error.code
    if isinstance(error, Stopped):
        return ExitCode.PREEMPTED
    return ExitCode.CONFIG if isinstance(error, ForgeError) else ExitCode.FAILED
