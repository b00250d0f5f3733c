"""Counts how often the likeliest token of a model is the target. B batch, T tokens."""

from __future__ import annotations

import torch
from forge_data.loading.loader import MicroBatch
from forge_model.loss.cross_entropy import Sum
from torch import Tensor

ACCURACY, ANSWERS = "accuracy", "answers"


def right(hits: Tensor, micro: MicroBatch) -> dict[str, Sum]:
    """Count the targets hit (`accuracy`) and the documents with all targets hit (`answers`, as if greedy).

    With several sources, both are also counted by source, as `accuracy/<name>`.

    Args:
        hits: [B, T] whether the target is the likeliest token; false where there is no target.
        micro: micro-batch on the device of `hits`; without `doc_ids`, each row is a document.
    """
    labels = micro.inputs["labels"]
    documents = micro.inputs.get("doc_ids", torch.zeros_like(labels)).clamp(min=0)  # -1 is padding, no target
    targets, missed = (labels >= 0), (labels >= 0) & ~hits
    none = torch.zeros_like(labels)
    asked, wrong = (none.scatter_add(1, documents, one.long()) for one in (targets, missed))
    by_row = {
        ACCURACY: ((targets & hits).sum(1), targets.sum(1)),
        ANSWERS: (((asked > 0) & (wrong == 0)).sum(1), (asked > 0).sum(1)),
    }
    found = {name: Sum(value.sum(), count.sum()) for name, (value, count) in by_row.items()}
    if len(micro.sources) < 2:
        return found
    for number, source in enumerate(micro.sources):
        mine = micro.statistics["source"] == number
        for name, (value, count) in by_row.items():
            found[f"{name}/{source}"] = Sum(value[mine].sum(), count[mine].sum())
    return found


def means(totals: dict[str, Sum]) -> dict[str, float]:
    """Return the sums of `right` as fractions, without sources that have no target; NaN if none has one."""
    kinds = ACCURACY, ANSWERS
    return {
        name: (total.value / total.count).item()
        for name, total in totals.items()
        if name in kinds or (name.partition("/")[0] in kinds and total.count)
    }
