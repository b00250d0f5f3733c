"""Where do the places that papers name sit in this model: residual stream, heads, neurons?

One run of the model on example inputs shows the places: no module name is guessed, and a missing place is
reported. Letters: B batch, T tokens, D model dim, F width of the MLP.
"""

from contextlib import suppress

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.capture import Activations, capture, each_attention
from forge_interp.hooks.sites import named_modules
from forge_interp.model_inputs import Inputs, call_model


class CanonicalSites(dict[str, str]):
    """Sites by canonical name, `blocks.3.resid_pre`; `print` shows all names, also those without a site.

    With several stacks of blocks (encoder and decoder), the name of the stack stands in place of `blocks`.
    `missing` maps each name without a site to the reason.
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

    resid_pre and resid_post are input and output of the block. resid_mid is the first value in the block that
    equals resid_pre plus the output of one of its modules. attn.z belongs to the first attention call in the
    block. mlp.post is the input of the last map from another width to D outside of attention and after
    resid_mid; mlp.pre is the input of its activation function. A block with experts has neither. Blocks
    with the same modules and shapes of weights are mapped as the first of them.

    `inputs` are a small batch; the model runs twice per kind of block. InterpError: no list of blocks ran.
    """
    found, modules = CanonicalSites(), named_modules(model)
    mapped: dict[str, dict[str, dict[str, str]]] = {}  # stack -> index -> canonical name -> place
    for stack in _stacks(modules):
        kinds: dict[str, dict[str, str]] = {}
        for index, block in modules[stack].named_children():
            if (kind := structure(block)) not in kinds:
                kinds[kind] = _map_block(model, inputs, f"{stack}.{index}".removeprefix("."), block)
            mapped.setdefault(stack, {})[index] = kinds[kind]
        inner = [places.get(name, "-") for places in kinds.values() for name in ("attn.z", "mlp.post")]
        if all(place.startswith("-") for place in inner):  # any module keeps the shape of its input
            mapped.pop(stack)
    for stack, blocks in mapped.items():
        prefix = stack if len(mapped) > 1 else "blocks"
        for index, name, place in ((i, *item) for i, places in blocks.items() for item in places.items()):
            if place.startswith("-"):
                found.missing[f"{prefix}.{index}.{name}"] = place[2:]
            else:
                found[f"{prefix}.{index}.{name}"] = f"{stack}.{index}".removeprefix(".") + place
    if not found:
        raise InterpError(
            f"{type(model).__name__} ran no list of blocks that keep the shape of their input; expected "
            "ModuleLists such as layers.0, layers.1: name the sites yourself, resolve(model, '**') lists them"
        )
    return found


def _stacks(modules: dict[str, nn.Module]) -> list[str]:
    """Return the outermost lists of modules; a mapping counts as a list if its keys are numbers."""
    kinds = nn.ModuleList | nn.Sequential | nn.ModuleDict
    children = {name: list(module._modules) for name, module in modules.items() if isinstance(module, kinds)}
    found = [name for name, keys in children.items() if keys and all(map(str.isdigit, keys))]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def structure(block: nn.Module) -> str:
    """Return names, classes and shapes of weights of all modules in a block."""
    return repr(
        [
            (name, type(module).__qualname__, [tuple(p.shape) for p in module.parameters(recurse=False)])
            for name, module in block.named_modules()
        ]
    )


def _map_block(model: nn.Module, inputs: Inputs, name: str, block: nn.Module) -> dict[str, str]:
    """Map each canonical name to its site without the block's name, or to "- reason"; {}: no block."""
    try:
        with capture(model, [f"{name}.**:in", f"{name}.**:out", f"{name}:in"]) as acts:
            call_model(model, inputs)
    except InterpError:
        return {}
    before, after = acts.get(f"{name}:in"), acts.get(f"{name}:out")
    if before is None or after is None or before.shape != after.shape or before.ndim < 3:
        return {}
    attention: list[str] = []
    with (
        suppress(InterpError),
        each_attention(model, f"{name}.**", lambda module, call: attention.append(module)),
    ):
        call_model(model, inputs)
    attention = [module for module in attention if "#" not in module]
    z = f"{attention[0].removeprefix(name)}:attn.z" if attention else "- no attention in the block is seen"
    middle = _middle(acts, name)
    neurons = _neurons(acts, name, attention, middle, block)
    return {"resid_pre": ":in", "attn.z": z, "resid_mid": middle} | neurons | {"resid_post": ":out"}


