"""Linear layers, and experts, that multiply in 8-bit floats, by torchao."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forge_parallel.error import ParallelError
from forge_parallel.fp8_config import FP8Config
from forge_parallel.match import find, matches
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import is_dtensor

CAPABILITIES = {"mxfp8": ((10, 0), "Blackwell")}
"""What a GPU needs, where it is not 8.9."""


CUT = {
    "colwise": "out_features",
    "gather_colwise": "out_features",
    "head": "out_features",
    "rowwise": "in_features",
}
"""The size that tensor parallelism divides, by the role of a layer."""


def use_fp8(model: nn.Module, plan: Plan, config: FP8Config, mesh: Mesh) -> list[str]:
    """Let linear layers, and experts, multiply in 8 bits, in place. Parameters keep their names and values.

    Args:
        model: best on the meta device.
        plan: the flat plan; uses `no_fp8` and `experts`.
        config: the section `[fp8]`.
        mesh: the grid of ranks.

    Returns:
        The names of these layers.

    Raises:
        ParallelError: the device has no 8-bit matmuls, no layer (of experts, if asked for) is left, or a
            pattern matches nothing. A pipeline stage may lack the layers of a pattern, and all layers.
    """
    _require_device(config, mesh.device)
    stage = mesh.pipeline.size > 1
    for pattern in [] if stage else config.exclude:
        find(model, pattern)
    chosen = eight_bit_layers(model, plan, config, 1 if mesh.tp is None else mesh.tp.size())
    multiple, experts = config.multiple, []
    if config.experts:
        from forge_parallel.fp8_experts import use_fp8_in_experts

        experts = use_fp8_in_experts(model, plan, config, multiple)
    if not (experts if config.experts else chosen) and not stage:
        what = "layer of experts (fp8.experts)" if config.experts else "layer"
        raise ParallelError(
            f'fp8.recipe = "{config.recipe}" fits no {what}: all are excluded, smaller than fp8.min_size = '
            f"{config.min_size}, or no multiple of {multiple}; change the limits or set the recipe to none"
        )
    convert = _to_mxfp8 if config.recipe == "mxfp8" else _to_float8
    convert(model, chosen, config)
    for name in chosen:
        layer: Any = model.get_submodule(name)
        layer.__class__ = _with(OfAnyTokens, type(layer))
        layer.multiple_of_tokens = config.multiple_of_tokens
    return chosen + experts


def eight_bit_layers(model: nn.Module, plan: Plan, config: FP8Config, tp: int) -> list[str]:
    """Return the linear layers that multiply in 8 bits, the same for any number of tp ranks.

    Args:
        model: best on the meta device.
        plan: the flat plan.
        config: the section `[fp8]`.
        tp: number of ranks that share each matrix.

    Raises:
        ParallelError: a rank would have a part of a layer whose sizes 8-bit products do not support.
    """
    chosen = [
        name
        for name, module in model.named_modules()
        if type(module).forward is nn.Linear.forward and _fits(name, module, plan, config)
    ]
    uneven = []
    for name in chosen if tp > 1 else ():
        role = next((role for pattern, role in plan.tensor.items() if matches(pattern, name)), "")
        size = getattr(model.get_submodule(name), CUT.get(role, ""), 0)
        units = next((found for pattern, found in plan.output_units.items() if matches(pattern, name)), [tp])
        size = size * min(units) // sum(units)
        if size % (config.multiple * min(tp, *units)):
            uneven.append(f"{name} ({size})")
    if uneven:
        more = f" and {len(uneven) - 3} more" if len(uneven) > 3 else ""
        raise ParallelError(
            f'fp8.recipe = "{config.recipe}" with mesh.tp = {tp}: {", ".join(uneven[:3])}{more} would be cut '
            f"to sizes that are no multiples of {config.multiple}; name them in fp8.exclude, or use another "
            "mesh.tp"
        )
    return chosen


class OfAnyTokens(nn.Module):
    """A mixin that pads the input of a linear layer to a multiple of tokens, as 8-bit products need.

    The numbers of image patches and of tokens of one kind depend on the data. Zeros change no sum and no
    scale.

    Attributes:
        multiple_of_tokens: the padded number of tokens is a positive multiple of this.
    """

    multiple_of_tokens: int

    def forward(self, x: Tensor) -> Tensor:
        """As before: [..., I] -> [..., O]."""
        tokens = x.numel() // x.shape[-1]
        missing = max(1, -(-tokens // self.multiple_of_tokens)) * self.multiple_of_tokens - tokens
        if not missing:
            return super().forward(x)
        wide = F.pad(x.reshape(tokens, x.shape[-1]), (0, 0, 0, missing))
        out = super().forward(wide)[:tokens]
        return out.reshape(*x.shape[:-1], out.shape[-1])


def _to_float8(model: nn.Module, chosen: list[str], config: FP8Config) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(config.recipe)  # pyright: ignore[reportArgumentType]
    object.__setattr__(recipe, "emulate", config.emulate)
    object.__setattr__(recipe, "enable_fsdp_float8_all_gather", config.gather)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name in chosen)


def _to_mxfp8(model: nn.Module, chosen: list[str], config: FP8Config) -> None:
    """Use one power of two as scale for 32 neighbouring numbers (OCP Microscaling Formats 1.0, 2023)."""
    try:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    except ImportError as error:
        raise ParallelError(f'fp8.recipe = "mxfp8" needs torchao 0.18: {error}; upgrade it') from None
    kernels = KernelPreference.EMULATED if config.emulate else KernelPreference.AUTO
    rounding = ScaleCalculationMode.RCEIL
    for name in chosen:
        layer: Any = model.get_submodule(name)
        layer.__class__ = _with(MXFP8Linear, type(layer))
        layer.kernel_preference, layer.scale_calculation_mode, layer.wgrad_with_hp = kernels, rounding, False


@cache
def _with(first: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (first, base), {"__module__": base.__module__})


class Scales:
    """The scales of all weights that FSDP2 gathers in 8 bits, found by one maximum over ranks. Collective.

    They are found before each forward pass in which weights may have changed: in every one, unless `last`
    says that more micro-batches of a step follow.

    Args:
        model: after FSDP2.
        mesh: the mesh the model is sharded over; its last dim shards the weights.

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
        tops = torch.stack([_largest(x) for x in values])
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=self._group)
        for weight, scale in zip(weights, amax_to_scale(tops, weights[0]._dtype).unbind(), strict=True):
            weight._precomputed_scale = scale


