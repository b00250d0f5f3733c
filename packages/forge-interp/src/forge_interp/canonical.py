"""Where do the places that papers name sit in this model: residual stream, heads, neurons?

One run of the model on example inputs shows it: nothing is guessed from names of modules, and what is not
there is reported. Letters: B batch, T tokens, D model dim, F width of the MLP.
"""

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.capture import Activations, capture, each_attention
from forge_interp.hooks.sites import named_modules
from forge_interp.model_inputs import Inputs, call_model

NAMES = ("resid_pre", "attn.z", "resid_mid", "mlp.pre", "mlp.post", "resid_post")


class CanonicalSites(dict[str, str]):
    """Sites by canonical name, `blocks.3.resid_pre`; `print` it for what was mapped and what was not.

    With several stacks of blocks (encoder and decoder), `blocks` is the name of each stack. `missing` are the
    names that the model has no site for, and why.
    """

    def __init__(self) -> None:
        super().__init__()
        self.missing: dict[str, str] = {}

    def __missing__(self, name: str) -> str:
        raise KeyError(f"{name}: {self.missing.get(name, 'no canonical name of this model')}")

    def __repr__(self) -> str:
        rows = {**self, **{name: f"- {why}" for name, why in self.missing.items()}}
        width = max(map(len, rows), default=0)
        return "\n".join(f"{name.ljust(width)}  {site}" for name, site in rows.items())


@torch.no_grad()
def canonical_sites(model: nn.Module, inputs: Inputs) -> CanonicalSites:
    """Map resid_pre, attn.z, resid_mid, mlp.pre, mlp.post and resid_post of each block to sites of the model.

    resid_pre, resid_post: what goes into a block and comes out of it. resid_mid: the first value in the block
    that is resid_pre plus the output of one of its modules. attn.z: of the first attention call in the block.
    mlp.post: what the last map from another width to D is given, outside of attention; mlp.pre: what the
    activation function is given there. Blocks of one class are mapped alike, by the first of them.

    `inputs` are a small batch, as for `record`; the model runs twice for each class of blocks. InterpError
    where no list of blocks ran.
    """
    found = CanonicalSites()
    modules = named_modules(model)
    stacks = [name for name, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)]
    stacks = [name for name in stacks if len(list(modules[name].children())) > 0]
    stacks = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    mapped: dict[str, dict[str, dict[str, str]]] = {}
    for stack in stacks:
        by_class: dict[str, dict[str, str]] = {}
        for index, block in modules[stack].named_children():
            kind = type(block).__name__
            if kind not in by_class:
                by_class[kind] = _map_block(model, inputs, f"{stack}.{index}".removeprefix("."))
            if by_class[kind]:
                mapped.setdefault(stack, {})[index] = by_class[kind]
    for stack, index, places in ((s, i, p) for s, blocks in mapped.items() for i, p in blocks.items()):
        block, prefix = f"{stack}.{index}".removeprefix("."), stack if len(mapped) > 1 else "blocks"
        for name in NAMES:
            place, key = places[name], f"{prefix}.{index}.{name}"
            if place.startswith("-"):
                found.missing[key] = place[2:]
            else:
                found[key] = block + place
    if not found:
        raise InterpError(
            f"{type(model).__name__} ran no list of blocks that keep the shape of their input; expected "
            "ModuleLists such as layers.0, layers.1: name the sites yourself, resolve(model, '**') lists them"
        )
    return found


def _map_block(model: nn.Module, inputs: Inputs, block: str) -> dict[str, str]:
    """Canonical name to what follows the name of the block in a site, or "- reason"; {} if it is no block."""
    try:
        with capture(model, [f"{block}.**:in", f"{block}.**:out", f"{block}:in"]) as acts:
            call_model(model, inputs)
    except InterpError:
        return {}
    if f"{block}:in" not in acts or f"{block}:out" not in acts:
        return {}
    before, after = acts[f"{block}:in"], acts[f"{block}:out"]
    attention = _attention_in(model, inputs, block)
    if before.shape != after.shape or before.ndim < 3 or (not attention and _linear_out(acts, block) is None):
        return {}
    z = f"{attention[0].removeprefix(block)}:attn.z" if attention else "- no attention in the block"
    ends = {"resid_pre": ":in", "resid_post": ":out", "attn.z": z, "resid_mid": _middle(acts, block)}
    return ends | _neurons(acts, block, attention)


def _attention_in(model: nn.Module, inputs: Inputs, block: str) -> list[str]:
    """The modules of a block that call attention, in order."""
    seen: list[str] = []
    try:
        with each_attention(model, f"{block}.**", lambda name, call: seen.append(name)):
            call_model(model, inputs)
    except InterpError:
        return []
    return [name for name in seen if "#" not in name]


def _middle(acts: Activations, block: str) -> str:
    """The first input of a module that is resid_pre plus what a module before has given."""
    before, earlier = acts[f"{block}:in"], list[Tensor]()
    for site, value in acts.items():
        if site == f"{block}:in" or "#" in site or value.shape != before.shape:
            continue
        if site.endswith(":out"):
            earlier.append(value)
        elif site.endswith(":in") and any(_equal(value, before + given) for given in reversed(earlier)):
            return site.removeprefix(block)
    return "- no module is given resid_pre plus what another gave: attention and MLP run in parallel?"


def _neurons(acts: Activations, block: str, attention: list[str]) -> dict[str, str]:
    """mlp.pre and mlp.post."""
    inside = tuple(f"{name}." for name in attention)
    sites = [site for site in acts if "#" not in site and not site.startswith(inside)]
    last = _linear_out(acts, block, sites)
    if last is None:
        why = "- no map to the model dim from another width: experts, or a fused MLP?"
        return {"mlp.pre": why, "mlp.post": why}
    width = acts[f"{last}:in"].shape
    for site in sites:
        out = site.removesuffix(":in") + ":out"
        if not site.endswith(":in") or out not in acts or site == f"{last}:in":
            continue
        if acts[site].shape == acts[out].shape == width and not acts[site].equal(acts[out]):
            return {"mlp.pre": site.removeprefix(block), "mlp.post": f"{last.removeprefix(block)}:in"}
    wide = [site for site in sites if site.endswith(":out") and acts[site].shape == width]
    pre = wide[0].removeprefix(block) if len(wide) == 1 else "- the activation function is no module"
    return {"mlp.pre": pre, "mlp.post": f"{last.removeprefix(block)}:in"}


def _linear_out(acts: Activations, block: str, sites: list[str] | None = None) -> str | None:
    """The last module that maps [B, T, F] to [B, T, D] with F other than D."""
    shape, found = acts[f"{block}:in"].shape, None
    for site in acts if sites is None else sites:
        name = site.removesuffix(":in")
        if site.endswith(":in") and f"{name}:out" in acts:
            given, made = acts[site].shape, acts[f"{name}:out"].shape
            if made == shape and given[:-1] == shape[:-1] and given[-1] != shape[-1]:
                found = name
    return found


def _equal(left: Tensor, right: Tensor) -> bool:
    if not left.is_floating_point():
        return False
    close = {torch.float64: 1e-12, torch.float32: 1e-5}.get(left.dtype, 2e-2)
    return bool((left - right).abs().max() <= close * right.abs().max())
