"""The training data of a run: opened at its start, and again after a rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import Loader, build_loader
from forge_data.packing.build import pin_streams
from forge_parallel.mesh import Mesh

from forge_trainer.config.job import Job
from forge_trainer.progress import Progress
from forge_trainer.ranks import from_first, keep_in_touch
from forge_trainer.steps.base import Batch


def nothing() -> None:
    """Ignore progress."""


class Data:
    """The training data of a run. Nothing can be read before `open`.

    Args:
        job: the configuration.
        mesh: the grid of ranks.
        progress: progress of the run; `open` sets its last step if the data end earlier.
        stack: closes the data at its end.

    Attributes:
        loader: reads this rank's part of each global batch.
    """

    loader: Loader

    def __init__(self, job: Job, mesh: Mesh, progress: Progress, stack: ExitStack) -> None:
        self._job, self._mesh, self._progress = job, mesh, progress
        self._is_open = False
        stack.callback(self.close)

    def open(
        self,
        config: DataConfig,
        fingerprint: str | None,
        places: Mapping[str, Any],
        on_progress: Callable[[], None] = nothing,
    ) -> None:
        """Open the training data, in place of the data opened before. Collective.

        Args:
            config: the section `[data]`.
            fingerprint: fingerprint of the data so far.
            places: positions at which streams continue.
            on_progress: called regularly while text is tokenized.

        Raises:
            DataError: the data differ from the data that the run was trained on so far.
        """
        self.close()
        job, mesh, sizes = self._job, self._mesh, self._job.batch_sizes
        data = sizes.counted_in_items(config)
        pins = _pinned(data, mesh, places)
        loader = keep_in_touch(
            lambda count: build_loader(
                data,
                "train",
                rank=mesh.batch.rank,
                world_size=mesh.batch.size,
                micro_batch=job.train.micro_batch,
                global_batch=sizes.unit,
                first_sample=self._progress.samples,
                steps=sizes.items(job.train.steps),
                state={**places, **pins},
                items=job.model.items(),
                on_progress=lambda done, total: count(),
            ),
            mesh.control_group,
            on_progress,
        )
        self.loader, self._is_open = loader, True
        loader.vocab_size = job.model.vocab_size
        loader.pinned = mesh.device.type == "cuda"
        loader.require(fingerprint, self._progress.samples)
        if loader.last_step is not None:
            loader.last_step = sizes.whole_steps(loader.last_step)
        ends = job.train.steps if loader.last_step is None else loader.last_step
        self._progress.until = min(job.train.steps, ends)

    def batches(self) -> Iterator[Batch]:
        """Iterate over this rank's part of each global batch, from the present step of the run on."""
        return self._job.batch_sizes.of_steps(self.loader, self._progress.step)

    def tokens_read(self, samples: int) -> dict[str, int]:
        """Return the tokens of each source in the first `samples` samples."""
        return self.loader.tokens_read(samples)

    def close(self) -> None:
        """Close the data, if open."""
        if self._is_open:
            self._is_open = False
            self.loader.close()


def _pinned(data: DataConfig, mesh: Mesh, places: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of streamed data: from the checkpoint, or looked up by the first rank."""

    def pin() -> dict[str, str] | DataError:
        try:
            return pin_streams(data, places)
        except DataError as error:
            return error

    found = from_first(pin, mesh.control_group)
    if isinstance(found, DataError):
        raise found
    return found
