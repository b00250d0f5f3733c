"""Which values of a model are whole on this rank when tensor parallelism splits its matrices?"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.attention.placement import is_dtensor
from forge_interp.errors import InterpError
from forge_interp.hooks.engine.torch_private import fsdp_parameters
from forge_interp.hooks.sites import Site, unwrapped

_SAMPLE = 4096  # elements of a value that ranks compare
_TOLERANCE = 1e-2  # of the largest: kernels differ by less, other tokens or features by much more


class Spread:
    """What is known of a model, parallelized already, whose matrices are split over ranks.

    A plain tensor must be the same on all ranks, which the first at each site is held to: else each rank has
    a part. Heads of attention, and what a split linear layer is given or gives, are parts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._shapes: dict[int, torch.Size] = {}  # of split matrices, by the id of their module
        self._groups: dict[str, Any] = {}
        self._device = "cpu"
        for module, mesh, placements, shape in _split_matrices(model):
            self._shapes[id(module)], self._device = shape, mesh.device_type
            groups = [mesh.get_group(i) for i, p in enumerate(placements) if p.is_shard()]
            self._groups |= {group.group_name: group for group in groups}
        self._same: set[str] = set()

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether matrices of the model are split over ranks."""
        return bool(self._groups)

    def full(self, value: Tensor, module: nn.Module, site: Site) -> Tensor:
        """The whole value of a site. Collective if the model is tensor parallel, else the value itself.

        InterpError where each rank has a part of a plain tensor.
        """
        if is_dtensor(value):
            return value.full_tensor()  # type: ignore[attr-defined]
        if not self.is_whole(value, module, site):
            raise InterpError(
                f"site {str(site)!r}: each rank of tensor parallelism holds only a part of it (heads, "
                "features, a sequence); expected a whole value or a DTensor: name a site around it, such as "
                "the output of the block, or shard the model with FSDP2 in place of tensor parallelism"
            )
        return value

    def is_whole(self, value: Tensor, module: nn.Module, site: Site) -> bool:
        """Whether this rank holds all of a value, as a plain tensor. Collective as `full`."""
        if is_dtensor(value) or not self._groups:
            return not is_dtensor(value)
        if site.part == "attn":
            inside = any(id(part) in self._shapes for part in module.modules())
            return not inside and self._is_same(str(site.numbered(0)), value)
        module = unwrapped(module)
        if isinstance(module, nn.Linear) and value.ndim and id(module) in self._shapes:
            outputs, inputs = self._shapes[id(module)]
            if value.shape[-1] != (outputs if site.part == "out" else inputs):
                return False
        return self._is_same(str(site.numbered(0)), value)

    def _is_same(self, key: str, value: Tensor) -> bool:
        """Whether all ranks hold about this value, found out once a key."""
        if key not in self._same:
            sample = _sample(value)
            high, low = self._largest(sample), -self._largest(-sample)
            bound = _TOLERANCE * torch.maximum(low.abs(), high.abs())[1:].max()
            if low[0] == high[0] and ((high - low)[1:] <= bound).all():
                self._same.add(key)
        return key in self._same

    def _largest(self, numbers: Tensor) -> Tensor:
        """Of each number the largest on all ranks of all groups."""
        numbers = numbers.to(self._device, copy=True)
        for group in self._groups.values():
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group)
        return numbers.cpu()


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds parameters of the model, or of a module in it."""
    return any(is_unit(module) for module in model.modules())


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP2 has made a module one of its units."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _sample(value: Tensor) -> Tensor:
    """[1 + _SAMPLE] float32 on the CPU: the length, and elements at even steps."""
    value = value.detach()
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    found = flat[:: (-(-len(flat) // _SAMPLE)) | 1][:_SAMPLE].float().nan_to_num().cpu()
    return torch.cat([torch.tensor([float(len(flat) % 2**20)]), found, found.new_zeros(_SAMPLE - len(found))])


def _split_matrices(model: nn.Module) -> Iterator[tuple[nn.Module, Any, Any, torch.Size]]:
    """Module, mesh, placements and full shape of what tensor parallelism splits, but for experts."""
    found: list[tuple[nn.Module, Any, Any, torch.Size]] = []
    of_fsdp: set[int] = set()
    for module, spec in (pair for unit in model.modules() if is_unit(unit) for pair in fsdp_parameters(unit)):
        of_fsdp.add(id(module))
        if spec is not None:
            found.append((module, spec.mesh, spec.placements, spec.tensor_meta.shape))
    for module in (module for module in model.modules() if id(module) not in of_fsdp):
        for weight in filter(is_dtensor, module._parameters.values()):
            found.append((module, weight.device_mesh, weight.placements, weight.shape))  # type: ignore[union-attr]
    return (split for split in found if len(split[3]) == 2 and any(p.is_shard() for p in split[2]))
