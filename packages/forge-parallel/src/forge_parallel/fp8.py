"""Linear layers that multiply in 8-bit floats, by torchao."""

from __future__ import annotations

import torch
from torch import nn

from forge_parallel.config import FP8Config
from forge_parallel.error import ParallelError
from forge_parallel.match import find, matches
from forge_parallel.plan import Plan

MULTIPLE = 16
"""Sizes of 8-bit matmuls."""


def use_fp8(model: nn.Module, plan: Plan, config: FP8Config, device: torch.device) -> list[str]:
    """Let linear layers multiply in 8 bits, in place. Names and values of parameters do not change.

    Args:
        model: best on the meta device.
        plan: `no_fp8` is used.
        config: the section `[fp8]`.
        device: that it will run on.

    Returns:
        The names of these layers.

    Raises:
        ParallelError: the device cannot, no layer is left, or a pattern names nothing.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    _require_device(config, device)
    for pattern in config.exclude:
        find(model, pattern)
    chosen = [
        name
        for name, module in model.named_modules()
        if type(module).forward is nn.Linear.forward and _fits(name, module, plan, config)
    ]
    if not chosen:
        raise ParallelError(
            f'fp8.recipe = "{config.recipe}" fits no layer: all are excluded, smaller than fp8.min_size = '
            f"{config.min_size}, or no multiple of {MULTIPLE}; change the limits or set the recipe to none"
        )
    recipe = Float8LinearConfig.from_recipe_name(config.recipe)  # pyright: ignore[reportArgumentType]
    object.__setattr__(recipe, "emulate", config.emulate)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name in chosen)
    return chosen


def _require_device(config: FP8Config, device: torch.device) -> None:
    if config.emulate or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)):
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    raise ParallelError(
        f'fp8.recipe = "{config.recipe}" needs a GPU of compute capability 8.9 (Ada, Hopper) or newer, not '
        f"{name}; set fp8.emulate = true to try it without speed, or fp8.recipe to none"
    )


def _fits(name: str, layer: nn.Module, plan: Plan, config: FP8Config) -> bool:
    assert isinstance(layer, nn.Linear)
    sizes = (layer.in_features, layer.out_features)
    return (
        min(sizes) >= config.min_size
        and not any(size % MULTIPLE for size in sizes)
        and not any(matches(pattern, name) for pattern in (*plan.no_fp8, *config.exclude))
    )
