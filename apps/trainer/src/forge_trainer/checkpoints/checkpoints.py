"""The checkpoints of a run: at which steps one is due, writing one, and going back to one."""

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
"""With "auto", the first checkpoint of a start comes after so many steps: until then nothing is measured."""


class Failures(Protocol):
    """Knows how often a run fails; a `Ledger` does."""

    @property
    def mean_time_to_failure_s(self) -> float: ...  # noqa: D102


class Interval:
    """Every N steps, or as often as it is worth it; and at the end. All ranks hold the same.

    Args:
        config: says how far apart checkpoints are; milestones and dense windows are due as well.
        progress: of the run.
        group: of all ranks, on the CPU.
        failures: of the run, asked on the first rank; None where nothing is known of them.
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
        """Whether a checkpoint is due after so many steps."""
        if step == self._progress.until or self._is_dense(step):
            return True
        if self._milestones and step % self._milestones == 0:
            return True
        return step % self._every == 0 if isinstance(self._every, int) else step >= self._next

    def rewind(self) -> None:
        """Begin to measure where the run is."""
        self._next, self._last = self._progress.step + FIRST_STEPS, (self._progress.step, time.monotonic())

    def saved(self, step: int, stall_s: float) -> None:
        """Learn how long training has waited for a checkpoint. Collective with "auto"."""
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
    """Writes the checkpoints of a run, and brings it back to one.

    Args:
        store: where they are.
        state: model and optimizer.
        saver: writes them, beside training if it may.
        interval: says when one is due.
    """

    def __init__(self, store: Store, state: TrainState, saver: Saver, interval: Interval) -> None:
        self._store, self._state, self._saver, self._interval = store, state, saver, interval

    def due(self, step: int) -> bool:
        """Whether one is due after so many steps."""
        return self._interval.due(step)

    def known_good_up_to(self, step: int) -> None:
        """Tell that so many steps are known to be good: an older checkpoint may be needed until then."""
        self._store.known_good_step = step

    def save(
        self, progress: Progress, data: Data, counters: Mapping[str, Stateful], rollbacks: int, begin_s: float
    ) -> None:
        """Write one, or begin to. Collective.

        Args:
            progress: how far the run has come.
            data: that it is trained on.
            counters: guards and hooks whose counts are kept, by name.
            rollbacks: of the run so far.
            begin_s: since when training waits, by `time.monotonic`.

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
        """Bring model and optimizer back to where they were after so many steps; see `resume_or_start`."""
        return resume_or_start(self._store, self._state, parts, job, step)

    def rewind(self) -> None:
        """The run goes on from an earlier step."""
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
    """Load the newest intact checkpoint, or set initial weights where there is none. Collective.

    Args:
        store: the checkpoints.
        state: into which they are loaded.
        parts: of the model, the ones that this rank holds.
        job: of the run.
        until: checkpoints of later steps are passed by.

    Returns:
        How far the run had come, the fingerprint of its data, what its guards and hooks had counted, and the
        plain values of all ranks, among them the places in data that are read in order.
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
    """The state of a guard or a hook, as JSON that comes back exactly; `restored` is the inverse.

    Raises:
        ConfigError: JSON cannot hold it.
    """
    try:
        return to_json(dict(state), "it")
    except (CheckpointError, TypeError) as error:
        raise ConfigError(f"{name}: state() returned what a checkpoint cannot hold: {error}") from None


def restored(saved: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `plain`; JSON of an older version stays as it is."""
    return from_json(saved) if saved.keys() == {"dict"} else saved
