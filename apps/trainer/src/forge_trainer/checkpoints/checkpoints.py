"""The checkpoints of a run: when they are due, how they are written and how they are restored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forge_ckpt.config import CheckpointConfig
from forge_ckpt.error import CheckpointError
from forge_ckpt.saver import Saver
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_ckpt.values import from_json, to_json
from forge_config import ConfigError
from forge_resilience.goodput import PRIOR_S, save_every_s
from torch import nn
from torch.distributed import ProcessGroup

from forge_trainer.checkpoints.initial_weights import set_initial_weights
from forge_trainer.config.job import Job
from forge_trainer.data.data import Data
from forge_trainer.progress import Progress, Stateful
from forge_trainer.ranks import from_first

FIRST_STEPS = 20
"""With "auto", the steps up to the first checkpoint of a start: until then nothing is measured."""


class Failures(Protocol):
    """An object that knows how often a run fails, such as a `Ledger`."""

    @property
    def mean_time_to_failure_s(self) -> float: ...  # noqa: D102


class Interval:
    """Decides when checkpoints are due: every N steps or by their cost, and at the end; equal on all ranks.

    Args:
        config: distance of checkpoints, milestones and dense windows.
        progress: progress of the run.
        group: process group of all ranks, on the CPU.
        failures: failure rate of the run, used on the first rank; None if it is unknown.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        progress: Progress,
        group: ProcessGroup | None,
        failures: Failures | None = None,
    ) -> None:
        self._every, self._milestones = config.every_steps, config.keep_every_steps
        self._is_dense, self._progress, self._group = config.is_dense, progress, group
        self._failures = failures
        self._stalls: list[float] = []
        self.rewind()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after step number `step`."""
        if step == self._progress.until or self._is_dense(step):
            return True
        if self._milestones and step % self._milestones == 0:
            return True
        return step % self._every == 0 if isinstance(self._every, int) else step >= self._next

    def rewind(self) -> None:
        """Start measuring anew from the present step of the run."""
        self._next, self._last = self._progress.step + FIRST_STEPS, (self._progress.step, time.monotonic())

    def saved(self, step: int, stall_s: float) -> None:
        """Record how long training waited for a checkpoint. Collective with "auto"."""
        if self._every == "auto":
            self._next = step + from_first(lambda: self._distance(step, stall_s), self._group)

    def _distance(self, step: int, stall_s: float) -> int:
        now, (last_step, last_s) = time.monotonic(), self._last
        self._last = step, now
        self._stalls = [*self._stalls[-9:], stall_s]
        step_s = max(1e-6, (now - stall_s - last_s) / max(1, step - last_step))
        stall = sum(self._stalls) / len(self._stalls)
        failure_s = PRIOR_S if self._failures is None else self._failures.mean_time_to_failure_s
        return max(1, round(save_every_s(stall, failure_s) / step_s))


class Checkpoints:
    """Writes the checkpoints of a run, and restores one.

    Args:
        store: the store of the checkpoints.
        state: state of model and optimizer.
        saver: writes checkpoints; in the background if configured.
        interval: decides when a checkpoint is due.
    """

    def __init__(self, store: Store, state: TrainState, saver: Saver, interval: Interval) -> None:
        self._store, self._state, self._saver, self._interval = store, state, saver, interval

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        return self._interval.due(step)

    def known_good_up_to(self, step: int) -> None:
        """Record that the run is good up to `step`: the store keeps the newest checkpoint up to this step."""
        self._store.known_good_step = step

    def save(
        self, progress: Progress, data: Data, counters: Mapping[str, Stateful], rollbacks: int, begin_s: float
    ) -> None:
        """Write a checkpoint, or begin to. Collective.

        Args:
            progress: progress of the run.
            data: training data of the run.
            counters: guards and hooks whose counts are saved, by name.
            rollbacks: number of rollbacks of the run so far.
            begin_s: time at which training began to wait, by `time.monotonic`.

        Raises:
            CheckpointError: three saves in a row have failed.
        """
        meta = {
            "progress": progress.counts(),
            "data": data.loader.fingerprint_at(progress.samples),
            "counts": {name: plain(name, counter.state()) for name, counter in counters.items()},
            "rollbacks": rollbacks,
        }
        self._saver.save(progress.step, meta, data.loader.state())
        self._interval.saved(progress.step, time.monotonic() - begin_s)

    def restore(self, parts: Sequence[nn.Module], job: Job, step: int) -> Restored:
        """Restore model and optimizer from the newest checkpoint up to `step`; see `resume_or_start`."""
        return resume_or_start(self._store, self._state, parts, job, step)

    def rewind(self) -> None:
        """Start measuring anew after the run went back to an earlier step."""
        self._interval.rewind()

    def finish(self, progress: Progress) -> None:
        """Wait for the last save as training ends. Collective.

        Raises:
            CheckpointError: the run is complete, and its last step could not be saved.
        """
        self._saver.finish()
        if progress.complete and self.failed:
            raise CheckpointError(
                f"the run is complete and its last step, {progress.step}, is not saved (see above)"
            )

    @property
    def failed(self) -> bool:
        """Whether the last save failed."""
        return self._saver.failures > 0


Restored = tuple[Progress, str | None, dict[str, Any], Mapping[str, Any]]
"""See `resume_or_start`."""


def resume_or_start(
    store: Store, state: TrainState, parts: Sequence[nn.Module], job: Job, until: int | None = None
) -> Restored:
    """Load the newest intact checkpoint, or set initial weights if there is none. Collective.

    Args:
        store: the store of the checkpoints.
        state: state of model and optimizer, restored in place.
        parts: this rank's parts of the model.
        job: configuration of the run.
        until: the last step whose checkpoint may be loaded; default any.

    Returns:
        The progress of the run, the fingerprint of its data, the counts of its guards and hooks, and the
        plain values of all ranks, which include the positions in data that are read in order.
    """
    found = store.resume(state.targets, until)
    if found is None:
        set_initial_weights(parts, job)
        return Progress(until=job.train.steps), None, {}, {}
    state.restore(found.values)
    if until is None:
        store.tidy()  # `keep` may be lower now because the disk is full
    meta = found.meta
    counts = {name: restored(saved) for name, saved in meta.get("counts", {}).items()}
    return Progress(**meta["progress"], until=job.train.steps), meta["data"], counts, found.values


def plain(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of a guard or a hook to JSON without loss; `restored` is the inverse.

    Raises:
        ConfigError: JSON cannot represent the state.
    """
    try:
        return to_json(dict(state), "it")
    except (CheckpointError, TypeError) as error:
        raise ConfigError(f"{name}: state() returned what a checkpoint cannot hold: {error}") from None


def restored(saved: dict[str, Any]) -> dict[str, Any]:
    """Invert `plain`; JSON of an older version stays as it is."""
    return from_json(saved) if saved.keys() == {"dict"} else saved