def _largest(x: Tensor) -> Tensor:
    """Return [] the largest absolute value, without a copy of all of them."""
    return torch.linalg.vector_norm(x, torch.inf) if x.numel() else x.new_zeros(())


def _gathered_in_8_bits(parameter: Tensor) -> Any:
    """Return this rank's shard of a weight, in the class of torchao; None for other parameters."""
    local = parameter._local_tensor if is_dtensor(parameter) else parameter  # type: ignore[attr-defined]
    return local if hasattr(local, "_precomputed_scale") else None


def _require_device(config: FP8Config, device: torch.device) -> None:
    least, made = CAPABILITIES.get(config.recipe, ((8, 9), "Ada, Hopper"))
    if config.emulate or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= least):
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    raise ParallelError(
        f'fp8.recipe = "{config.recipe}" needs a GPU of compute capability {least[0]}.{least[1]} ({made}) or '
        f"newer, not {name}; set fp8.emulate = true to try it without speed, or fp8.recipe to none"
    )


def _fits(name: str, layer: nn.Module, plan: Plan, config: FP8Config) -> bool:
    """Whether a layer is large enough, and has sizes that 8-bit products support."""
    assert isinstance(layer, nn.Linear)
    sizes = layer.in_features, layer.out_features
    return (
        min(sizes) >= config.min_size
        and not any(size % config.multiple for size in sizes)
        and not any(matches(pattern, name) for pattern in (*plan.no_fp8, *config.exclude))
    )
