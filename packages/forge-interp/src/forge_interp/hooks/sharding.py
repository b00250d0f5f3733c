"""What a value is in full when tensor parallelism holds only a part of it on this rank."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from forge_interp.hooks.sites import Site


def full(value: Tensor, module: nn.Module, site: Site) -> Tensor:
    """The whole value of a site. Collective if the module is tensor parallel, else the value itself.

    DTensors are gathered. Plain tensors are gathered where the layout follows from the module's own weights:
    the heads of attention (dim 1) whose projections are split, the output of a column-split linear layer, the
    input of a row-split one. FSDP2 gathers parameters for the time of a forward pass, so that what is still a
    DTensor then is split by tensor parallelism.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if isinstance(value, DTensor):
        return value.full_tensor()
    split = _split(value, module, site)
    if split is None:
        return value
    weight, dim = split
    layout = [Shard(dim) if isinstance(p, Shard) else Replicate() for p in weight.placements]
    return DTensor.from_local(value, weight.device_mesh, layout, run_check=False).full_tensor()


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds parameters of the model, or of a module in it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def is_partial(value: Tensor, module: nn.Module, site: Site) -> bool:
    """Whether this rank holds only a part of the value."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor) or _split(value, module, site) is not None


def _split(value: Tensor, module: nn.Module, site: Site) -> tuple[Any, int] | None:
    """The weight that splits this value, and the dimension of the value which it splits."""
    from torch.distributed.tensor import DTensor

    if site.part == "attn":
        weights = [p for p in module.parameters() if isinstance(p, DTensor) and _shards(p) is not None]
        return (weights[0], 1) if weights else None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, DTensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return None
    rows = {"out": 0, "in": 1, "kw": 1}[site.part]
    local = weight.to_local().shape[rows]
    is_split = _shards(weight) == rows and value.shape[-1] == local != weight.shape[rows]
    return (weight, value.ndim - 1) if is_split else None


def _shards(weight: Any) -> int | None:
    from torch.distributed.tensor import Shard

    return next((p.dim for p in weight.placements if isinstance(p, Shard)), None)
