"""Does a sample have the same rows alone as beside longer ones?

That a model accepts a mask does not say that it uses it: a sample runs alone and without padding, and its
rows are compared with those that it has in its batch. Letters: T tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError
from forge_interp.extraction.samples import Batch, Names

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_NARROW_TOLERANCE = 3e-2  # of 16 bits and fewer


@dataclass(frozen=True)
class Alone:
    """A sample of a batch without the padding that it has there, and its rows."""

    sample: Batch
    keep: Tensor  # [T] bool, which places of the batch are no padding of it
    rows: Mapping[str, Tensor]  # [R, ...] by site

    def compare(self, site: str, padded: Tensor) -> None:
        """Raise InterpError where rows [R, ...] of the sample in its batch are others than alone."""
        alone = self.rows[site]
        worst = _difference(alone, _without_padding(padded, self.keep, alone.shape))
        if worst <= _TOLERANCES.get(alone.dtype, _NARROW_TOLERANCE):
            return
        raise InterpError(
            f"sample {self.sample.first} has at {site} other rows alone than beside longer samples, by "
            f"{worst:.2g} of their size; expected rows that do not depend on padding: the model does not use "
            "the mask, or not everywhere: give samples of one length, batch_size=1, or a forward= that masks"
        )


def unpadded(batch: Batch, names: Names) -> tuple[Batch, Tensor] | None:
    """The shortest sample with padding as a batch of its own without, and which places [T] are its tokens.

    None where there is no such sample, or it is not clear how to cut it out.
    """
    if batch.mask is None:
        return None
    counts = batch.mask.sum(1)
    one = int(counts.where(counts > 0, counts.max()).argmin())
    keep = batch.mask[one]
    cut = batch.cut(one, one + 1)
    if cut is None or not 0 < int(counts[one]) < len(keep):
        return None
    inputs = {key: _trimmed(key, value, cut, names, len(keep)) for key, value in cut.items()}
    return Batch.of(inputs, names, batch.number, batch.first + one), keep


def _trimmed(key: str, value: Any, inputs: Mapping[str, Any], names: Names, longest: int) -> Any:
    """An entry [1, T] or [1, T, D] without its padding, by the mask of the ids that its name begins like."""
    if not isinstance(value, Tensor) or value.ndim not in (2, 3) or value.shape[1] != longest:
        return value
    assert names.mask is not None  # or the batch would have none
    of = {ending: _beginnings(inputs, ending) for ending in ("attention_mask", "input_ids")}
    masks = of["attention_mask"] | {
        next(iter(_beginnings([names.tokens or ""], "input_ids")), ""): names.mask
    }
    prefix = max((p for p in {**of["input_ids"], **masks} if key.startswith(p)), key=len, default=None)
    if prefix not in masks or len(keep := inputs[masks[prefix]][0].bool()) != longest:
        return value
    return value[:, keep.to(value.device)]


def _beginnings(names: Iterable[str], ending: str) -> dict[str, str]:
    """What stands in front of an ending, `decoder_` or nothing, and the whole name."""
    return {name.removesuffix(ending): name for name in names if name.endswith(ending)}


def _without_padding(rows: Tensor, keep: Tensor, shape: torch.Size) -> Tensor:
    """Rows whose features are positions, such as attention keys, without padding positions."""
    for dim in range(1, rows.ndim):
        if rows.shape[dim] == len(keep) and shape[dim] == int(keep.sum()):
            rows = rows.index_select(dim, keep.nonzero()[:, 0])
    return rows


def _difference(alone: Tensor, padded: Tensor) -> float:
    """Of the row that differs most the root mean square, beside the largest number of each feature.

    A feature that is small everywhere is compared with a usual one.
    """
    if alone.shape != padded.shape:
        return float("inf")
    if not alone.numel():
        return 0.0
    wide = torch.float64 if alone.dtype == torch.float64 else torch.float32
    first, second = alone.to(wide).flatten(1), padded.to(wide).flatten(1)
    same = (first == second) | (first.isnan() & second.isnan())
    size = first.nan_to_num(0, 0, 0).abs().amax(0)
    size = torch.maximum(size, size.median()).clamp_min(torch.finfo(wide).tiny)
    error = ((first - second) / size).masked_fill(same, 0).nan_to_num(torch.inf, torch.inf, torch.inf)
    return float(error.square().mean(1).sqrt().max())
