"""Where the tensors of a run come from and go to: initial values, weights from elsewhere, checkpoints."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_ckpt.weights import Weights
from forge_model.hf import config_from_hf, from_hf
from forge_model.init import initialize
from forge_parallel.apply import load_full
from forge_parallel.tensor import local_shard
from forge_resilience.deadline import Deadline
from torch import Tensor, nn

from forge_trainer.clock import Clock
from forge_trainer.job import Job
from forge_trainer.progress import Progress


def fill(model: nn.Module, job: Job) -> None:
    """Give every parameter a value: that of the seed, or that of `train.init_from`.

    Raises:
        ModelError: the weights are those of another model.
    """
    if job.train.init_from is None:
        initialize(model, job.job.seed, local_shard)
        return
    weights = Weights(job.train.init_from)
    theirs: Mapping[str, Tensor] = from_hf(weights, config_from_hf(weights.config()))
    load_full(model, theirs)


def resume(store: Store, state: TrainState) -> tuple[Progress, str | None]:
    """Load the newest intact checkpoint, if there is one. Collective.

    Returns:
        How far the run had come, and the fingerprint of its data.
    """
    found = store.resume(state.targets)
    if found is None:
        return Progress(), None
    return Progress(**found.meta["progress"]), found.meta["data"]


def saver(
    store: Store, state: TrainState, fingerprint: str, clock: Clock, deadline: Deadline
) -> Callable[[Progress], None]:
    """A function that saves, and teaches the deadline how long that takes."""

    def save(progress: Progress) -> None:
        start = time.monotonic()
        with clock.paused():
            store.save(progress.step, state.tensors(), {"progress": asdict(progress), "data": fingerprint})
        deadline.saved(time.monotonic() - start)

    return save
