"""How do layers and heads of a model change while it trains?

Letters: C checkpoints, L layers (sites), N heads of all layers together, B sequences, P their period.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.similarity import linear_cka
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.store import ActivationStore
from forge_interp.hooks.capture import capture

_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class TrainingDynamics:
    """Similarities of layers and scores of heads at each checkpoint, in the order of the steps."""

    steps: tuple[int, ...]  # C
    layers: tuple[str, ...]  # L sites
    cka: np.ndarray  # [C, L] debiased linear CKA of a layer with itself at the last step
    heads: tuple[str, ...]  # N, such as `layers.1.attention[3]`
    induction: np.ndarray  # [C, N] mean weight on the token that followed the last time
    previous: np.ndarray  # [C, N] mean weight on the token before

    def table(self) -> list[dict[str, float | str]]:
        """Return one row for each checkpoint: step, CKA of each layer, largest score of any head."""
        rows = []
        for row, step in enumerate(self.steps):
            found: dict[str, float | str] = {"step": step}
            found |= {f"cka/{name}": float(x) for name, x in zip(self.layers, self.cka[row], strict=True)}
            for kind in ("induction", "previous") if self.heads else ():
                scores = getattr(self, kind)[row]
                found |= {kind: float(scores.max()), f"{kind} head": self.heads[int(scores.argmax())]}
            rows.append(found)
        return rows


def training_dynamics(
    checkpoints: Iterable[tuple[int, nn.Module]],
    dataset: Any,
    layers: str | Iterable[str],
    out: str | Path,
    *,
    vocabulary: int | None = None,
    period: int = 32,
    sequences: int = 16,
    seed: int = 0,
    **options: Any,
) -> TrainingDynamics:
    """Extract layers at every checkpoint on the same data, and follow layers and heads through training.

    If `checkpoints` is a generator, one model is in memory. After a kill, the same call reuses its stores.

    Args:
        checkpoints: (step, model in evaluation mode), by rising step.
        dataset: samples, in any form that `extract_representations` takes.
        layers: sites whose rows are compared.
        out: a folder; the rows of each checkpoint are a store `step-00000010` in it.
        vocabulary: number of ids, from which random ids for the scores of heads are drawn. None: no scores.
        period: P, number of ids before they repeat; the model takes [B, 2 P] ids as its only argument.
        sequences: B.
        seed: seed of the ids.
        options: arguments of `extract_representations`.

    InterpError: there are fewer than two checkpoints, their steps do not rise, or their layers differ.
    Source of the scores: Olsson et al. 2022, arXiv:2209.11895.
    """
    stores, scores = dict[int, ActivationStore](), list[dict[str, np.ndarray]]()
    for step, model in checkpoints:
        if stores and step <= max(stores):
            raise InterpError(f"step {step} comes after step {max(stores)}; expected rising steps")
        place = Path(out) / f"step-{step:08d}"
        stores[step] = extract_representations(model, dataset, layers, place, **options)
        scores.append(head_scores(model, vocabulary, period, sequences, seed) if vocabulary else {})
    sites = {store.sites for store in stores.values()}
    if len(stores) < 2 or len(sites) > 1:
        raise InterpError(f"{len(stores)} checkpoints have layers {sites}; expected two or more of the same")
    last = stores[max(stores)]
    cka = np.array([_same_layers(store, last) for store in stores.values()])
    heads = tuple(scores[0])
    values = np.array([[of[head] for head in heads] for of in scores]).reshape(len(stores), len(heads), 2)
    return TrainingDynamics(tuple(stores), last.sites, cka, heads, values[..., 0], values[..., 1])


@torch.no_grad()
def head_scores(
    model: nn.Module, vocabulary: int, period: int = 32, sequences: int = 16, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return [induction, previous] of each head: its mean weights on two keys, over queries of repeated ids.

    The queries are the second half of `repeated_ids`. The keys are the one after the earlier occurrence of
    the query's id, and the one before the query. Arguments and source: see `training_dynamics`.
    """
    ids = repeated_ids(vocabulary, period, sequences, seed)
    ids = next((ids.to(weight.device) for weight in model.parameters()), ids)
    names = [f"**:attn.lag.{period - 1}", "**:attn.previous"]
    with capture(model, names) as acts:
        model(ids)
    scores = {site: value[..., period:].mean((0, 2)).cpu().numpy() for site, value in acts.items()}
    modules = [site.partition(":")[0] for site in scores if site.endswith(names[0][2:])]
    return {
        f"{module}[{head}]": np.array(pair)
        for module in modules
        for head, pair in enumerate(zip(*(scores[module + name[2:]] for name in names), strict=True))
    }


def repeated_ids(vocabulary: int, period: int, sequences: int, seed: int = 0) -> torch.Tensor:
    """Draw [B, 2 P] int64 random ids, whose second half repeats the first."""
    if min(vocabulary, period - 1, sequences) < 1:
        raise InterpError(
            f"vocabulary={vocabulary}, period={period}, sequences={sequences}; expected 1, 2 and 1 or more"
        )
    random = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (sequences, period), generator=random).repeat(1, 2)


def _same_layers(now: ActivationStore, end: ActivationStore) -> list[float]:
    """Return the CKA of each layer in two stores of the same data."""
    found = []
    for site in now.sites:
        dim = now.read(site, 0, 1).numel()
        moments = Moments({"now": dim, "end": dim}, between=(["now"], ["end"]))
        for start in range(0, now.rows, _BLOCK_ROWS):
            rows = (store.read(site, start, start + _BLOCK_ROWS).flatten(1) for store in (now, end))
            moments.update(dict(zip(("now", "end"), rows, strict=True)))
        found.append(linear_cka(moments).values[0, 0])
    return found
