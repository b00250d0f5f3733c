"""Does a sample have the same rows alone as in a batch with longer samples?

A model may accept a mask and not use it. So a sample runs alone and without padding, and its rows are
compared with its rows in the batch. Letters: T tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """A sample of a batch without its padding, and the rows of that sample."""

    sample: Batch
    keep: Tensor  # [T] bool, which places of the batch are no padding of it
    rows: Mapping[str, Tensor]  # [R, ...] by site

    def compare(self, site: str, padded: Tensor) -> None:
        """Raise InterpError where rows [R, ...] of the sample in its batch differ from its rows alone."""
        alone = self.rows[site]
        for dim in range(1, padded.ndim):  # features may be positions, such as keys of attention
            if padded.shape[dim] == len(self.keep) and alone.shape[dim] == int(self.keep.sum()):
                padded = padded.index_select(dim, self.keep.nonzero()[:, 0])
        worst = _difference(alone, padded)
        if worst > _TOLERANCES.get(alone.dtype, _NARROW_TOLERANCE):
            raise InterpError(
                f"sample {self.sample.first} has at {site} other rows alone than beside longer samples, by "
                f"{worst:.2g} of their size; expected rows that do not depend on padding: the model does not "
                "use the mask, or not everywhere: give samples of one length, batch_size=1, or a forward= "
                "that masks"
            )


def unpadded(batch: Batch, names: Names) -> tuple[Batch, Tensor] | None:
    """Return the shortest padded sample as a batch without padding, and the places [T] of its tokens.

    None where there is no such sample, or it is unclear how to cut it out.
    """
    if batch.mask is None:
        return None
    counts = batch.mask.sum(1)
    one = int(counts.where(counts > 0, counts.max()).argmin())
    keep = batch.mask[one]
    cut = batch.cut(one, one + 1)
    if cut is None or not 0 < int(counts[one]) < len(keep):
        return None
    masks = _masks(cut, names)
    inputs = {}
    for key, value in cut.items():
        prefix = max((p for p in masks if key.startswith(p)), key=len, default=None)
        mask = None if prefix is None else cut.get(masks[prefix])
        is_long = isinstance(value, Tensor) and value.ndim in (2, 3) and value.shape[1] == len(keep)
        if is_long and mask is not None and len(mask[0]) == len(keep):
            value = value[:, mask[0].bool().to(value.device)]
        inputs[key] = value
    return Batch.of(inputs, names, batch.number, batch.first + one), keep


def _masks(inputs: Mapping[str, Any], names: Names) -> dict[str, str]:
    """Return the name of the mask by the prefix of the entries that it masks: `decoder_`, or nothing."""
    endings, tokens = ("input_ids", "attention_mask"), names.tokens or ""
    prefixes = {key.removesuffix(e) for e in endings for key in inputs if key.endswith(e)}
    of_tokens = tokens.removesuffix("input_ids") if tokens.endswith("input_ids") else ""
    return {prefix: f"{prefix}attention_mask" for prefix in prefixes} | {of_tokens: names.mask or ""}


def _difference(alone: Tensor, padded: Tensor) -> float:
    """Return the largest root mean square difference of a row, relative to each feature's largest number.

    A feature that is small everywhere is compared with the median feature.
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
