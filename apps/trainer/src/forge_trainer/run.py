"""A run: a few parts; no part is replaced once it is built."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from forge_parallel.apply import reshard
from forge_parallel.env import Env
from forge_parallel.mesh import Mesh
from forge_resilience.verdict import Verdict, agree
from torch import nn
from torch.optim import Optimizer

from forge_trainer.checkpoints.checkpoints import Checkpoints
from forge_trainer.clock import Clock
from forge_trainer.config.job import Job
from forge_trainer.console import emit
from forge_trainer.data.data import Data
from forge_trainer.guards.guards import Guard
from forge_trainer.hooks import Hook
from forge_trainer.hooks.log import Log
from forge_trainer.loop import train
from forge_trainer.progress import Progress, Stateful
from forge_trainer.recovery.incidents import note_incident
from forge_trainer.recovery.recovery import Recovery
from forge_trainer.steps.base import Step
from forge_trainer.steps.repeated import Repeated, meaning_of_repetition
from forge_trainer.track import Tracker
from forge_trainer.track.numbers import numbers
from forge_trainer.track.open import open_trackers


@dataclass
class Run:
    """All parts of a run; hooks see it as a `RunView`.

    Attributes:
        job: the configuration.
        env: rank, world size and device of this process.
        mesh: the grid of ranks.
        parts: this rank's parts of the model, sharded and with their values.
        optimizer: the optimizer of the parts.
        step: trains on a batch, and evaluates.
        progress: the counts of steps, samples and tokens.
        data: the training and held-out data.
        guards: observers that may stop the run.
        recovery: decides where the run goes back to after trouble.
        checkpoints: writes checkpoints, and restores one.
        trackers: destinations of metrics; empty on all ranks but the first.
        clock: measures where the time goes.
        stack: closes at its end all that the run opened.
        hooks: observers of the run.
    """

    job: Job
    env: Env
    mesh: Mesh
    parts: list[nn.Module]
    optimizer: Optimizer
    step: Step
    progress: Progress
    data: Data
    guards: list[Guard]
    recovery: Recovery
    checkpoints: Checkpoints
    trackers: list[Tracker]
    clock: Clock
    stack: ExitStack
    hooks: list[Hook] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.job.job.directory

    def train(self) -> Verdict:
        """Train to the end, or until a guard stops the run; roll back after trouble. Collective."""
        self._notify(lambda hook: hook.on_start(self.progress))
        if self.progress.step == 0 and self.job.checkpoint.keep_initial:
            with self.clock.span("save"):
                self.save()
        while (verdict := self._train()) is Verdict.ROLLBACK:
            with self.clock.span("rollback"):
                if not self.go_back():
                    verdict = Verdict.ABORT
                    break
        if verdict is Verdict.SAVE:  # of its last step: it is complete
            verdict = Verdict.CONTINUE
        self._notify(lambda hook: hook.on_end(self.progress, verdict))
        return verdict

    def log(self, values: Mapping[str, Any]) -> None:
        """See `RunView.log`."""
        if self.trackers:
            at = {"step": self.progress.step, "tokens": self.progress.tokens}
            record = numbers(values) | at
            for tracker in self.trackers:
                tracker.log(record)

    def save(self) -> Verdict:
        """Write a checkpoint, or begin to; return CONTINUE, or a guard's verdict on a bad state. Collective.

        Raises:
            CheckpointError: three saves in a row have failed.
        """
        begin_s, step = time.monotonic(), self.progress.step
        suspects = max(guard.suspect_steps() for guard in self.guards)
        self.checkpoints.known_good_up_to(step - suspects - self.job.resilience.rollback_margin_steps)
        for guard in self.guards:
            if (verdict := guard.before_save(self.progress)) is not Verdict.CONTINUE:
                return verdict
        for hook in self.hooks:
            hook.on_save(self.progress)
        taken = len(self.recovery.taken)
        self.checkpoints.save(self.progress, self.data, self.counters(), taken, begin_s)
        return Verdict.CONTINUE

    def counters(self) -> dict[str, Stateful]:
        """Return the parts whose counts a checkpoint keeps, by name."""
        found: dict[str, Any] = {guard.name: guard for guard in self.guards if guard.name}
        found |= {hook.span: hook for hook in self.hooks if isinstance(hook, Log)}
        found |= {f"hooks.{hook.name}": hook for hook in self.hooks if hook.name}
        found["step"] = self.step
        return {name: one for name, one in found.items() if isinstance(one, Stateful)}

    def load_counts(self, counts: Mapping[str, Any]) -> None:
        """Restore all counts of a checkpoint; parts that it does not contain start anew."""
        for name, counter in self.counters().items():
            if name in counts:
                counter.load_state(counts[name])

    def go_back(self) -> bool:
        """Roll back to a checkpoint from before the trouble; return False if there is none. Collective."""
        at, made = self.progress.step, self.recovery.begin()
        if made is None:
            return False
        self.data.close()
        for part in self.parts:
            reshard(part)
        self.optimizer.state.clear()
        found, fingerprint, counts, places = self.checkpoints.restore(self.parts, self.job, made.to)
        self.progress.become(found)
        self.load_counts(counts)
        self.data.open(self.recovery.data(self.job.data), fingerprint, places)
        self.checkpoints.rewind()
        for one in (*self.guards, *self.hooks):
            one.rewind(self.progress)
        for tracker in self.trackers:
            tracker.close()
        if self.trackers:
            self.trackers[:] = open_trackers(self.job, self.progress, self.stack)
        if self.env.rank == 0:
            left = "".join(f", without the data of {skip}" for skip in made.skipped())
            emit(f"step {at}: {made.why}: back to the checkpoint of step {found.step}{left}\n", sys.stderr)
        return True

    def _train(self) -> Verdict:
        config = self.job.resilience
        repeated = Repeated(self.step, config.check_every_steps, self._report_repetition)
        verdict = train(
            repeated if config.repeat_bad_steps else self.step,
            self.data.batches(),
            self.progress,
            self.guards,
            self.hooks,
            self.checkpoints.due,
            partial(agree, group=self.mesh.control_group),
            self.save,
            self.clock,
        )
        with self.clock.span("save"):
            self.checkpoints.finish(self.progress)
        return verdict

    def _notify(self, what: Callable[[Hook], None]) -> None:
        with self.clock.span(Hook.span):
            for hook in self.hooks:
                what(hook)

    def _report_repetition(self, step: int, finite: bool) -> None:
        """Log on the first rank what the repetition of a step showed."""
        if self.env.rank == 0:
            exact = self.job.job.deterministic or self.mesh.device.type == "cpu"
            means = meaning_of_repetition(finite, exact)
            emit(f"step {step} was not finite, was repeated from the same inputs and {means}\n", sys.stderr)
            note_incident(self.directory, "repeated", {"step": step, "finite": finite, "exact": exact})
