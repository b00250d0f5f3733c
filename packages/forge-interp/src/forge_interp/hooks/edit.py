"""How what flows through a model is changed during the calls inside a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.boards import attached
from forge_interp.hooks.interception import SDPA_ONLY
from forge_interp.hooks.sharding import Spread
from forge_interp.hooks.sites import ATTENTION_TENSORS, Site, find_sites, named_modules
from forge_interp.hooks.taps import Phase, Tap

Edit = Callable[[Tensor], Tensor]


@contextmanager
def edit(model: nn.Module, edits: Mapping[str, Edit]) -> Iterator[None]:
    """Change values on their way; gradients flow through the edits.

    Edits of one site are made in the order given, those of an outer `with` first. A capture sees the edited
    values unless it asks for those before. Attention can be edited at q, k, v, raw, scores, pattern and z;
    with raw, scores or pattern the attention of that module is computed densely.

    Args:
        model: any module.
        edits: site to function; the function is given the value and returns one of the same shape and dtype,
            without changing its argument in place.

    A backward pass that recomputes parts (activation checkpointing) belongs inside the `with`, or they are
    recomputed without the edits.

    Raises:
        InterpError: a site names no module, or was not reached inside the `with`; an edit changes shape or
            dtype; the value is only a part of the whole because of tensor parallelism.
    """
    found = find_sites(model, edits)
    for pattern in edits:
        site = Site.parse(pattern)
        if site.part == "attn" and ".".join(site.path) not in ATTENTION_TENSORS:
            raise InterpError(f"edit of {pattern!r}: a statistic cannot be edited; edit attn.pattern")
    modules, spread = named_modules(model), Spread(model)
    reached: set[str] = set()

    def tap(pattern: str, site: Site) -> Tap:
        def act(at: Site, module: nn.Module, value: Any) -> Tensor:
            reached.add(pattern)
            if spread.is_partial(value, module, at):
                raise InterpError(
                    f"edit of {str(at)!r}: tensor parallelism leaves only a part of it on this rank; edit a "
                    "site that is whole, such as the output of the block, or use one rank"
                )
            new = edits[pattern](value)
            if new is None:
                raise InterpError(f"edit of {str(at)!r} gave None, expected a tensor like the value")
            return new

        return Tap(site, modules[site.module], act, Phase.EDIT, reached)

    with attached([tap(pattern, site) for pattern, sites in found.items() for site in sites]):
        yield
        if missed := [pattern for pattern in edits if pattern not in reached]:
            attention = any(Site.parse(pattern).part == "attn" for pattern in missed)
            raise InterpError(
                f"edited nothing at {', '.join(map(repr, missed))}: not reached inside the with"
                + (f", or the module does not call {SDPA_ONLY}" if attention else "")
            )


def patch(value: Tensor | float, where: Any = None) -> Edit:
    """Put a value in place of what is there.

    Args:
        value: a number, or a tensor that broadcasts to `old[where]`.
        where: an index or a tuple of indices, such as `(slice(None), -1)` for the last token; None for all.
    """
    return lambda old: _put(old, where, value)


def steer(vector: Tensor, scale: float = 1.0, where: Any = None) -> Edit:
    """Add `scale * vector`; the vector broadcasts to `old[where]`."""
    return lambda old: _put(old, where, old[_index(where)] + scale * vector.to(old))


def ablate(
    how: Literal["zero", "mean", "resample"] = "zero",
    where: Any = None,
    *,
    mean: Tensor | None = None,
    seed: int = 0,
) -> Edit:
    """Take away what a site says about its input.

    Args:
        how: `zero`; `mean`: the given one, else that of the batch at hand over all but the last dim of what
            `where` picks (a single index picks a part of length one);
            `resample`: the value of another sample of the batch (no sample keeps its own).
        where: as in `patch`.
        mean: for `mean`, broadcast to `old[where]`.
        seed: for `resample`, of the order of the samples.

    Raises:
        InterpError: an unknown way, or a mean for another; at run time, resampling a batch of one.
    """
    if how not in ("zero", "mean", "resample"):
        raise InterpError(f"ablate({how!r}), expected 'zero', 'mean' or 'resample'")
    if mean is not None and how != "mean":
        raise InterpError(
            f"ablate({how!r}, mean=...) would not use the mean; expected ablate('mean', mean=...)"
        )

    def apply(old: Tensor) -> Tensor:
        if how == "zero":
            return _put(old, where, torch.zeros((), dtype=old.dtype, device=old.device))
        if how == "mean":
            return _put(old, where, _mean(old, where) if mean is None else mean)
        return _put(old, where, old[_derangement(len(old), seed).to(old.device)][_index(where)])

    return apply


def _put(old: Tensor, where: Any, new: Tensor | float) -> Tensor:
    changed = old.clone()
    changed[_index(where)] = torch.as_tensor(new).to(old)
    return changed


def _index(where: Any) -> Any:
    return ... if where is None else where


def _mean(old: Tensor, where: Any) -> Tensor:
    """[D or 1] over all but the last dim of what is picked, where numbers leave a dim of length one."""
    index = where if isinstance(where, tuple) else (_index(where),)
    part = old[tuple(slice(i, i + 1 or None) if type(i) is int else i for i in index)]
    return part.reshape(-1, part.shape[-1]).mean(0)


def _derangement(size: int, seed: int) -> Tensor:
    """A random cycle through all samples: nobody stays in place."""
    if size < 2:
        raise InterpError("ablate('resample') of a batch of one; expected at least two samples")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    taken = torch.empty_like(order)
    taken[order] = order.roll(1)
    return taken
