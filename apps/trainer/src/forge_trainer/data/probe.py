"""The sequences on which activations are looked at: the same ones whenever they are."""

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
    """Ready batches of a sequence each."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return iter(self._batches)

    def first(self, count: int) -> Alone:
        """The first ones."""
        return Alone(self._batches[:count])


MASK = "attention_mask"
"""Tells an extraction which tokens are no padding; the model is not given it, for padding is behind them."""

Probe = Sequence[Mapping[str, Tensor]] | Alone
"""What `forge_interp.extract_representations` takes: samples, or ready batches where they differ in shape."""


def probe_of(job: Job, samples: int, texts: Sequence[str] = ()) -> Probe:
    """Take sequences evenly spaced from the held-out text or from files.

    Where sequences end in padding, each sample has a mask of its tokens (`MASK`).

    Args:
        job: says data and model.
        samples: how many; all, if there are fewer. Of files 0 means all.
        texts: files to be read in place of the held-out text.

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
    """Give batches of a sequence each a mask [1, T], if any of them has padding."""
    counts = [int(batches.token_counts(number)[0]) for number in range(len(inputs))]
    for of_one, count in zip(inputs, counts, strict=True):
        places = torch.arange(of_one["tokens"].shape[1])
        if min(counts) < len(places):
            of_one[MASK] = (places < count).long()[None]


def _only(sequence: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] for name, value in sequence.items()}


def forward(loss_fn: Any, device: torch.device, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """The pass of an evaluation: the loss never holds all logits."""
    inputs = {name: value.to(device) for name, value in batch.items() if name != MASK}
    return model(**inputs, loss_fn=loss_fn)
