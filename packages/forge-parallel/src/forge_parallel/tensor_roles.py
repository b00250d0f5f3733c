"""The forward pass of each role of a plan, on a mesh axis of ranks that share matrices.

Modules compute on plain local tensors and call their collectives themselves; parameters are DTensors, so that
FSDP2, checkpoints and norms know which shard a rank holds. B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from forge_parallel.collectives import all_gather, all_reduce, copy_to_ranks, reduce_scatter
from forge_parallel.error import ParallelError

SEQUENCE = 1
"""The dim of [B, T, D] that sequence parallelism cuts."""


@dataclass(frozen=True)
class Axis:
    """The ranks that share each matrix, and their collectives.

    Attributes:
        rank: index of this process among them.
        size: number of these ranks.
        group: their process group.
        sequence: whether the residual stream and its norms are sharded over the tokens.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    sequence: bool

    @classmethod
    def of(cls, mesh: DeviceMesh, sequence: bool) -> Axis:
        """Return the axis of a device mesh of one dim."""
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group(), sequence)

    def first_of(self, entries: int) -> int:
        """Return where this rank's part of the entries begins; all parts but the last are equal."""
        return self.rank * -(-entries // self.size)

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream [B, T or T/ranks, D] -> [B, T, D], which each rank uses differently."""
        if self.sequence:
            return all_gather(x, SEQUENCE, self.group)
        return copy_to_ranks(x, self.group, wide=False)

    def leave(self, x: Tensor) -> Tensor:
        """The parts of a sum [B, T, D] -> the residual stream [B, T or T/ranks, D].

        Raises:
            ParallelError: the tokens cannot be cut evenly.
        """
        if not self.sequence:
            return all_reduce(x, self.group)
        if x.shape[SEQUENCE] % self.size:
            raise ParallelError(
                f"a sequence of {x.shape[SEQUENCE]} tokens cannot be cut over tp = {self.size} ranks; "
                "use a multiple, or set tensor_parallel.sequence = false"
            )
        return reduce_scatter(x, SEQUENCE, self.group)

    def use(self, values: Any) -> Any:
        """Mark values that are equal on all ranks and used differently by each, tensors in containers too."""

        def used(tensor: Tensor) -> Tensor:
            return copy_to_ranks(tensor, self.group) if tensor.requires_grad else tensor

        return tree_map_only(Tensor, used, values)


class RoleModule(nn.Module):
    """A mixin for modules whose forward sees local values of their parameters.

    Outside of forward, `module.weight` is the parameter, as FSDP2 and others expect.

    Attributes:
        placements: the placement of each of its parameters on the ranks.
        uneven: whether the part of the last rank may be shorter.
        tensor_axis: the ranks.
        sums_later: whether `forge_parallel.tensor_sums` sums the gradients of `used_apart` over the ranks,
            once a step.
    """

    placements: ClassVar[Mapping[str, Placement]] = {}
    uneven: ClassVar[bool] = False
    tensor_axis: Axis
    in_forward = False
    sums_later = False

    def used_apart(self) -> list[str]:
        """The parameters that all ranks hold and each uses for its own part: gradients must be summed."""
        return []

    def apart(self, values: Tensor) -> Tensor:
        """Return the values of such a parameter, whose gradient is summed over the ranks, now or later."""
        return values if self.sums_later else copy_to_ranks(values, self.tensor_axis.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on local values."""
        self.in_forward = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.in_forward = False

    def local(self, name: str) -> Tensor:
        """Return the value of `self.<name>` in forward."""
        return values_of(self._parameters[name])


def values_of(parameter: Tensor | None) -> Any:
    """Return the local values of a parameter, which may be missing."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Gather(RoleModule):
    """Takes the whole residual stream as its first argument.

    Further tensors, such as image features, are whole on every rank, which uses them for its own heads: their
    gradients are summed over the ranks, also of tensors inside tuples and dictionaries.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before, on all tokens."""
        axis = self.tensor_axis
        if args:
            return super().forward(axis.enter(args[0]), *axis.use(args[1:]), **axis.use(kwargs))  # type: ignore[misc]
        (first, x), *others = kwargs.items()
        return super().forward(**{first: axis.enter(x)}, **axis.use(dict(others)))  # type: ignore[misc]


class Merge(RoleModule):
    """Puts features, such as those of images, into the residual stream; has no parameters of its own."""

    def forward(self, x: Tensor, features: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As before, on the tokens of this rank.

        Args:
            x: the residual stream [B, T or T/ranks, D].
            features: whole on every rank, of any shape.
            index: [B, T] which feature each token takes.
            args: passed on.
            kwargs: passed on.

        Raises:
            ParallelError: `index` is not of all tokens.
        """
        axis = self.tensor_axis
        if axis.sequence:
            if index.shape[1] != x.shape[SEQUENCE] * axis.size:
                raise ParallelError(
                    f"merge is given an index of {index.shape[1]} tokens, and {x.shape[SEQUENCE]} tokens on "
                    f"each of {axis.size} ranks; give it the index of all tokens"
                )
            features, index = axis.use(features), index.chunk(axis.size, 1)[axis.rank]
        return super().forward(x, features, index, *args, **kwargs)  # type: ignore[misc]


class Colwise(RoleModule):
    """A linear layer that computes a part of its outputs."""

    placements = {"weight": Shard(0), "bias": Shard(0)}


class GatherColwise(Colwise):
    """A linear layer that takes the residual stream itself, and computes a part of its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream -> [B, T, F/ranks]."""
        return super().forward(self.tensor_axis.enter(x))


class Rowwise(RoleModule):
    """A linear layer that takes a part of its inputs; the bias is added once, after the sum."""

    placements = {"weight": Shard(1), "bias": Replicate()}

    def local(self, name: str) -> Tensor:
        """See `RoleModule.local`; no bias, which `forward` adds."""
        return super().local(name) if name == "weight" else None  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, F/ranks] -> the residual stream."""
        out = self.tensor_axis.leave(super().forward(x))
        bias = self._parameters.get("bias")
        if bias is None:
            return out
        return out + (self.apart(values_of(bias)) if self.tensor_axis.sequence else values_of(bias))

    def used_apart(self) -> list[str]:
        """See `RoleModule.used_apart`."""
        return ["bias"] if self.tensor_axis.sequence else []


class OnTokens(RoleModule):
    """Works on the residual stream, of which sequence parallelism gives each rank some tokens.

    Further tensors are equal on all ranks: their gradients are summed, like those of parameters.
    """

    tensor_axis: Axis | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before."""
        axis = self.tensor_axis
        if axis is not None and axis.sequence:
            args, kwargs = (*args[:1], *axis.use(args[1:])), axis.use(kwargs)
        return super().forward(*args, **kwargs)

    def used_apart(self) -> list[str]:
        """See `RoleModule.used_apart`: all parameters, where each rank has its own tokens."""
        axis = self.tensor_axis
        return [*self.placements] if axis is not None and axis.sequence else []

    def local(self, name: str) -> Tensor:
        """See `RoleModule.local`."""
        values = super().local(name)
        return self.apart(values) if self.used_apart() else values


