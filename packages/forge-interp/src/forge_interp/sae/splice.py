"""What does a model do when a site is put together from features?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.edit import Edit, edit
from forge_interp.hooks.sites import Site, find_sites
from forge_interp.sae.autoencoder import SparseAutoencoder


class Spliced:
    """What the last call inside the `with` has seen.

    `features` [..., F] before the edit, in a graph where gradients are on; `value` [..., D'] of the site (of
    the target), and `error`, the value minus what the features decode to.
    """

    features: Tensor
    value: Tensor
    error: Tensor


@contextmanager
def spliced(
    model: nn.Module,
    site: str,
    sae: SparseAutoencoder,
    *,
    error: bool = True,
    features: Edit | None = None,
    target: str | None = None,
) -> Iterator[Spliced]:
    """Inside the `with`, have `site` be what an autoencoder makes of it; several nest.

    Args:
        model: any module.
        site: one site, whose value [..., D] the autoencoder was made for.
        sae: the autoencoder, on the device of the value.
        error: add what the autoencoder misses, as a constant. Without an edit the model then computes the
            same bits as without the autoencoder; with one, exactly the change of the features goes on.
        features: an edit of the features [..., F], such as `ablate("zero", (..., 7))` or `steer(...)`.
        target: where the output of a transcoder goes; `site` is its input.

    Gradients flow through features, not through the error. InterpError where the site or target is none or
    several, or has another width; a transcoder has no target.

    Source: Marks et al. 2024, arXiv:2403.19647, section 3.1 (error terms).
    """
    names = [site] if target is None else [site, target]
    for name in names:
        if len(found := [str(s) for of in find_sites(model, name).values() for s in of]) != 1:
            raise InterpError(f"{name!r} names {len(found)} sites; expected one: nest a spliced() for each")
    if (target is None) != (sae.config.d_out is None):
        raise InterpError(f"target is {target!r}; expected a site for a transcoder, None for an autoencoder")
    if sae.config.reshape_activations == "hook_z" and any(Site.parse(name).part == "attn" for name in names):
        raise InterpError(
            f"{site!r} is [B, N, T, H], and the autoencoder takes [B, T, N H]; expected the input of the "
            "output projection, such as 'layers.1.self_attn.o_proj:in'"
        )
    seen = Spliced()
    given: Any = None

    def encode(value: Tensor) -> Tensor:
        nonlocal given
        given, seen.features = value, sae.encode(value)
        return value

    def decode(value: Tensor) -> Tensor:
        nonlocal given
        if given is None:
            text = f"{target!r} is reached before {site!r}; expected the input of a transcoder first"
            raise InterpError(text)
        acts = seen.features
        changed = acts if features is None else features(acts)
        made = sae.decode(changed, given)
        if made.shape != value.shape:
            text = f"made {list(made.shape)} for a value {list(value.shape)}; expected the same shape"
            raise InterpError(text)
        with torch.no_grad():
            plain = made.detach() if changed is acts else sae.decode(acts, given)
            seen.value, seen.error, given = value.detach(), value.detach() - plain, None
        return (value.detach() + (made - plain) if error else made).to(value.dtype)

    plain = {site: lambda value: decode(encode(value))}
    with edit(model, plain if target is None else {site: encode, target: decode}):
        yield seen
