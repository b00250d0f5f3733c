"""Takes a run in this process back to a checkpoint, to be what a start from it would be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import Loader, build_loader
from forge_data.packing.build import pin_streams
from forge_parallel.apply import reshard
from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_part
from forge_resilience.verdict import Verdict, agree
from torch.optim import Optimizer

from forge_trainer.hooks.copies import CompareCopies
from forge_trainer.job import Job
from forge_trainer.ladder import Ladder
from forge_trainer.progress import Progress, Stateful
from forge_trainer.ranks import from_first, keep_in_touch
from forge_trainer.rollback import Rollbacks
from forge_trainer.saves import Saves
from forge_trainer.say import say
from forge_trainer.steps.update import Update
from forge_trainer.track.open import open_trackers
from forge_trainer.weights import resume_or_start

if TYPE_CHECKING:
    from forge_trainer.build import Run


def open_data(
    job: Job,
    mesh: Mesh,
    rollbacks: Rollbacks,
    progress: Progress,
    fingerprint: str | None,
    places: Mapping[str, Any],
    got_on: Callable[[], None] = lambda: None,
) -> Loader:
    """What is trained on from now on. Collective.

    Args:
        job: the configuration.
        mesh: the grid of ranks.
        rollbacks: of the run.
        progress: how far it has come.
        fingerprint: of the data so far.
        places: where streams go on.
        got_on: called now and then while text is tokenized.

    Raises:
        DataError: it is not what the run was trained on so far.
    """
    sizes = job.batch_sizes
    data = sizes.counted_in_items(rollbacks.data(job.data))
    pins = _pinned(data, mesh, places)
    loader = keep_in_touch(
        lambda count: build_loader(
            data,
            "train",
            rank=mesh.batch.rank,
            world_size=mesh.batch.size,
            micro_batch=job.train.micro_batch,
            global_batch=sizes.unit,
            first_sample=progress.samples,
            steps=sizes.items(job.train.steps),
            state={**places, **pins},
            items=job.model.items(),
            on_progress=lambda done, total: count(),
        ),
        mesh.control_group,
        got_on,
    )
    loader.vocab_size = job.model.vocab_size
    loader.pinned = mesh.device.type == "cuda"
    loader.require(fingerprint, progress.samples)
    if loader.last_step is not None:
        loader.last_step = sizes.whole_steps(loader.last_step)
    return loader


def _pinned(data: DataConfig, mesh: Mesh, places: Mapping[str, Any]) -> dict[str, str]:
    """Which versions are streamed: those of the checkpoint, or what the first rank finds."""

    def pin() -> dict[str, str] | DataError:
        try:
            return pin_streams(data, places)
        except DataError as error:
            return error

    found = from_first(pin, mesh.control_group)
    if isinstance(found, DataError):
        raise found
    return found


@dataclass
class GoBack:
    """Takes a run back to before its trouble. Collective.

    Attributes:
        rollbacks: of the run.
        store: its checkpoints.
        state: model and optimizer.
        update: is told of another learning rate, where the data now end earlier.
        saves: when a checkpoint is due.
        counters: get back what they had counted.
        stack: closes what is opened.
    """

    rollbacks: Rollbacks
    store: Store
    state: TrainState
    update: Update
    saves: Saves
    counters: Mapping[str, Stateful]
    stack: ExitStack

    def __call__(self, run: Run) -> bool:
        """Do it; False where no checkpoint is from before the trouble."""
        trouble = run.ladder.trouble
        assert trouble is not None
        made = self.rollbacks.begin(trouble, run.job.resilience.rollback_margin_steps)
        if made is None:
            why = f"{trouble.why}; there is no checkpoint from before it to go back to"
            run.ladder.trouble = replace(trouble, why=why)
            return False
        run.ladder.trouble = None
        at = run.progress.step
        run.loader.close()
        for part in run.parts:
            reshard(part)
        self.update.optimizer.state.clear()
        found, fingerprint, counts, places = resume_or_start(
            self.store, self.state, run.parts, run.job, made.to
        )
        run.progress.become(found)
        for name in self.counters.keys() & counts.keys():
            self.counters[name].load_state(counts[name])
        run.loader = open_data(run.job, run.mesh, self.rollbacks, found, fingerprint, places)
        self.stack.callback(run.loader.close)
        run.job = run.job.ending_at(run.loader.last_step)
        self.update.lr_factor = run.job.lr_factor
        self.saves.rewind(found.step)
        for hook in run.hooks:
            hook.rewind(run.progress)
        if run.trackers:
            for tracker in run.trackers:
                tracker.close()
            run.trackers[:] = open_trackers(run.job, found.step, self.stack)
        if run.env.rank == 0:
            left = "".join(f", without the data of {skip}" for skip in made.skipped())
            say(f"step {at}: {made.why}: back to the checkpoint of step {found.step}{left}\n", sys.stderr)
        return True


@dataclass
class Unfit:
    """Says what follows if the state is not worth a checkpoint. Collective.

    Attributes:
        store: is told which checkpoint to keep, for it may be needed.
        ladder: knows since when something may be wrong.
        optimizer: of the parameters that are looked at.
        mesh: the grid of ranks.
        copies: compares copies of the weights, where there are any.
    """

    store: Store
    ladder: Ladder
    optimizer: Optimizer
    mesh: Mesh
    copies: CompareCopies | None

    def __call__(self, step: int) -> Verdict:
        """CONTINUE if every parameter is finite, and all copies are the same. Waits for the device."""
        self.store.sound = self.ladder.sound(step)
        mine = Verdict.CONTINUE if self._all_finite() else Verdict.ABORT
        if agree(mine, self.mesh.control_group) is not Verdict.CONTINUE:
            return self.ladder.not_finite(step)
        if self.copies is not None and not self.copies.compare(step):
            return self.ladder.verdict(step)
        return Verdict.CONTINUE

    @torch.no_grad()
    def _all_finite(self) -> bool:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = [torch.isfinite(local_part(p)).all() for p in parameters]
        return not found or bool(torch.stack(found).all())
