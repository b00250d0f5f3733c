"""Opens the evaluation data of a run: its held-out text and the sets of `[eval.sets]`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from forge_data.error import NothingHeldOutError
from forge_data.loading.loader import Loader, build_loader, build_set_loader
from forge_parallel.mesh import Mesh

from forge_trainer.config.job import Job
from forge_trainer.ranks import keep_in_touch


class Evaluations(NamedTuple):
    """The evaluation data of a run.

    Attributes:
        sets: loaders by the name of the set; the held-out text, if any, comes first and has an empty name.
        lacks: messages about sources with too few documents for held-out text.
    """

    sets: dict[str, Loader]
    lacks: tuple[str, ...]


def open_evaluations(job: Job, mesh: Mesh, on_progress: Callable[[], None] = lambda: None) -> Evaluations:
    """Open the held-out text and the sets of `[eval.sets]`. Collective.

    Args:
        job: the configuration.
        mesh: the grid of ranks.
        on_progress: called while text is tokenized.

    Raises:
        DataError: data are missing.
    """
    portion: dict[str, Any] = {
        "rank": mesh.batch.rank,
        "world_size": mesh.batch.size,
        "micro_batch": job.train.micro_batch,
        "items": job.model.items(),
    }

    def open_all(count: Callable[[], None]) -> Evaluations:
        def report(done: int, total: int) -> None:
            count()

        found, lacks = dict[str, Loader](), tuple[str, ...]()
        if job.data.has_validation():
            try:
                found[""] = build_loader(job.data, "validation", on_progress=report, **portion)
                lacks = found[""].lacks
            except NothingHeldOutError as error:
                lacks = (str(error),)
        for name, of_set in job.eval.sets.items():
            found[name] = build_set_loader(
                job.data, of_set.sources, of_set.samples, on_progress=report, **portion
            )
        for loader in found.values():
            loader.vocab_size = job.model.vocab_size
            loader.pinned = mesh.device.type == "cuda"
        return Evaluations(found, lacks)

    return keep_in_touch(open_all, mesh.control_group, on_progress)