class Norm(OnTokens):
    """A norm on the residual stream."""

    placements = {"weight": Replicate(), "bias": Replicate()}


class Tokenwise(OnTokens):
    """A module that works on each token of the residual stream alone; all ranks hold its parameters."""


@cache
def tokenwise(names: tuple[str, ...]) -> type[Tokenwise]:
    """Return the role `tokenwise` of a module with parameters of these names."""
    return type("Tokenwise", (Tokenwise,), {"placements": dict.fromkeys(names, Replicate())})


class CutExperts(RoleModule):
    """Stacked experts of which each rank has a part of the hidden width: ranks compute parts of a sum."""

    tensor_axis: Axis
    cut_dims: Mapping[str, int | None]

    def local(self, name: str) -> Tensor:
        """See `RoleModule.local`; the first rank alone adds parameters that are not cut."""
        values = super().local(name)
        if self.cut_dims[name] is not None:
            return values
        values = self.apart(values)
        return values if self.tensor_axis.rank == 0 else torch.zeros_like(values) * values

    def used_apart(self) -> list[str]:
        """See `RoleModule.used_apart`."""
        return [name for name in self.placements if self.cut_dims[name] is None]


@cache
def cut_experts(placements: tuple[tuple[str, Placement], ...]) -> type[CutExperts]:
    """Return the role `experts` of a module with these placements."""
    return type("CutExperts", (CutExperts,), {"placements": dict(placements)})


