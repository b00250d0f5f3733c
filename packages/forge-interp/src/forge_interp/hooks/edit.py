"""How can values in a model be changed during the calls inside a `with`?"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_interp.attention.call import DENSE
from forge_interp.errors import InterpError, check_kind, fitting
from forge_interp.hooks.engine import values
from forge_interp.hooks.engine.attend import not_called
from forge_interp.hooks.engine.boards import attached
from forge_interp.hooks.engine.sharding import Spread
from forge_interp.hooks.engine.taps import Phase, Tap
from forge_interp.hooks.sites import ATTENTION_TENSORS, Site, find_sites, named_modules

Edit = Callable[[Tensor], Tensor]


@contextmanager
def edit(model: nn.Module, edits: Mapping[Any, Edit]) -> Iterator[None]:
    """Change values on their way; gradients flow through the edits.

    Edits of one site apply in the given order, those of an outer `with` first. A capture sees the edited
    values unless it asks for those before. Attention can be edited at q, k, v, raw, scores, pattern and z;
    with raw, scores or pattern the attention of that module is computed densely. A backward pass that
    recomputes parts (activation checkpointing) must run inside the `with`, or it recomputes without edits.

    `edits` maps a site, or a module for its output, to a function from the value to a new value of the same
    shape and dtype, which must not change its argument in place. InterpError where a site names no module or
    was not reached inside the `with`, an edit changes shape or dtype, or tensor parallelism leaves only a
    part of the value on this rank.
    """
    check_kind("edits", edits, Mapping, "a mapping from sites to functions")
    for site, change in edits.items():
        name = f"the edit of {site!r:.60}"
        check_kind(name, change, Callable, "a function of the value, such as patch(0.0)")
    found = find_sites(model, edits)
    edits = dict(zip(found, edits.values(), strict=True))
    modules, spread = named_modules(model), Spread(model)
    reached: set[str] = set()

    def act(pattern: str, at: Site, module: nn.Module, value: Any) -> Tensor:
        reached.add(pattern)
        if spread.is_partial(value, module, at):
            raise InterpError(
                f"edit of {str(at)!r}: tensor parallelism leaves only a part of it on this rank; edit a site "
                "that is whole, such as the output of the block, or use one rank"
            )
        change = edits[pattern]
        new = change(value, at) if isinstance(change, MeanAblation) else change(value)
        if new is None:
            raise InterpError(f"edit of {str(at)!r} gave None, expected a tensor like the value")
        is_copy = new is value or getattr(change, "__module__", None) == __name__  # as of patch and its like
        is_kept = at.part != "attn" or at.path[0] not in DENSE  # what the model may change in place
        return new.clone() if is_kept and isinstance(new, Tensor) and not is_copy else new

    taps = []
    for pattern, site in ((name, site) for name, sites in found.items() for site in sites):
        if site.part == "attn" and ".".join(site.path) not in ATTENTION_TENSORS:
            raise InterpError(f"edit of {pattern!r}: a statistic cannot be edited; edit attn.pattern")
        run = partial(act, pattern)
        taps.append(Tap(site, modules[site.module], run, Phase.EDIT, reached, edit=edits[pattern]))
    with attached(taps):
        yield
        if missed := [pattern for pattern in edits if pattern not in reached]:
            attention = any(Site.parse(pattern).part == "attn" for pattern in missed)
            raise InterpError(
                f"edited nothing at {', '.join(map(repr, missed))}: not reached inside the with"
                + (f", or the module does not call {not_called(model)}" if attention else "")
            )


def attention_mask(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the padding mask [B, T] that a model is called with, or None.

    InterpError: there is padding, and the positions of the decoder differ from those of the mask.
    """
    try:
        _, where, *_ = path = values.argument(module, args, kwargs, Site("", "kw", ("attention_mask",)))
    except InterpError:
        return None
    found = kwargs[where] if path[0] == "kwargs" else args[int(where)]
    if not isinstance(found, Tensor) or found.ndim != 2:
        return None
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) and not bool(found.all()):
        raise InterpError(
            f"the attention_mask of a {type(module).__name__} is that of its encoder, and a decoder has "
            "others; expected keep=, the mask of the positions of the sites"
        )
    return found


def patch(value: Tensor | float, where: Any = ...) -> Edit:
    """Put a value, a number or a tensor that broadcasts to `old[where]`, in place of what is there.

    `where` is an index or a tuple of indices, such as `(slice(None), -1)` for the last token; default all.
    """
    return lambda old: _put(old, where, value)


def steer(vector: Tensor, scale: float = 1.0, where: Any = ...) -> Edit:
    """Add `scale * vector`; the vector broadcasts to `old[where]`."""
    check_kind("vector", vector, Tensor, "a tensor")

    def add(old: Tensor) -> Tensor:
        with fitting(old, f"steer(...{list(vector.shape)}, where={where!r})"):
            return _put(old, where, old[where] + scale * vector.to(old))

    return add


