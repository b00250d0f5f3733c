"""What is the full value when tensor parallelism holds only a part of it on this rank?"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.attention.placement import is_dtensor, joined
from forge_interp.errors import InterpError
from forge_interp.hooks.engine.torch_private import fsdp_parameters
from forge_interp.hooks.sites import ATTENTION_TENSORS, Site, unwrapped

_SAMPLE = 4096  # elements of a value that ranks compare
_TOLERANCE = 1e-2  # of the largest: kernels differ by less, other tokens or features by much more
_HIDDEN = 6e4  # scores of hidden keys are larger, in float16 too: they would dwarf what differs


@dataclass(frozen=True)
class _Layout:
    """How tensor parallelism splits a matrix: mesh without the dims of FSDP, placements, full shape."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size

    @property
    def dim(self) -> int:
        """The split dimension."""
        return next(p.dim for p in self.placements if p.is_shard())

    @property
    def groups(self) -> list[Any]:
        """The process groups over which the matrix is split."""
        return [self.mesh.get_group(i) for i, p in enumerate(self.placements) if p.is_shard()]

    def gathered(self, value: Tensor, dim: int, size: int) -> Tensor:
        """Gather a value whose `dim`, in full `size` long, is split as this matrix is. Collective."""
        from torch.distributed.tensor import Replicate, Shard

        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        split = [Shard(dim) if p.is_shard() else Replicate() for p in self.placements]
        return joined(value.contiguous(), self.mesh, split, shape).full_tensor()

    def local_size(self) -> int:
        """Return the length of the split dimension on this rank."""
        size = self.shape[self.dim]
        for i, placement in enumerate(self.placements):
            if placement.is_shard():
                chunk = -(-size // self.mesh.size(i))
                size = max(0, min(chunk, size - chunk * self.mesh.get_local_rank(i)))
        return size


class Spread:
    """How the values of one parallelized model are spread over the ranks of tensor parallelism.

    A DTensor says how it is spread. A plain tensor is split if it is the output of a column-split or the
    input of a row-split linear layer. Attention is split by heads if its module has split weights and the
    ranks hold different heads. Any other plain tensor must be equal on all ranks (checked once a site).
    """

    def __init__(self, model: nn.Module) -> None:
        self._layouts = {id(module): layout for module, layout in _layouts(model)}
        self._groups = {g.group_name: g for layout in self._layouts.values() for g in layout.groups}
        self._same: set[str] = set()

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether matrices of the model are split over ranks."""
        return bool(self._layouts)

    def full(self, value: Tensor, module: nn.Module, site: Site, followed: Tensor | None = None) -> Tensor:
        """Return the full value of a site. Collective if the model is tensor parallel, else the value itself.

        Values of attention are [..., N, T, H], [..., N, T, S] or [..., N, T]. `followed` is the query if such
        a value depends on the query; without it the value itself is compared between ranks. InterpError where
        ranks hold parts that no weight explains, or heads are split unevenly.
        """
        if is_dtensor(value):
            return value.full_tensor()  # type: ignore[attr-defined]
        split = self._split(value, module, site, followed)
        if split is None:
            return value
        layout, dim, size = split
        whole = layout.gathered(value, dim, size)
        if site.part == "attn" and site.path[0] in ("k", "v"):  # several ranks may have each head
            said = (getattr(inner, "shared_units", None) for inner in module.modules())
            heads = next((heads for heads in said if heads is not None), size)
            whole = whole.unflatten(dim, (heads, -1)).select(dim + 1, 0)
        return whole

    def is_partial(self, value: Tensor, module: nn.Module, site: Site) -> bool:
        """Whether this rank holds only a part of the value, or a DTensor. Collective like `full`."""
        return is_dtensor(value) or self._split(value, module, site, None) is not None

    def together(self, act: Callable[[], None]) -> None:
        """Call `act`, which may raise InterpError on one rank: then all raise and none waits. Collective."""
        failure = None
        try:
            act()
        except InterpError as error:
            failure = error
        failures = torch.tensor([float(failure is not None)])
        has_failed = bool((self._largest(failures) if self._groups else failures).any())
        if failure is not None:
            raise failure
        if has_failed:
            raise InterpError("another rank of tensor parallelism raised an InterpError, which says why")

    def _split(
        self, value: Tensor, module: nn.Module, site: Site, followed: Tensor | None
    ) -> tuple[_Layout, int, int] | None:
        """Return the matrix that splits this value, the split dimension of the value, and its full size."""
        if not self._layouts:
            return None
        if site.part == "attn":
            return self._split_heads(value, module, site, value if followed is None else followed)
        module = unwrapped(module)
        layout = self._layouts.get(id(module)) if isinstance(module, nn.Linear) else None
        rows = {"out": 0, "in": 1, "kw": 1}[site.part]
        width = value.shape[-1] if value.ndim else 0
        if layout is not None and layout.dim == rows and width == layout.local_size() != layout.shape[rows]:
            return layout, value.ndim - 1, layout.shape[rows]
        if not self._is_same(str(site.numbered(0)), value, unclear=True):
            raise InterpError(
                f"site {str(site)!r}: ranks of tensor parallelism hold different values, parts of what is "
                "split (a sequence, a vocabulary?); expected a whole value or a DTensor: name a site inside, "
                "such as the norm, or parallelize with use_local_output=False"
            )
        return None

    def _split_heads(
        self, value: Tensor, module: nn.Module, site: Site, followed: Tensor
    ) -> tuple[_Layout, int, int] | None:
        name = site.path[0]
        dim = value.ndim - (3 if name in ATTENTION_TENSORS else 2)
        inside = (self._layouts[id(m)] for m in module.modules() if id(m) in self._layouts)
        layout = next(inside, None)
        if layout is None or dim < 0:
            return None
        key = f"{site.module}:attn.{name if name in ('k', 'v') else 'q'}"
        if self._is_same(key, followed, unclear=False):
            return None
        most, least = self._largest(torch.tensor([value.shape[dim], -value.shape[dim]])).abs().tolist()
        if least != most:
            raise InterpError(f"site {str(site)!r}: ranks hold {least} to {most} heads; expected as many")
        return layout, dim, value.shape[dim] * math.prod(group.size() for group in layout.groups)

    def _is_same(self, key: str, value: Tensor, *, unclear: bool) -> bool:
        """Whether all ranks hold nearly this value, found once per key; `unclear` where it is constant."""
        if key in self._same:
            return True
        sample = _sample(value)
        high, low = self._largest(sample), -self._largest(-sample)
        sizes = torch.maximum(low.abs(), high.abs())[1:]
        bound = _TOLERANCE * sizes.where(sizes >= _HIDDEN, sizes.where(sizes < _HIDDEN, 0).max())
        if not (low[0] == high[0] and ((high - low)[1:] <= bound).all()):
            return False
        length = min(value.numel(), _SAMPLE)
        if length > 1 and high[1 : 1 + length].min() == high[1 : 1 + length].max():
            return unclear
        self._same.add(key)
        return True

    def _largest(self, numbers: Tensor) -> Tensor:
        """Return the maximum of each number over all ranks of all groups."""
        numbers = numbers.to(next(iter(self._layouts.values())).mesh.device_type, copy=True)
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
    """Return [1 + _SAMPLE] float32 on the CPU: the length, and elements at even steps."""
    value = value.detach()
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    found = flat[:: (-(-len(flat) // _SAMPLE)) | 1][:_SAMPLE].float().nan_to_num().cpu()
    return torch.cat([torch.tensor([float(len(flat) % 2**20)]), found, found.new_zeros(_SAMPLE - len(found))])


def _layouts(model: nn.Module) -> Iterator[tuple[nn.Module, _Layout]]:
    """Yield the matrices that tensor parallelism splits, sharded by FSDP2 or not; 3D experts are left out."""
    found: list[tuple[nn.Module, Any, Any, torch.Size]] = []
    of_fsdp: set[int] = set()
    for module, spec in (pair for unit in model.modules() if is_unit(unit) for pair in fsdp_parameters(unit)):
        of_fsdp.add(id(module))
        if spec is not None:
            found.append((module, spec.mesh, spec.placements, spec.tensor_meta.shape))
    for module in (module for module in model.modules() if id(module) not in of_fsdp):
        for weight in filter(is_dtensor, module._parameters.values()):
            found.append((module, weight.device_mesh, weight.placements, weight.shape))  # type: ignore[union-attr]
    for module, mesh, placements, shape in found:
        if len(shape) == 2 and any(p.is_shard() for p in placements):
            yield module, _Layout(mesh, placements, shape)