def _middle(acts: Activations, block: str) -> str:
    """Return the first module input that equals resid_pre plus the output of an earlier module."""
    before, earlier = acts[f"{block}:in"], list[Tensor]()
    for site, value in acts.items():
        if site == f"{block}:in" or "#" in site or value.shape != before.shape:
            continue
        if site.endswith(":out"):
            earlier.append(value)
        elif any(_equal(value, before + given) for given in reversed(earlier)):
            return site.removeprefix(block)
    return "- no module is given resid_pre plus what another gave: attention and MLP run in parallel?"


def _neurons(
    acts: Activations, block: str, attention: list[str], middle: str, module: nn.Module
) -> dict[str, str]:
    """Return the sites of mlp.pre and mlp.post."""
    inside = tuple(f"{name}." for name in attention)
    sites = list(acts)
    if not middle.startswith("-"):  # a mixer of tokens before it has such a map, too
        sites = sites[sites.index(block + middle) :]
    sites = [site for site in sites if "#" not in site and not site.startswith(inside)]
    shape, last = acts[f"{block}:in"].shape, ""  # the last module that maps [B, T, F] to [B, T, D]
    calls = [site.removesuffix(":in") for site in sites if site.endswith(":in")]
    calls = [name for name in calls if f"{name}:out" in acts]
    for name in calls:
        given, made = acts[f"{name}:in"].shape, acts[f"{name}:out"].shape
        if made == shape and given[:-1] == shape[:-1] and given[-1] != shape[-1]:
            last = name
    parts = {f"{block}.{name}.": part for name, part in module.named_modules()}
    why = None
    if any(_has_experts(part) for name, part in parts.items() if not name.startswith(inside)):
        why = "- several maps of one shape, as experts have, each with an MLP of its own"
    elif middle.startswith("-") and not attention:
        why = "- the block has one part, of which it is unknown whether it is an MLP"
    elif not last:
        why = "- no map to the model dim from another width: a fused MLP?"
    if why is not None:
        return dict.fromkeys(("mlp.pre", "mlp.post"), why)
    width = acts[f"{last}:in"].shape
    wide = [name for name in calls if name != last and acts[f"{name}:out"].shape == width]
    bent = [n for n in wide if acts[f"{n}:in"].shape == width and not acts[f"{n}:in"].equal(acts[f"{n}:out"])]
    outs = [site for site in sites if site.endswith(":out") and acts[site].shape == width]
    pre = f"{bent[0]}:in" if bent else outs[0] if len(outs) == 1 else ""
    pre = pre.removeprefix(block) or "- the activation function is no module"
    return {"mlp.pre": pre, "mlp.post": f"{last.removeprefix(block)}:in"}


def _has_experts(module: nn.Module) -> bool:
    """Whether a token may take one of several maps of the same shape: the maps are one tensor, or a list."""
    if isinstance(module, nn.ModuleList):
        children = [structure(child) for child in module]
        return len(children) > 1 and len(set(children)) == 1
    is_convolution = hasattr(module, "kernel_size")
    return not is_convolution and any(
        p.ndim == 3 and min(p.shape) > 1 for p in module.parameters(recurse=False)
    )


def _equal(left: Tensor, right: Tensor) -> bool:
    if not left.is_floating_point():
        return False
    close = {torch.float64: 1e-12, torch.float32: 1e-5}.get(left.dtype, 2e-2)
    return bool((left - right).abs().max() <= close * right.abs().max())
