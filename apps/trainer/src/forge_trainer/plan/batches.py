"""Makes the batch of a rank in a step, as tensors without values. B sequences, T tokens."""

from __future__ import annotations

from typing import Any

import torch
from forge_data.loading.micro_batch import MicroBatch
from torch import Tensor

from forge_trainer.config.job import Job


def batch_on_paper(job: Job, count: int) -> list[MicroBatch]:
    """Return `count` micro-batches of full sequences, as from the loader. Call it in a fake-tensor mode."""
    return [_micro_batch(job) for _ in range(count)]


def _micro_batch(job: Job) -> MicroBatch:
    shape = (job.train.micro_batch, job.data.max_tokens)

    def numbers(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int64)

    # targets are the tokens, one further on: both are views of the same rows
    rows = numbers(shape[0], shape[1] + 1)
    inputs: dict[str, Any] = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    if job.data.mask_documents:
        inputs |= {"doc_ids": numbers(*shape), "positions": numbers(*shape)}
    statistics = {"source": numbers(shape[0]), "targets": numbers()}
    sources = tuple(job.data.source_names())
    items = job.model.items()
    if items is None:
        return MicroBatch(inputs, statistics, sources)
    from forge_trainer.plan.images import inputs_of_images

    return MicroBatch(inputs | inputs_of_images(job, items), statistics, sources, frozenset(items.host))
