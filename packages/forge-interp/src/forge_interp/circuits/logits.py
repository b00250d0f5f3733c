"""How much of a logit does each part of the model write?

The residual stream sums the first block's input and the outputs of blocks, heads and neurons. With the
final norm frozen, a logit is linear in it. Letters: B batch, T tokens, D model dim, N heads, F neurons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_interp.canonical import canonical_sites, structure
from forge_interp.causal.table import at_call
from forge_interp.errors import InterpError
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import Edit, edit
from forge_interp.hooks.sites import named_modules
from forge_interp.lenses.unembedding import Readout, Unembedding
from forge_interp.model_inputs import Inputs, call_model, output_logits

Norm = Literal["frozen_norm", "linearized_norm"]


@dataclass(frozen=True)
class LogitAttribution:
    """Shares of a logit at each position; `parts` (float64) sum to `logits`.

    `parts` are `embed`, `blocks.0` and so on, `between` blocks (mostly 0), and `constant`: biases of the
    final norm and head, with `linearized_norm` also the remainder of the tangent. Heads, neurons and `rest`
    of a block sum to its part; `rest` holds biases, and parts without heads or neurons that `canonical_sites`
    finds, or whose outputs are no terms of a sum (a norm follows the sum of stream and block).
    """

    logits: Tensor  # [B, T] logits of the targets, minus the logits of `against`
    parts: dict[str, Tensor]  # [B, T]
    heads: dict[str, Tensor]  # by block [B, T, N]
    neurons: dict[str, Tensor]  # by block [B, T, F]
    rest: dict[str, Tensor]  # by block [B, T]
    attention: dict[str, Tensor]  # by block [B, T], biases included, where the MLP follows (see `resid_mid`);
    mlp: dict[str, Tensor]  # of parallel blocks add up heads and neurons
    direction: Tensor  # [B, T, D] the logit as a linear function of the last residual stream

    def share(self, value: Tensor) -> Tensor:
        """Return the share [B, T] of a value [B, T, D] of the residual stream."""
        return (value.detach().double() * self.direction).sum(-1)

    def of_features(self, sae: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares [B, T, F] of features in a value [B, T, D], and the share [B, T] of all else.

        `sae` is an autoencoder of that site (`forge_interp.sae`).
        """
        shares = sae.unscaled(sae.encode(value)).double() * (self.direction @ sae.W_dec.double().T)
        return shares, (value.double() * self.direction).sum(-1) - shares.sum(-1)


def attribute_logits(
    model: nn.Module,
    inputs: Inputs,
    targets: Tensor,
    *,
    against: Tensor | None = None,
    final_norm: Norm = "frozen_norm",
    norm: Readout | None = None,
    head: Readout | None = None,
) -> LogitAttribution:
    """Attribute the logits of target tokens to the direct writes of each part into the residual stream.

    Args:
        model: a decoder with one stack of blocks; `canonical_sites` says which of its parts are found.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones.
        targets: [B, T] ids whose logits are attributed.
        against: [B, T] ids whose logits are subtracted; None: nothing is.
        final_norm: `frozen_norm` takes the scale of the final norm, an RMS or layer norm, as a constant;
            `linearized_norm` takes the tangent. A norm after attention or MLP is always frozen (it is found
            by its output, less surely in 16 bits: use float32).
        norm: see `Unembedding`.
        head: see `Unembedding`. A factor or soft cap after it is also a constant of each logit.

    InterpError where shares do not sum to the logits to 1e-4 (in 16 bits 3e-2) of the largest. Source: Elhage
    et al. 2021, "A Mathematical Framework for Transformer Circuits"; `ActivationCache.logit_attrs` of
    TransformerLens, which keeps the scale fixed.
    """
    end, sites = Unembedding(model, norm, head), canonical_sites(model, inputs)
    blocks = [name.removesuffix(".resid_pre") for name in sites if name.endswith(".resid_pre")]
    if not blocks[0].startswith("blocks."):
        raise InterpError("the model has several stacks of blocks; expected one, as decoders have")
    last_site = f"{end.norm_name or end.head_name}:in"
    behind = _norms_behind(model, inputs, sites, blocks)
    at = {last_site, *sites.values(), *(f"{name}:in" for name in behind.values())}
    kept, logits = _run(model, inputs, at, {x for name, x in sites.items() if name.endswith("mlp.post")})
    last = kept[last_site]
    direction, constant, chosen = _readout(end, last.detach(), targets, logits, final_norm)
    if against is not None:
        other = _readout(end, last.detach(), against, logits, final_norm)
        direction, constant, chosen = direction - other[0], constant - other[1], chosen - other[2]
    found = LogitAttribution(chosen, {}, {}, {}, {}, {}, {}, direction)
    values, modules = {name: kept[site] for name, site in sites.items()}, named_modules(model)
    norms = {name: (modules[norm], kept[f"{norm}:in"]) for name, norm in behind.items()}
    parts, before = found.parts, found.share(values[f"{blocks[0]}.resid_pre"])
    parts["embed"], between = before, torch.zeros_like(before)
    for block in blocks:
        between += found.share(values[f"{block}.resid_pre"]) - before
        _add_block(found, block, values, norms)
        before = found.share(values[f"{block}.resid_post"])
    parts["between"], parts["constant"] = between + found.share(last) - before, constant
    worst = (torch.stack(list(parts.values())).sum(0) - chosen).abs().max().item()
    if not worst <= _close(last.dtype) * max(1.0, chosen.abs().max().item()):
        raise InterpError(f"shares miss the logits by {worst:.3g}; expected their sum: pass norm= and head=")
    return found


