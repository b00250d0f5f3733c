"""What does patching queries or keys do to the output of their attention, with the softmax taken exactly?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from forge_interp.attention.call import AttentionCall
from forge_interp.causal.patching import put
from forge_interp.causal.table import Grid
from forge_interp.hooks.observe import each_attention


def output_of(site: str) -> str:
    """The attn.z site of the call that an attn.q or attn.k site belongs to."""
    return site.replace(":attn.q", ":attn.z").replace(":attn.k", ":attn.z")


@contextmanager
def kept_calls(model: nn.Module, sites: Iterable[str]) -> Iterator[dict[str, AttentionCall]]:
    """Copies of the attention calls that attn.* sites belong to, by attn.z site, made inside the `with`."""
    calls: dict[str, AttentionCall] = {}
    modules = {site.partition(":")[0] for site in sites}
    if not modules:
        yield calls
        return

    def keep(name: str, call: AttentionCall) -> None:
        module, hash_, number = name.partition("#")
        tensors = {field: getattr(call, field).detach().clone() for field in ("query", "key", "value")}
        mask = None if call.mask is None else call.mask.detach().clone()
        calls.setdefault(f"{module}:attn.z{hash_}{number}", replace(call, **tensors, mask=mask))

    with each_attention(model, modules, keep):
        yield calls


@torch.no_grad()
def effects_through_attention(
    call: AttentionCall, site: str, clean: Tensor, gradient: Tensor, grid: Grid
) -> np.ndarray:
    """First order in the output of one attention call, exact up to there.

    Args:
        call: of the corrupted run.
        site: an attn.q or attn.k site of that call.
        clean: its value in the clean run.
        gradient: [B, N, T, H'] of the metric with respect to the output of the call.
        grid: the places to patch.

    Returns:
        An effect for each place of `grid`.

    Source: Kramar et al. 2024, arXiv:2403.00745 section 3.1 (there with the attention weights written out).
    """
    name = "query" if site.partition("#")[0].endswith(".q") else "key"
    before = call.run(scaled_dot_product_attention).double()
    effects = np.zeros(grid.shape)
    for cell in grid.cells():
        value = put(site, clean, grid.index(site, cell))(getattr(call, name))
        after = replace(call, **{name: value}).run(scaled_dot_product_attention).double()
        effects[cell] = ((after - before) * gradient.double()).sum().item()
    return effects
