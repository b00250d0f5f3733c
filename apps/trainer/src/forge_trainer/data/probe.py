"""The sequences on which activations are measured: the same ones each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from forge_data.loading.batches import Batches
from forge_data.loading.loader import build_loader, build_set_loader
from forge_data.sources.config import FilesConfig
from msgspec.structs import replace
from torch import Tensor, nn

from forge_trainer.config.job import Job


class Alone:
    """A list of ready batches, each of one sequence."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return iter(self._batches)

    def first(self, count: int) -> Alone:
        """Return the first `count` batches."""
        return Alone(self._batches[:count])


MASK = "attention_mask"
"""The key of the mask of tokens that are no padding, for an extraction; the model does not need it."""

Probe = Sequence[Mapping[str, Tensor]] | Alone
"""The input of `forge_interp.extract_representations`: samples, or ready batches if their shapes differ."""


def probe_of(job: Job, samples: int, texts: Sequence[str] = ()) -> Probe:
    """Read evenly spaced sequences of the held-out text or of files.

    If sequences end in padding, each sample has a mask of its tokens (`MASK`).

    Args:
        job: configuration of data and model.
        samples: number of sequences; all, if there are fewer. With files, 0 means all.
        texts: files to read in place of the held-out text.

    Raises:
        DataError: there is no held-out text, or a file cannot be read.
    """
    if texts:
        data = replace(job.data, sources=[source.whole() for source in job.data.sources])
        sources = [FilesConfig(paths=list(texts))]
        loader = build_set_loader(data, sources, samples, micro_batch=1, items=job.model.items())
    else:
        data = replace(job.data, validation_samples=samples)
        loader = build_loader(data, "validation", micro_batch=1, items=job.model.items())
    loader.vocab_size = job.model.vocab_size
    batches = [dict(micro.inputs) for batch in loader for micro in batch]
    _mark_padding(batches, loader.batches)
    # sequences that have each a number of rows of their own are looked at one by one
    return Alone(batches) if loader.batches.side.ragged else [_only(one) for one in batches]


def _mark_padding(inputs: Sequence[dict[str, Tensor]], batches: Batches) -> None:
    """Add a mask [1, T] to each batch of one sequence, if any sequence has padding."""
    counts = [int(batches.token_counts(number)[0]) for number in range(len(inputs))]
    for of_one, count in zip(inputs, counts, strict=True):
        places = torch.arange(of_one["tokens"].shape[1])
        if min(counts) < len(places):
            of_one[MASK] = (places < count).long()[None]


def _only(sequence: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] for name, value in sequence.items()}


def forward(loss_fn: Any, device: torch.device, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """Run the forward pass of an evaluation with the loss function, which never holds all logits."""
    inputs = {name: value.to(device) for name, value in batch.items() if name != MASK}
    return model(**inputs, loss_fn=loss_fn)
