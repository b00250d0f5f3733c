"""How does a model change when features replace the value of a site, and what does it lose?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.edit import Edit, edit, patch
from forge_interp.hooks.sites import Site, find_sites
from forge_interp.model_inputs import Inputs, call_model, output_logits
from forge_interp.sae.autoencoder import SparseAutoencoder

Loss = Callable[[Any, Inputs], Tensor]
"""Function from (the output of the model, its inputs) to the mean loss of the batch."""


class Spliced:
    """Tensors of the last call inside the `with`.

    `features` [..., F] before the edit, in a graph where gradients are on; `value` [..., D'] of the site (or
    of the target); `error`, the value minus the decoded features.
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
    """Inside the `with`, replace the value of `site` by its reconstruction; several nest.

    Args:
        model: any module.
        site: one site, with the value [..., D] for which the autoencoder was made.
        sae: the autoencoder, on the device of the value.
        error: add the reconstruction error as a constant. Without an edit the model then computes the same
            bits as without the autoencoder; with an edit, only the change of the features has an effect.
        features: an edit of the features [..., F], such as `ablate("zero", (..., 7))` or `steer(...)`.
        target: site that the output of a transcoder replaces; `site` is its input.

    Gradients flow through features, not through the error. InterpError where site or target name none or
    several sites, or have another width, or a transcoder has no target.

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

    within = {site: lambda value: decode(encode(value))}
    with edit(model, within if target is None else {site: encode, target: decode}):
        yield seen


@dataclass(frozen=True)
class FeatureReport:
    """Results of `evaluate_sae`, over all valid rows x of the site and their reconstructions x'."""

    rows: int
    l0: float  # active features of a row, on average
    explained_variance: float  # 1 - sum |x - x'|^2 / sum |x - mean x|^2; nan of one row
    normalized_mse: float  # sum |x - x'|^2 / sum |x|^2
    dead: int  # features that were active in no row
    density: Tensor  # [F], the part of rows in which each is active
    mean_active: Tensor  # [F], the mean over these, 0 where there is none
    largest: Tensor  # [F]
    loss: float  # loss of the unchanged model, mean over batches
    loss_spliced: float  # with x' in place of x
    loss_zero: float  # with 0 in place of x
    loss_recovered: float  # (loss_zero - loss_spliced) / (loss_zero - loss): 1 is as good as x

    def __repr__(self) -> str:
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        return "\n".join(f"{name.ljust(18)}  {value:.4g}" for name, value in numbers.items())


@torch.no_grad()
def evaluate_sae(
    model: nn.Module,
    batches: Iterable[Inputs],
    site: str,
    sae: SparseAutoencoder,
    *,
    target: str | None = None,
    loss: Loss | None = None,
    mask: str = "attention_mask",
) -> FeatureReport:
    """Run a model on batches with and without an autoencoder: three passes for each batch.

    Each item of `batches` is the inputs of one forward pass. `sae` reconstructs `site`; a transcoder makes
    `target` of it. The default `loss` is the cross-entropy in nats of the next token, of the inputs or their
    "input_ids", where neither it nor the token before is padding; `mask` is the entry of the inputs [B, T]
    that is 0 at padding, which does not count. Call `model.eval()` before.

    InterpError where there are no batches, or where the default loss finds no ids.
    """
    loss = loss or (lambda output, inputs: next_token_loss(output, inputs, mask))
    sums, losses = dict[str, Tensor](), []
    for inputs in batches:
        with spliced(model, site, sae, target=target) as seen:
            plain = loss(call_model(model, inputs), inputs)
        new = _sums_of(seen, inputs.get(mask) if isinstance(inputs, Mapping) else None)
        if sums:
            new |= {name: new[name] + x for name, x in sums.items() if name != "largest"}
            new["largest"] = torch.maximum(new["largest"], sums["largest"])
        sums = new
        with spliced(model, site, sae, target=target, error=False):
            reconstructed = loss(call_model(model, inputs), inputs)
        with edit(model, {target or site: patch(0.0)}):
            zero = loss(call_model(model, inputs), inputs)
        losses.append([each.item() for each in (plain, reconstructed, zero)])
    if not losses:
        raise InterpError("there are no batches; expected inputs of at least one forward pass")
    return _report(sums, *np.mean(losses, axis=0).tolist())


def next_token_loss(output: Any, inputs: Inputs, mask: str = "attention_mask") -> Tensor:
    """Return the mean cross-entropy of the next token [nats]; InterpError where there are no ids."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    logits = output_logits(output)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.shape != logits.shape[:-1]:
        raise InterpError(
            "the loss of the next token needs ids [B, T] and logits [B, T, V]; expected inputs that are ids, "
            "or have 'input_ids': give loss=lambda output, inputs: ..."
        )
    targets = ids[:, 1:].clone()
    keep = inputs.get(mask) if isinstance(inputs, Mapping) else None
    if isinstance(keep, Tensor):
        targets[(keep[:, 1:] == 0) | (keep[:, :-1] == 0)] = -100
    logits = logits[:, :-1].flatten(0, 1).to(torch.promote_types(torch.float32, logits.dtype))
    return nn.functional.cross_entropy(logits, targets.flatten())


def _sums_of(seen: Spliced, keep: Any) -> dict[str, Tensor]:
    """Sum over the valid rows of a batch, in float64; InterpError where the mask has other rows."""
    acts, value, error = (t.flatten(0, -2).double() for t in (seen.features, seen.value, seen.error))
    if isinstance(keep, Tensor):
        if keep.shape != seen.features.shape[:-1]:
            raise InterpError(f"the mask is {list(keep.shape)}; expected {list(seen.features.shape[:-1])}")
        chosen = keep.to(acts.device).flatten() != 0
        acts, value, error = acts[chosen], value[chosen], error[chosen]
    none = acts.new_full((1, acts.shape[1]), -torch.inf)
    found = {"rows": acts.new_tensor(len(acts)), "active": (acts > 0).sum(0), "acts": acts.sum(0)}
    found |= {"value": value.sum(0), "power": value.square().sum(), "error": error.square().sum()}
    return found | {"largest": torch.cat([none, acts]).amax(0)}


def _report(sums: Mapping[str, Tensor], loss: float, loss_spliced: float, loss_zero: float) -> FeatureReport:
    """Make the report from sums over all batches."""
    rows, active, gap = sums["rows"].clamp_min(1), sums["active"], loss_zero - loss
    spread = (sums["power"] - sums["value"].square().sum() / rows).item()
    varies = spread > 1e-12 * sums["power"].item()
    return FeatureReport(
        rows=int(sums["rows"]),
        l0=(active.sum() / rows).item(),
        explained_variance=1 - sums["error"].item() / spread if varies else float("nan"),
        normalized_mse=(sums["error"] / sums["power"]).item(),
        dead=int((active == 0).sum()),
        density=(active / rows).cpu(),
        mean_active=(sums["acts"] / active.clamp_min(1)).cpu(),
        largest=sums["largest"].cpu(),
        loss=loss,
        loss_spliced=loss_spliced,
        loss_zero=loss_zero,
        loss_recovered=(loss_zero - loss_spliced) / gap if gap else float("nan"),
    )
