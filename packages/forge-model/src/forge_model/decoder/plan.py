"""What may be done to a decoder in parallel, as plain data; see `forge_parallel.plan`."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn

from forge_model.moe.layer import moe_layers

if TYPE_CHECKING:
    from forge_model.decoder.decoder import Decoder

PREFIXES = ("layers.*", "mtp.*.block")
"""Where blocks are."""

BLOCK_ROLES = {
    "attention": "gather",
    "attention.w[qkv]": "colwise",
    "attention.w*_up": "colwise",
    "attention.w*_down": "replicated",
    "attention.kv_norm": "replicated",
    "attention.wo": "rowwise",
    "attention.sinks": "heads",
    "attention_norm": "norm",
    "attention_post_norm": "norm",
    "ffn_norm": "norm",
    "ffn_post_norm": "norm",
}
"""What the parts of a block are under tensor parallelism; those of the feed-forward depend on its kind."""


def plan_of(decoder: Decoder) -> dict[str, Any]:
    """The plan of a decoder, or of a part of one."""
    config, ahead = decoder.config, [f"mtp.{k}" for k in decoder.mtp]
    outside = [name for name in ("embed", "norm", "head") if getattr(decoder, name) is not None]
    units = [[name for name in names if name in outside] for names in (["embed"], ["norm", "head"])]
    costs = config.layer_flops(config.max_tokens)
    return {
        "blocks": "layers.*",
        "units": [*([] if config.tie_embeddings else [u for u in units if u]), *([name] for name in ahead)],
        "tensor": _tensor_roles(decoder) | {name: name for name in outside},
        "stages": {
            "first": ["embed"],
            "last": ["norm", "head", *ahead],
            "hidden": "hidden",
            "dim": config.dim * (1 + config.mtp.num_modules),
            "costs": costs,
            "last_cost": config.flops_per_token(config.max_tokens) / 3 - sum(costs),
        },
        "divisible": config.tensor_sizes(),
        "attention": [f"{prefix}.attention" for prefix in (PREFIXES if ahead else PREFIXES[:1])],
        "experts": list(moe_layers(decoder)),
        "sequence_inputs": ["tokens", "labels", "doc_ids", "positions", "ahead_tokens", "ahead_labels"],
        "no_fp8": [name for name in outside if name == "head"],
    }


def _tensor_roles(decoder: Decoder) -> dict[str, str]:
    roles = {f"{prefix}.{part}": role for prefix in PREFIXES for part, role in BLOCK_ROLES.items()}
    roles |= {"mtp.*.project": "tokenwise", "mtp.*.*norm": "norm"}
    blocks: dict[str, nn.Module] = {f"layers.{name}": block for name, block in decoder.layers.items()}
    blocks |= {f"mtp.{k}.block": module.get_submodule("block") for k, module in decoder.mtp.items()}
    experts = list(moe_layers(decoder))
    dense = [f"{name}.ffn" for name in blocks if f"{name}.ffn" not in experts]
    for ffn in dense if experts else [f"{prefix}.ffn" for prefix in PREFIXES]:
        roles |= {ffn: "gather", f"{ffn}.w_[gu]*": "colwise", f"{ffn}.w_down": "rowwise"}
    for ffn in experts:
        parts = ("router", "experts", "shared.w_*", "shared_gate")
        roles |= {f"{ffn}.{part}": "tokenwise" for part in parts}
    over_head = {name: getattr(one.attention, "norm_heads", True) for name, one in blocks.items()}
    alike = all(over_head.values())
    for name, over in (dict.fromkeys(PREFIXES, True) if alike else over_head).items():
        roles[f"{name}.attention.[qk]_norm"] = "head_norm" if over else "cut_norm"
    names = [name for name, _ in decoder.named_modules()]
    return {pattern: role for pattern, role in roles.items() if fnmatch.filter(names, pattern)}
