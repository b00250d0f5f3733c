"""How often is what a model finds likeliest the target? B batch, T tokens."""

from __future__ import annotations

import torch
from forge_data.loading.loader import MicroBatch
from forge_model.loss.cross_entropy import Sum
from torch import Tensor

ACCURACY, ANSWERS = "accuracy", "answers"


def right(hits: Tensor, micro: MicroBatch) -> dict[str, Sum]:
    """`accuracy`, of targets, and `answers`, of documents whose targets are all hit, as greedy writing would.

    Both by source too, as `accuracy/<name>`, where there are several.

    Args:
        hits: [B, T] whether each target is the likeliest token; false where there is none.
        micro: on the device of `hits`; its documents are `doc_ids`, or its rows.
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
    """Those of `right` as fractions; a source that asks nothing is left out, NaN where none does."""
    kinds = ACCURACY, ANSWERS
    return {
        name: (total.value / total.count).item()
        for name, total in totals.items()
        if name in kinds or (name.partition("/")[0] in kinds and total.count)
    }
