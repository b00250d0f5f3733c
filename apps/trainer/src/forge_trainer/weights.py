"""Where the tensors of a run come from and go to: initial values, weights from elsewhere, checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_ckpt.weights import Weights
from forge_model.compare import require_weights_of
from forge_model.hf import from_hf
from forge_model.init import initialize
from forge_parallel.apply import load_full
from forge_parallel.tensor import local_shard
from torch import Tensor, nn

from forge_trainer.job import Job
from forge_trainer.progress import Progress, Stateful


def set_initial_weights(parts: Sequence[nn.Module], job: Job) -> None:
    """Give every parameter a value: that of the seed, or that of `train.init_from`.

    Raises:
        ModelError: the weights are those of another model; lists every difference.
    """
    for part in parts:
        if job.train.init_from is None:
            initialize(part, job.job.seed, local_shard)
            continue
        weights = Weights(job.train.init_from)
        config = require_weights_of(job.model, weights.config(), job.train.init_from)
        theirs: Mapping[str, Tensor] = from_hf(weights, config)
        load_full(part, theirs)


def resume_or_start(
    store: Store, state: TrainState, parts: Sequence[nn.Module], job: Job
) -> tuple[Progress, str | None, dict[str, Any]]:
    """Load the newest intact checkpoint, or set initial weights where there is none. Collective.

    Returns:
        How far the run had come, the fingerprint of its data, and what its guards and hooks had counted.
    """
    found = store.resume(state.targets)
    if found is None:
        set_initial_weights(parts, job)
        return Progress(), None, {}
    state.restore(found.meta)
    return Progress(**found.meta["progress"]), found.meta["data"], found.meta.get("counts", {})


def saver(
    store: Store, state: TrainState, fingerprint: str, counters: Mapping[str, Stateful]
) -> Callable[[Progress], None]:
    """A function that saves; what `counters` holds by then is saved with the tensors."""

    def save(progress: Progress) -> None:
        counts = {name: counter.state() for name, counter in counters.items()}
        meta = {"progress": asdict(progress), "data": fingerprint, "counts": counts}
        snapshot = state.capture(meta, copy=False)  # training waits until it is written
        store.save(progress.step, snapshot.tensors, snapshot.meta)

    return save