def _add_block(
    found: LogitAttribution,
    block: str,
    values: Mapping[str, Tensor],
    behind: Mapping[str, tuple[Any, Tensor]],
) -> None:
    """Add the shares of a block to `found`; `values` is by canonical name."""
    pre, post = values[f"{block}.resid_pre"], values[f"{block}.resid_post"]
    middle, neurons = values.get(f"{block}.resid_mid"), values.get(f"{block}.mlp.post")
    found.parts[block] = found.rest[block] = found.share(post) - found.share(pre)
    if middle is not None and neurons is not None and not _passes(middle, post, found.direction):
        return  # behind a norm of the sum of stream and MLP, nothing has a share
    if middle is not None:
        found.attention[block] = found.share(middle) - found.share(pre)
        found.mlp[block] = found.share(post) - found.share(middle)
    elif neurons is None:
        return  # an MLP that is not seen is in the path of the heads
    made_of_heads = post if middle is None else middle
    for place, made, into in (("mlp.post", post, found.neurons), ("attn.z", made_of_heads, found.heads)):
        name, to = f"{block}.{place}", found.direction
        if name in behind:
            norm, made = behind[name]
            to, _ = _through(norm, made.detach(), to)
        shares = _shares(values[name], made, to, place == "attn.z") if name in values else None
        if shares is not None:
            into[block], found.rest[block] = shares, found.rest[block] - shares.sum(-1)


