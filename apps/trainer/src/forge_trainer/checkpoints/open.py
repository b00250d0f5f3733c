"""Opens the checkpoint store of a run, and the saver that writes in the background."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from forge_ckpt.saver import Saver
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_parallel.capabilities import host_group
from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_shard
from forge_resilience.deadline import SAVE, Deadline

from forge_trainer.clock import BETWEEN, BUILD, Clock
from forge_trainer.config.job import Job
from forge_trainer.run_dir.files import RunFiles


def open_store(job: Job, mesh: Mesh, epoch: int | None = None) -> Store:
    """Open the store of a run with a separate process group, for writing in the background. Collective."""
    config, files = job.checkpoint, RunFiles(job.job.directory)
    group = host_group() if mesh.control_group is not None else None
    return Store(
        files.checkpoints,
        config.keep,
        config.keep_every_steps,
        group,
        partial(local_shard, mesh=mesh),
        files.lease,
        files.progress_marks,
        epoch,
        config.is_dense,
    )


def open_saver(
    job: Job, store: Store, state: TrainState, deadline: Deadline, clock: Clock, stack: ExitStack
) -> Saver:
    """Open the saver; the deadline learns the times of saves and all that the clock measures."""

    def spent(name: str, seconds: float) -> None:
        if name not in (BUILD, BETWEEN):
            deadline.observe(name, seconds)

    def waited(seconds: float) -> None:
        deadline.observe(SAVE, 2 * seconds)  # at a stop, one save may be in flight and the last one follows

    clock.listeners.append(spent)
    saver = Saver(store, state, job.checkpoint.asynchronous, waited)
    stack.callback(saver.close)
    return saver
