"""What a value is in full when tensor parallelism holds only a part of it on this rank."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.attention.call import AttentionCall
from forge_interp.errors import InterpError
from forge_interp.hooks.sites import Site

_SAMPLE = 4096  # elements of a value that ranks compare
_TOLERANCE = 1e-2  # of the largest: kernels differ by less, other tokens or features by much more


class Spread:
    """How the values of one model are spread over the ranks of tensor parallelism.

    DTensors say it. For plain tensors it follows from the module's own weights: the output of a column-split
    linear layer, the input of a row-split one. Attention is split by heads (dim 1) if the module's weights
    are split and the ranks hold different queries. Any other plain tensor must be the same on all ranks,
    which the first at each site is held to. FSDP2 gathers parameters for the time of a forward pass, so that
    what is still a DTensor then, of a unit that runs, is split by tensor parallelism.

    Args:
        model: the model that runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # captured values may be kept for longer
        self._is_same: dict[str, bool] = {}
        dtensors = sys.modules.get("torch.distributed.tensor")
        self._is_spread = dtensors is not None and any(
            isinstance(p, dtensors.DTensor) for p in model.parameters()
        )

    def full(self, value: Tensor, module: nn.Module, site: Site, call: AttentionCall | None = None) -> Tensor:
        """The whole value of a site. Collective if the model is tensor parallel, else the value itself.

        Args:
            value: of any shape; what attention computed is [B, N, ...].
            module: whose site it is.
            site: where it was seen.
            call: the call that a value of attention belongs to.

        Raises:
            InterpError: each rank has a part, and nothing says which.
        """
        if _is_dtensor(value):
            return value.full_tensor()  # type: ignore[attr-defined]
        shown = (value,) if call is None else (call.query, call.value)
        split = self._split(value, module, site, shown) if self._is_spread else None
        if split is None:
            return value
        from torch.distributed.tensor import DTensor, Replicate, Shard

        weight, dim = split
        layout = [Shard(dim) if isinstance(p, Shard) else Replicate() for p in weight.placements]
        return DTensor.from_local(value, weight.device_mesh, layout, run_check=False).full_tensor()

    def is_partial(self, value: Tensor, module: nn.Module, site: Site) -> bool:
        """Whether this rank holds only a part of the value. Collective as `full`."""
        if _is_dtensor(value) or not self._is_spread:
            return _is_dtensor(value)
        return self._split(value, module, site, (value,)) is not None

    def _split(
        self, value: Tensor, module: nn.Module, site: Site, shown: tuple[Tensor, ...]
    ) -> tuple[Any, int] | None:
        """The weight that splits this value, and the dimension of the value which it splits."""
        if site.part == "attn":
            weight = next(_split_weights(module), None)
            if weight is None or self._is_same_everywhere(f"{site.module}:attn", *shown):
                return None
            return weight, 1
        weight = module._parameters.get("weight")  # an attribute that is computed is not to be computed here
        rows = {"out": 0, "in": 1, "kw": 1}[site.part]
        if any(weight is other for other in _split_weights(module)) and not isinstance(module, nn.Embedding):
            local = weight.to_local().shape[rows]  # type: ignore[union-attr, operator]
            if _split_dim(weight) == rows and value.shape[-1] == local != weight.shape[rows]:  # type: ignore[union-attr]
                return weight, value.ndim - 1
        if not self._is_same_everywhere(str(site.at(0)), value):
            raise InterpError(
                f"site {str(site)!r}: ranks of tensor parallelism hold different values, parts of what is "
                "split (a sequence, a vocabulary?); expected a whole value or a DTensor: name a site inside, "
                "such as the norm, or parallelize with use_local_output=False"
            )
        return None

    def _is_same_everywhere(self, key: str, *values: Tensor) -> bool:
        """Whether the ranks of tensor parallelism hold the same values; found out once for each key."""
        from torch._subclasses.fake_tensor import FakeTensor

        if isinstance(values[0], FakeTensor):
            return True
        if key not in self._is_same:
            model = self._model()
            groups = [] if model is None else _groups(model).values()
            self._is_same[key] = all([_is_same(value, group) for group in groups for value in values])
        return self._is_same[key]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds parameters of the model, or of a module in it."""
    return any(True for _ in _units(model))


def _is_dtensor(value: Tensor) -> bool:
    dtensors = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and isinstance(value, dtensors.DTensor)


def _units(model: nn.Module) -> Iterator[Any]:
    """The modules that FSDP2 has made its units."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (m for m in model.modules() if isinstance(m, fsdp.FSDPModule)) if fsdp is not None else iter(())


def _split_weights(module: nn.Module) -> Iterator[Any]:
    """The matrices in a module that tensor parallelism splits; what is split of experts is another thing."""
    from torch.distributed.tensor import DTensor

    resting = None
    for weight in module.parameters():
        if not isinstance(weight, DTensor) or weight.ndim != 2 or _split_dim(weight) is None:
            continue
        resting = _resting(module) if resting is None else resting
        if id(weight) not in resting:
            yield weight


def _resting(module: nn.Module) -> set[int]:
    """Ids of the parameters of FSDP2 units inside that are not gathered now: spread by data parallelism."""
    found: set[int] = set()
    for unit in _units(module):
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            if not group.is_unsharded:
                found |= {id(p.sharded_param) for p in group.fsdp_params}
    return found


def _split_dim(weight: Any) -> int | None:
    from torch.distributed.tensor import Shard

    return next((p.dim for p in weight.placements if isinstance(p, Shard)), None)


def _groups(model: nn.Module) -> dict[str, Any]:
    """The process groups over which matrices are split."""
    from torch.distributed.tensor import Shard

    found = {}
    for weight in _split_weights(model):
        for dim, placement in enumerate(weight.placements):
            if isinstance(placement, Shard):
                group = weight.device_mesh.get_group(dim)
                found[group.group_name] = group
    return found


def _is_same(value: Tensor, group: Any) -> bool:
    """Whether all ranks of a group hold about this value. Collective."""
    flat = value.detach().reshape(-1)
    sample = flat[:: max(1, -(-len(flat) // _SAMPLE))].float().nan_to_num()
    low = torch.zeros(_SAMPLE + 1, device=value.device)
    low[0], low[1 : 1 + len(sample)] = len(flat) % 2**20, sample
    high = low.clone()
    torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN, group)
    torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX, group)
    bound = _TOLERANCE * torch.maximum(low.abs(), high.abs())[1:].max()
    return bool(low[0] == high[0] and ((high - low)[1:] <= bound).all())