def ablate(
    how: Literal["zero", "mean", "resample"] = "zero",
    where: Any = ...,
    *,
    mean: Tensor | Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Edit:
    """Remove the information about the input from a site.

    Args:
        how: `zero`; `mean`: the given mean; `resample`: another sample's value, never its own.
        where: as in `patch`.
        mean: for `mean`: a tensor that broadcasts to `old[where]`, or means by site from `site_means`.
        seed: for `resample`: seed of the order of the samples.
    """
    if how not in ("zero", "mean", "resample"):
        raise InterpError(f"ablate({how!r}), expected 'zero', 'mean' or 'resample'")
    if how == "mean":
        if isinstance(mean, Mapping):
            return MeanAblation(where, mean)
        check_kind("mean", mean, Tensor, "a tensor, or what site_means(model, batches, sites) gives")
        return patch(mean, where)  # type: ignore[arg-type]
    if mean is not None:
        raise InterpError(f"ablate({how!r}, mean=...) would not use the mean; expected ablate('mean', ...)")
    if how == "zero":
        return patch(0.0, where)

    def resample(old: Tensor) -> Tensor:
        if len(old) < 2:
            raise InterpError("ablate('resample') of a batch of one; expected at least two samples")
        order = torch.randperm(len(old), generator=torch.Generator().manual_seed(seed)).to(old.device)
        taken = torch.empty_like(order).index_put((order,), order.roll(1))  # one cycle: nobody stays in place
        with fitting(old, f"ablate('resample', where={where!r})"):
            return _put(old, where, old[taken][where])

    return resample


@dataclass(frozen=True, eq=False)
class MeanAblation:
    """An edit that inserts the mean of the site where it is applied: see `ablate`."""

    where: Any
    means: Mapping[str, Tensor]

    def __call__(self, old: Tensor, site: Site | None = None) -> Tensor:
        """Return the value with the mean in it; InterpError where this site has no mean."""
        key = str((site or Site("")).numbered(0))
        if key not in self.means:
            raise InterpError(f"there is no mean for {key!r}, but {', '.join(self.means)}; see site_means")
        picked = torch.zeros_like(old, dtype=torch.bool)
        with fitting(old, f"the mean {list(self.means[key].shape)} of {key!r}, where={self.where!r}"):
            picked[self.where] = True
            return torch.where(picked, self.means[key].to(old), old)


def mean_dims(value: Tensor, site: Site | None) -> tuple[int, ...]:
    """Return the dimensions of batch and positions of a site's value; InterpError where they are unknown."""
    if site is not None and site.part == "attn":
        dims = (0,) if site.path[0] in ("raw", "scores", "pattern") else (0, 2)
        return dims if value.ndim == 4 else tuple(dim - 1 for dim in dims if dim)
    if value.ndim > 3:
        raise InterpError(
            f"the mean of a value {list(value.shape)}, whose batch and positions are not known; expected "
            "[B, T, D]: capture it, and give ablate('mean', mean=) its mean over the dims that you choose"
        )
    return tuple(range(value.ndim - 1))


def real_positions(value: Tensor, dims: tuple[int, ...], mask: Tensor, name: str) -> Tensor:
    """Return a mask [B, T] (or its last T) as bool that broadcasts to a value averaged over `dims`.

    Rows [R, ...] of tokens or samples in unknown order need a mask [R], else InterpError.
    """
    shape = [1] * value.ndim
    if value.ndim < 3 or 0 not in dims:
        if bool(mask.all()):
            return torch.ones((), dtype=torch.bool, device=value.device)
        if 0 not in dims or mask.shape != value.shape[:1]:
            raise InterpError(
                f"{name} is {list(mask.shape)}, for a value {list(value.shape)}: it is unknown which rows "
                f"are padding; expected a mask of its rows: give keep= [{len(value)}], for tokens in their "
                "order attention_mask.flatten(), or leave padding out of the batch"
            )
        shape[0] = len(value)
    else:
        batch, positions = dims[0], dims[-1] if len(dims) > 1 else 2
        shape[batch], shape[positions] = sizes = value.shape[batch], value.shape[positions]
        mask = mask[:, -1:] if sizes[1] == 1 else mask
        if tuple(mask.shape) != sizes:
            raise InterpError(
                f"{name} is {list(mask.shape)}; expected {list(sizes)}, batch and positions of a value "
                f"{list(value.shape)}: give keep="
            )
    return mask.to(value.device).bool().reshape(shape)


def _put(old: Tensor, where: Any, new: Tensor | float) -> Tensor:
    changed = old.clone()
    shape = list(new.shape) if isinstance(new, Tensor) else new
    with fitting(old, f"{shape} in place of old[{where!r}]"):
        changed[where] = torch.as_tensor(new).to(old)
    return changed
