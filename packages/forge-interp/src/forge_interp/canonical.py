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
    mlp.post: what the last map from another width to D is given, outside of attention and behind resid_mid;
    mlp.pre: what the activation function is given there. Neither is there where a block has experts. Blocks
    of the same modules with weights of the same shapes are mapped alike, by the first of them.

    `inputs` are a small batch, as for `record`; the model runs twice for each kind of blocks. InterpError
    where no list of blocks ran.
    """
    found = CanonicalSites()
    modules = named_modules(model)
    stacks = [name for name, module in modules.items() if _is_stack(module)]
    stacks = [name for name in stacks if len(list(modules[name].children())) > 0]
    stacks = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    mapped: dict[str, dict[str, dict[str, str]]] = {}
    for stack in stacks:
        kinds: dict[str, dict[str, str]] = {}
        for index, block in modules[stack].named_children():
            kind = structure(block)
            if kind not in kinds:
                kinds[kind] = _map_block(model, inputs, f"{stack}.{index}".removeprefix("."), block)
            if kinds[kind]:
                mapped.setdefault(stack, {})[index] = kinds[kind]
        if not any(_is_of_block(places) for places in kinds.values()):
            mapped.pop(stack, None)
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


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a list of modules; a mapping is one where its keys are numbers."""
    is_numbered = isinstance(module, nn.ModuleDict) and all(map(str.isdigit, module))
    return is_numbered or isinstance(module, nn.ModuleList | nn.Sequential)


def structure(block: nn.Module) -> str:
    """Names, classes and shapes of weights of all modules in a block."""
    return repr(
        [
            (name, type(module).__qualname__, [tuple(p.shape) for p in module.parameters(recurse=False)])
            for name, module in block.named_modules()
        ]
    )


def _is_of_block(places: dict[str, str]) -> bool:
    """Whether what was found tells a block from any module that keeps the shape of its input."""
    return any(name in places and places[name][0] != "-" for name in ("attn.z", "mlp.post"))


def _map_block(model: nn.Module, inputs: Inputs, name: str, block: nn.Module) -> dict[str, str]:
    """Canonical name to what follows the name of the block in a site, or "- reason"; {} if it is no block."""
    try:
        with capture(model, [f"{name}.**:in", f"{name}.**:out", f"{name}:in"]) as acts:
            call_model(model, inputs)
    except InterpError:
        return {}
    if f"{name}:in" not in acts or f"{name}:out" not in acts:
        return {}
    before, after = acts[f"{name}:in"], acts[f"{name}:out"]
    if before.shape != after.shape or before.ndim < 3:
        return {}
    attention = _attention_in(model, inputs, name)
    z = f"{attention[0].removeprefix(name)}:attn.z" if attention else "- no attention in the block is seen"
    ends = {"resid_pre": ":in", "resid_post": ":out", "attn.z": z, "resid_mid": _middle(acts, name)}
    return ends | _neurons(acts, name, attention, ends["resid_mid"], block)


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


def _neurons(
    acts: Activations, block: str, attention: list[str], middle: str, module: nn.Module
) -> dict[str, str]:
    """mlp.pre and mlp.post."""
    inside = tuple(f"{name}." for name in attention)
    sites = [site for site in acts if "#" not in site and not site.startswith(inside)]
    if not middle.startswith("-"):  # a mixer of tokens before it has such a map, too
        after = acts.keys() - set(list(acts)[: list(acts).index(block + middle)])
        sites = [site for site in sites if site in after]
    last = _linear_out(acts, block, sites)
    why = None
    parts = {f"{block}.{name}.": part for name, part in module.named_modules()}
    if any(_has_experts(part) for name, part in parts.items() if not name.startswith(inside)):
        why = "- several maps of one shape, as experts have, each with an MLP of its own"
    elif middle.startswith("-") and not attention:
        why = "- the block has one part, of which it is unknown whether it is an MLP"
    elif last is None:
        why = "- no map to the model dim from another width: a fused MLP?"
    if last is None or why is not None:
        return dict.fromkeys(("mlp.pre", "mlp.post"), why or "")
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


def _has_experts(module: nn.Module) -> bool:
    """Whether it has several maps of one shape, of which a token may take some: one tensor, or a list."""
    if isinstance(module, nn.ModuleList):
        children = [structure(child) for child in module]
        return len(children) > 1 and len(set(children)) == 1
    is_convolution = hasattr(module, "kernel_size")
    return not is_convolution and any(
        p.ndim == 3 and min(p.shape) > 1 for p in module.parameters(recurse=False)
    )


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
