"""The parallel plan of a decoder as plain data; see `forge_parallel.plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from forge_model.declared import as_patterns, by_pattern, output_units, tensor_roles
from forge_model.decoder.pass_tables import attention_of
from forge_model.moe.layer import expert_layers

if TYPE_CHECKING:
    from forge_model.decoder.decoder import Decoder

BY_TOKEN = ["tokens", "labels", "doc_ids", "span_ids", "positions", "ahead_tokens", "ahead_labels"]
"""Inputs of every decoder that have a value for each token."""

OUTSIDE = ("embed", "position_embed", "norm", "head")
"""The modules outside of blocks."""


def blocks_of(decoder: Decoder) -> dict[str, nn.Module]:
    """Return the blocks by name, with those of multi-token prediction."""
    named = decoder.named_children()
    children = {name: dict(child.named_children()) for name, child in named if name in ("layers", "mtp")}
    blocks = {f"layers.{name}": block for name, block in children.get("layers", {}).items()}
    return blocks | {
        f"mtp.{k}.block": one.get_submodule("block") for k, one in children.get("mtp", {}).items()
    }


def plan_of(decoder: Decoder) -> dict[str, Any]:
    """Return the plan of a decoder, or of a part of one, collected from the declarations of its modules."""
    config, ahead = decoder.config, [f"mtp.{k}" for k in decoder.mtp]
    outside = [name for name in OUTSIDE if getattr(decoder, name) is not None]
    units = [[name for name in names if name in outside] for names in (OUTSIDE[:2], OUTSIDE[2:])]
    costs = config.layer_flops(config.max_tokens)
    attention = [name for name, module in decoder.named_modules() if hasattr(module, "attend")]
    if any(attention_of(block) is None for block in blocks_of(decoder).values()):
        attention = []  # what such a block attends to cannot be replaced: no context parallelism
    by_token = [name for name, kind in config.side_inputs().items() if kind == "token"]
    return {
        "blocks": "layers.*",
        "units": [*([] if config.tie_embeddings else [u for u in units if u]), *([name] for name in ahead)],
        "tensor": by_pattern(decoder, tensor_roles(decoder)),
        "stages": {
            "first": [*OUTSIDE[: 1 + config.learned_positions]],
            "last": ["norm", "head", *ahead],
            "tied": ["embed"] if config.tie_embeddings else [],
            "hidden": "hidden",
            "dim": config.dim * (1 + config.mtp.num_modules),
            "costs": costs,
            "last_cost": config.flops_per_token(config.max_tokens) / 3 - sum(costs),
        },
        "divisible": config.tensor_sizes(),
        "output_units": by_pattern(decoder, output_units(decoder)),
        "attention": as_patterns(decoder, attention),
        "experts": list(expert_layers(decoder)),
        "cut_experts": by_pattern(decoder, tensor_roles(decoder, "cut_roles")),
        "sequence_inputs": [*BY_TOKEN, *by_token],
        "no_fp8": [name for name in outside if name == "head"],
    }
