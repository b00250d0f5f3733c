"""Linear layers that multiply in 8-bit floats, by torchao."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forge_parallel.config import FP8Config
from forge_parallel.error import ParallelError
from forge_parallel.match import find, matches
from forge_parallel.plan import Plan
from forge_parallel.tensor import is_dtensor

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
    object.__setattr__(recipe, "enable_fsdp_float8_all_gather", config.gather)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name in chosen)
    return chosen


class Scales:
    """The scales of all weights that FSDP2 gathers in 8 bits, found by one maximum over ranks. Collective.

    They are found before a forward pass of the model if weights may have changed since: in every one, unless
    `last` says that more micro-batches of a step follow.

    Args:
        model: after FSDP2.
        mesh: what it is sharded over; its last dim cuts the weights.

    Attributes:
        last: whether the next forward pass is the last one of a step.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.last = True
        self._model, self._group = model, mesh.get_group(mesh.ndim - 1)
        self._stale = True
        # before that of FSDP2, which gathers
        model.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if self._stale or not model.training:
            self._find()
        self._stale = self.last or not model.training

    @torch.no_grad()
    def _find(self) -> None:
        from torchao.float8.float8_utils import amax_to_scale

        weights = [x for p in self._model.parameters() if (x := _gathered_in_8_bits(p)) is not None]
        if not weights:
            return
        values = [weight._tensor for weight in weights]
        tops = torch.stack([x.abs().amax() if x.numel() else x.new_zeros(()) for x in values])
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=self._group)
        for weight, scale in zip(weights, amax_to_scale(tops, weights[0]._dtype).unbind(), strict=True):
            weight._precomputed_scale = scale


def _gathered_in_8_bits(parameter: Tensor) -> Any:
    """The part of a weight that this rank holds, in the class of torchao; None for other parameters."""
    local = parameter._local_tensor if is_dtensor(parameter) else parameter  # type: ignore[attr-defined]
    return local if hasattr(local, "_precomputed_scale") else None


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