def placed(name: str, experts: nn.Module) -> tuple[tuple[str, Placement], ...]:
    """Return the placements of the parameters of cut experts.

    Raises:
        ParallelError: experts do not say by `cut_dims` where their hidden width is.
    """
    dims, names = (
        getattr(experts, "cut_dims", {}),
        [n for n, p in experts._parameters.items() if p is not None],
    )
    if missing := [n for n in names if n not in dims]:
        raise ParallelError(
            f"{name}, a {type(experts).__name__}, does not say in `cut_dims` along which dim {missing[0]} is "
            'cut; say it, or set tensor_parallel.experts = "whole"'
        )
    return tuple((n, Replicate() if dims[n] is None else Shard(dims[n])) for n in names)


class Unsharded(RoleModule):
    """A module that all ranks hold and call with equal values, outside of the residual stream.

    Its gradients are equal too, because modules that use its outputs differently sum their gradients: no
    collective is needed.
    """


@cache
def unsharded(names: tuple[str, ...]) -> type[Unsharded]:
    """Return the role `unsharded` of a module with parameters of these names."""
    return type("Unsharded", (Unsharded,), {"placements": dict.fromkeys(names, Replicate())})


class Replicated(RoleModule):
    """A module inside attention that all ranks hold, such as a norm of each head or a latent projection.

    Each rank uses its output for its own heads.
    """

    placements = {"weight": Replicate(), "bias": Replicate()}

    def local(self, name: str) -> Tensor:
        """See `RoleModule.local`."""
        return self.apart(super().local(name))

    def used_apart(self) -> list[str]:
        """See `RoleModule.used_apart`."""
        return [*self.placements]


class CutNorm(RoleModule):
    """A root mean square norm over features of which each rank has a part, such as those of all heads."""

    placements = {"weight": Shard(0)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., F/ranks] -> [..., F/ranks], as if computed over [..., F]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        group, count = self.tensor_axis.group, x.shape[-1] * self.tensor_axis.size
        squares = copy_to_ranks(all_reduce(wide.square().sum(-1, keepdim=True), group), group)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normed = wide * torch.rsqrt(squares / count + eps)  # type: ignore[operator]
        return (normed * self.local("weight").to(wide.dtype)).to(x.dtype)


class WithUnits(RoleModule):
    """A layer with outputs of several parts, or of fewer units than ranks, such as few key-value heads.

    All ranks hold all of its parameters, and each uses its units of every part. Where a part has fewer units
    than there are ranks, several ranks use the same one.

    Attributes:
        tensor_units: number of units of each part that is fused in it; see `forge_parallel.plan`.
    """

    placements = {"weight": Replicate(), "bias": Replicate()}
    tensor_units: tuple[int, ...]

    def used_apart(self) -> list[str]:
        """See `RoleModule.used_apart`."""
        return [*self.placements]

    @property
    def shared_units(self) -> int | None:
        """Number of units of the last part (values, say), if several ranks use each of them."""
        return self.tensor_units[-1] if self.tensor_units[-1] < self.tensor_axis.size else None

    def local(self, name: str) -> Tensor:
        """See `RoleModule.local`."""
        axis, values = self.tensor_axis, super().local(name)
        if values is None:
            return values
        values = self.apart(values)
        width, start, parts = len(values) // sum(self.tensor_units), 0, []
        for units in self.tensor_units:
            first = start + axis.rank * units // axis.size
            parts.append(values.narrow(0, first * width, max(1, units // axis.size) * width))
            start += units
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class CutNormWithUnits(WithUnits, CutNorm):
    """A `CutNorm` over units that ranks share: each unit counts equally in the mean of squares."""


class Heads(RoleModule):
    """A parameter [N] over heads; each rank has its own heads' part."""

    placements = {"weight": Shard(0)}


@cache
def with_role(base: type[nn.Module], role: type[RoleModule]) -> type[nn.Module]:
    """Return one class for all modules of a kind, so that compiled blocks share their code."""
    views = {key: _view(key) for key in role.placements}
    return type(base.__name__, (role, base), {**views, "__module__": base.__module__})


def _view(name: str) -> Any:
    def get(self: RoleModule) -> Any:
        parameter = self._parameters.get(name)
        return self.local(name) if self.in_forward and parameter is not None else parameter

    return property(get)