def _run(
    model: nn.Module, inputs: Inputs, sites: Iterable[str], leaves: Collection[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of sites in one graph, which ends at leaves, and the logits."""
    kept: dict[str, Tensor] = {}

    def keep(site: str) -> Edit:
        def apply(value: Tensor) -> Tensor:
            is_leaf = site in leaves or not value.requires_grad
            kept[site] = value.detach().requires_grad_() if is_leaf else value
            return kept[site].clone()

        return apply

    with torch.enable_grad(), edit(model, {at_call(site): keep(site) for site in sites}):
        logits = output_logits(call_model(model, inputs)).detach()
    return kept, logits


@torch.no_grad()
def _norms_behind(
    model: nn.Module, inputs: Inputs, sites: Mapping[str, str], blocks: Iterable[str]
) -> dict[str, str]:
    """Return the norms applied to the output of attention or MLP, by canonical name."""
    found, modules = dict[str, str](), named_modules(model)
    kinds: dict[str, dict[str, str]] = {}  # by what follows the name, of blocks that are alike: one is run
    for block in blocks:
        name = sites[f"{block}.resid_pre"].removesuffix(":in")
        kind = structure(modules[name])
        if kind not in kinds:
            with capture(model, [f"{name}.**:in", f"{name}.**:out", f"{name}:in", f"{name}:out"]) as acts:
                call_model(model, inputs)
            pre, post = acts[f"{name}:in"], acts[f"{name}:out"]
            middle = acts.get(sites.get(f"{block}.resid_mid", ""), pre)
            kinds[kind] = {
                place: inside.removeprefix(name)
                for place, written in (("attn.z", middle - pre), ("mlp.post", post - middle))
                for inside in (site.removesuffix(":out") for site in acts if site.endswith(":out"))
                if _is_norm(modules[inside], acts.get(f"{inside}:in"), acts[f"{inside}:out"], written)
            }
        found |= {f"{block}.{place}": name + inside for place, inside in kinds[kind].items()}
    return found


def _is_norm(module: nn.Module, given: Tensor | None, made: Tensor, written: Tensor) -> bool:
    """Whether a module is a norm whose output is written into the stream."""
    if given is None or not given.shape == made.shape == written.shape:
        return False
    alike = torch.cosine_similarity(made.double().flatten(), written.double().flatten(), 0)
    return bool(alike > 1 - _close(made.dtype)) and _frozen(module, given) is not None


def _passes(middle: Tensor, post: Tensor, direction: Tensor) -> bool:
    """Whether a block adds to `middle`; the MLP's output is a leaf."""
    along = (post.double() * direction).sum()
    (found,) = torch.autograd.grad(along, middle, retain_graph=True, materialize_grads=True)
    return bool((found.double() - direction).abs().max() <= _close(middle.dtype) * direction.abs().max())


def _shares(source: Tensor, made: Tensor, direction: Tensor, has_heads: bool) -> Tensor | None:
    """Return the contribution of `source` to `made` in a direction, [B, T, N or F]; None: it is no sum."""
    along = (made.double() * direction).sum()
    (effect,) = torch.autograd.grad(along, source, create_graph=True, materialize_grads=True)
    if effect.requires_grad:
        (curved,) = torch.autograd.grad(
            (effect * torch.rand_like(effect)).sum(), source, retain_graph=True, allow_unused=True
        )
        if curved is not None and bool(curved.any()):
            return None
    effect = effect.detach()
    shares = source.detach().double() * effect.double()
    return shares.sum(-1).mT if has_heads else shares


def _readout(
    end: Unembedding, last: Tensor, ids: Tensor, logits: Tensor, how: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return direction [B, T, D], constant and value [B, T] of the logits of some ids."""
    if ids.shape != last.shape[:-1]:
        raise InterpError(f"targets are {list(ids.shape)}; expected {list(last.shape[:-1])}, an id for each")
    index = ids.to(last.device).long()[..., None]
    with torch.enable_grad():
        start = last.clone().requires_grad_()
        normed = end.norm(start)
        made = end.head(normed)
        value = made.gather(-1, index)[..., 0]
        row, tangent = torch.autograd.grad(value.sum(), [normed, start])
    value, made = value.detach().double(), made.detach().double()
    chosen = logits.double().gather(-1, index)[..., 0]
    factor = (chosen / value).where(value != 0, 1.0)
    order = made.argsort(-1)
    sizes = logits.double().gather(-1, order)
    falls = sizes.diff(dim=-1) < -_close(last.dtype) * sizes.abs().amax()
    if bool(falls.any()) or bool((factor < 0).any()):
        raise InterpError("norm and head do not give the order of the model's logits; pass norm= and head=")
    if how == "linearized_norm":
        direction = tangent.double() * factor[..., None]
        return direction, chosen - (last.double() * direction).sum(-1), chosen
    constant = value - (normed.detach().double() * row.double()).sum(-1)
    direction, bias = _through(end.norm, last, row.double())
    return direction * factor[..., None], (constant + bias) * factor, chosen


def _through(norm: Any, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Move a direction from the output of a norm, its scale fixed at x, to its input; and the bias' share."""
    parts = _frozen(norm, x)
    if parts is None:
        raise InterpError(
            f"{type(norm).__name__} is neither RMS nor layer norm; expected one: final_norm='linearized_norm'"
        )
    gain, is_centred, bias = parts
    back = direction * gain
    return back - back.mean(-1, keepdim=True) if is_centred else back, (direction * bias).sum(-1)


def _close(dtype: torch.dtype) -> float:
    return 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2


@torch.no_grad()
def _frozen(norm: Any, x: Tensor) -> tuple[Tensor, bool, Tensor] | None:
    """Probe a norm: gain [..., D], whether it subtracts the mean, bias [D]; None if it is no such norm.

    RMS and layer norm are y = gain (x - mean) + bias, with a gain that depends on the size of x alone.
    """
    probe = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    probe[1::2] = -1
    if len(probe) % 2:  # a mean of 0 all the same
        probe[-3:] = torch.tensor([1.0, 1.0, -2.0]).to(probe)
    probe = 1e3 * probe[None, None]
    try:
        bias, plain, shifted, y = (norm(v).double() for v in (0 * probe, probe, probe + 1e3, x))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    weight = (plain - bias) / (probe / probe.square().mean().sqrt())
    is_centred = torch.allclose(plain, shifted, rtol=1e-3, atol=1e-4)
    given = x.double() - x.double().mean(-1, keepdim=True) if is_centred else x.double()
    along = weight * given
    scale = ((y - bias) * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)
    if not bool(((along * scale + bias - y).abs() <= _close(x.dtype) * y.abs().amax()).all()):
        return None
    return weight * scale, is_centred, bias[0, 0]
