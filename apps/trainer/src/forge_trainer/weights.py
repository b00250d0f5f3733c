"""Where the tensors of a run come from and go to: initial values, weights from elsewhere, checkpoints."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forge_ckpt.error import CheckpointError
from forge_ckpt.saver import Saver
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_ckpt.weights import Weights
from forge_data.loader import Loader
from forge_model.hf import Renamed, from_hf
from forge_model.hf_config import require_weights_of
from forge_model.init import initialize
from forge_parallel.apply import load_full
from forge_parallel.tensor import local_shard
from forge_resilience.verdict import Verdict
from torch import Tensor, nn

from forge_trainer.job import Job
from forge_trainer.progress import Progress, Stateful


def set_initial_weights(parts: Sequence[nn.Module], job: Job) -> None:
    """Give every parameter a value: that of the seed, or that of `train.init_from`.

    Args:
        parts: of the model, those that this rank holds; each takes the tensors of its names.
        job: of the run.

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
        load_full(part, _of_part(theirs, part))


def _of_part(tensors: Mapping[str, Tensor], part: nn.Module) -> Mapping[str, Tensor]:
    """Those tensors that a part of the model has; each is still read when it is taken out."""
    own = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
    names = {name for name, _ in own}
    return Renamed(tensors, {name: name for name in tensors if name in names})


def resume_or_start(
    store: Store, state: TrainState, parts: Sequence[nn.Module], job: Job, until: int | None = None
) -> tuple[Progress, str | None, dict[str, Any], Mapping[str, Any]]:
    """Load the newest intact checkpoint, or set initial weights where there is none. Collective.

    Args:
        store: the checkpoints.
        state: into which they are loaded.
        parts: of the model, those that this rank holds.
        job: of the run.
        until: checkpoints of later steps are passed by.

    Returns:
        How far the run had come, the fingerprint of its data, what its guards and hooks had counted, and the
        plain values of all ranks, among them the places in data that are read in order.
    """
    found = store.resume(state.targets, until)
    if found is None:
        set_initial_weights(parts, job)
        return Progress(), None, {}, {}
    state.restore(found.values)
    meta = found.meta
    return Progress(**meta["progress"]), meta["data"], meta.get("counts", {}), found.values


class SaveRun:
    """Saves the run; called after a step.

    Args:
        saver: writes.
        loader: what is trained on now.
        counters: what they hold when a save begins is saved with the tensors.
        rollbacks: those of the run so far; grows.
        unfit: what follows if the state is not to be saved, the same on all ranks. Collective.
        saved: told the step of a save, and for how many seconds training has waited. Collective.
    """

    def __init__(
        self,
        saver: Saver,
        loader: Callable[[], Loader],
        counters: Mapping[str, Stateful],
        rollbacks: Sequence[Any],
        unfit: Callable[[int], Verdict],
        saved: Callable[[int, float], None],
    ) -> None:
        self._saver, self._loader, self._counters = saver, loader, counters
        self._rollbacks, self._unfit, self._saved = rollbacks, unfit, saved

    def __call__(self, progress: Progress) -> Verdict:
        """Save, or begin to; what follows if the state is not worth it, else CONTINUE. Collective.

        Raises:
            CheckpointError: three saves in a row have failed.
        """
        begin = time.monotonic()
        if (verdict := self._unfit(progress.step)) is not Verdict.CONTINUE:
            return verdict
        counts = {name: counter.state() for name, counter in self._counters.items()}
        named = self._loader().fingerprint_at(progress.samples)
        meta = {
            "progress": asdict(progress),
            "data": named,
            "counts": counts,
            "rollbacks": len(self._rollbacks),
        }
        places = self._loader().state()
        self._saver.save(progress.step, meta, places)
        self._saved(progress.step, time.monotonic() - begin)
        return Verdict.CONTINUE

    def finish(self, step: int, until: int) -> None:
        """Wait for the last save as training ends. Collective.

        Raises:
            CheckpointError: the run is complete, and its last step could not be saved.
        """
        self._saver.finish()
        if step >= until and self._saver.failures:
            raise CheckpointError(f"the run is complete and its last step, {step}, is not saved (see above)")

    @property
    def failed(self) -> bool:
        """Whether the last save failed."""
        return self._saver.failures > 0
