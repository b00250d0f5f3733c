"""Mixture of experts in place of a feed-forward. B batch, T tokens, D model dim, E experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from forge_model.declared import joined
from forge_model.error import ModelError
from forge_model.ffn.dense import MLP, GatedFfn
from forge_model.moe.balance import EXTRAS, GlobalBalance, Load, Tally, tallied, tallied_at_once
from forge_model.moe.experts import Experts
from forge_model.moe.router import TopKRouter
from forge_model.moe.routing import Routing, one_per_slot, serve, within_capacity, without
from forge_model.roles import Role

if TYPE_CHECKING:
    from forge_model.moe.config import MoEConfig


class Dispatch(Protocol):
    """Brings rows to experts and back: `here`, or a function that sends them to experts on other ranks."""

    def __call__(
        self,
        experts: Callable[[Tensor, Tensor], Tensor],
        rows: Tensor,
        ends: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the outputs of the experts, [R, D] -> [R, D].

        Args:
            experts: the experts of this rank, called as `Experts.forward`.
            rows: [R, D], sorted by expert.
            ends: [E] int32, where the rows of each of all experts end; later rows are not served.
            meanwhile: called once, if possible while rows travel.
        """
        ...


def here(
    experts: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    ends: Tensor,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Apply experts that are all on this rank; see `Dispatch`."""
    out = experts(rows, ends)
    if meanwhile is not None:
        meanwhile()
    return out


class Spread(Protocol):
    """Ranks that each have a part of the hidden width of every expert."""

    def enter(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks, [B, T or a part of T, ...]; gradients are summed over the ranks."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Sum the parts [B, T, D] of all ranks and return the tokens of this rank."""
        ...


class ExpertLayer(Protocol):
    """The interface of a layer of experts. A module declares that it is one by `holds_experts`.

    Attributes:
        holds_experts: True.
        num_experts: E.
        experts: a module with stacked parameters [E, ...]; see `forge_parallel.expert_parallel`.
        dispatch: brings tokens to experts; may be replaced.
        step_tokens: number of tokens of the next global batch, which divides the auxiliary losses of the
            layer.
        tally: statistics of the calls since the last optimizer step.
    """

    holds_experts: ClassVar[bool]
    num_experts: int
    experts: nn.Module
    dispatch: Dispatch
    step_tokens: int | Tensor | None
    tally: Tally

    def idle_parameters(self) -> int:
        """Return the number of parameters of the experts that do not serve a given token."""
        ...

    def load(self, sums: Tensor) -> dict[str, Tensor]:
        """Learn from the sums of the tally over a step and all ranks; return statistics, [] each."""
        ...


class MoE(nn.Module):
    """A router, experts, and optionally shared experts that serve every token; an `ExpertLayer`.

    Attributes:
        dispatch: brings tokens to experts; may be replaced.
        sum_over_sequence: sums a tensor, in place, over the ranks with other tokens of the same sequences;
            None if there are none.
        spread: the ranks over which the width of the experts is sharded; None if it is not.
        tokens_here: selects from [B, T] the tokens of this rank; None means all.
        sum_over_batch: like `sum_over_sequence`, over all ranks with other tokens of the global batch.
        step_tokens: number of tokens of the global batch, which divides the losses of this layer. None means
            the tokens of each call.
        tally: statistics of the calls since the last optimizer step.
        scale_gradients: see `MoEConfig`; whoever has the gradients applies it, by `gradient_scales`.
    """

    holds_experts: ClassVar[bool] = True
    takes_padding: ClassVar[bool] = True
    dispatch: Dispatch
    step_tokens: int | Tensor | None = None
    tokens_here: Callable[[Tensor], Tensor] | None = None
    spread: Spread | None = None
    sum_over_sequence: Callable[[Tensor], Tensor] | None = None
    sum_over_batch: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: MoEConfig, dim: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.capacity_factor, self.scale_gradients = config.capacity_factor, config.scale_gradients
        self.drop_by_weight = config.drop == "lightest"
        self.router = config.router.build(dim, config.num_experts, config.top_k)
        hidden = config.hidden(dim)
        self.experts = Experts(
            config.num_experts, dim, hidden, config.activation, config.gated, config.bias, config.clamp
        )
        self.shared = _shared(config, dim) if config.shared_experts else None
        self.shared_gate = SharedGate(dim) if config.shared_gate else None
        self.dispatch = here
        self.tally = Tally(self.num_experts + len(EXTRAS))
        self.tensor_roles, self.cut_roles = self._tensor_roles(), self._cut_roles()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D].

        Args:
            x: the tokens of this rank.
            padding: [B, T] bool, true for padding, also for tokens on the other ranks of tp. Padding is
                served like other tokens unless there is a capacity, and counts in no loss, no statistic, and
                no learning of the router. None if there is no padding.
        """
        if padding is not None and self.tokens_here is not None:
            padding = self.tokens_here(padding)
        routing, loss, counted, affinities = self.router(x, self.sum_over_sequence, padding)
        if self.capacity_factor is not None:
            routing, counted = self._within_capacity(routing, counted, x.shape[0] * x.shape[1], padding)
        shared: list[Tensor] = []
        meanwhile = None if self.shared is None else lambda: shared.append(self._of_shared(x))
        experts = partial(self.dispatch, self.experts, meanwhile=meanwhile)
        if self.spread is None:
            out = serve(experts, x.flatten(0, 1), routing, self.num_experts).view_as(x)
        else:
            whole, routing = self._of_all(x, routing, self.spread)
            out = serve(experts, whole.flatten(0, 1), routing, self.num_experts).view_as(whole)
            out = self.spread.leave(out)
        if torch.is_grad_enabled():
            tokens = x.shape[0] * x.shape[1] if padding is None else (~padding).sum().double()
            part = 1.0 if self.step_tokens is None else tokens / self.step_tokens
            balance = self._global_balance(affinities, part)
            if out.requires_grad:
                out = tallied(out, loss * part, counted, self.tally, balance)
            else:
                tallied_at_once(counted, self.tally, balance)
        return out + shared[0] if shared else out

    def _within_capacity(
        self, routing: Routing, counted: Tensor, tokens: int, padding: Tensor | None
    ) -> tuple[Routing, Tensor]:
        """Drop the pairs beyond the capacity of experts, and count them."""
        factor = self.capacity_factor
        assert factor is not None
        if padding is None:
            even = tokens * self.top_k / self.num_experts
            routing = within_capacity(routing, self.num_experts, ceil(factor * even), self.drop_by_weight)
            return routing, counted + _dropped(routing, self.num_experts)
        routing = without(routing, padding, self.num_experts)
        served = (routing.experts < self.num_experts).sum()
        # as the host does above, in float64: a float32 rounds an integer up
        capacity = (factor * (served.double() / self.num_experts)).ceil()
        kept = within_capacity(routing, self.num_experts, capacity, self.drop_by_weight)
        of_padding = _dropped(routing, self.num_experts)
        return kept, counted + _dropped(kept, self.num_experts) - of_padding

    def _global_balance(self, affinities: Tensor | None, part: float | Tensor) -> GlobalBalance | None:
        """Return the share of these tokens in the balance loss over the global batch, if there is one."""
        if affinities is None:
            return None
        assert isinstance(self.router, TopKRouter)
        weight = self.router.config.batch_balance_weight
        return GlobalBalance(affinities, weight * part, self.sum_over_batch)

    def _tensor_roles(self) -> dict[str, str | None]:
        """Roles if all ranks of tensor parallelism have the shared experts, too: none is sharded."""
        roles: dict[str, str | None] = dict.fromkeys(("router", "experts", "shared_gate"), "tokenwise")
        if self.shared is not None:
            roles |= {"shared": None} | {
                f"shared.{name}": "tokenwise" for name, _ in self.shared.named_children()
            }
        return roles

    def _cut_roles(self) -> dict[str, str]:
        """Roles if experts are sharded: the shared experts are then sharded like any feed-forward."""
        inner = {} if self.shared is None else getattr(self.shared, "tensor_roles", {})
        return {"experts": "experts"} | {joined("shared", name): role for name, role in inner.items()}

    def _of_all(self, x: Tensor, routing: Routing, spread: Spread) -> tuple[Tensor, Routing]:
        """Gather tokens [B, T, D] and routing from all ranks that have a part of each expert."""
        if not routing.slots:
            raise ModelError(
                "experts that choose tokens cannot be cut over ranks, which would have to choose together; "
                'set tensor_parallel.experts = "whole"'
            )

        def on_all(pairs: Tensor) -> Tensor:
            return spread.enter(pairs.view(len(x), -1, routing.slots)).flatten(0, 1)

        pairs = one_per_slot(on_all(routing.experts), on_all(routing.weights))
        return spread.enter(x), pairs._replace(drops=routing.drops)

    def _of_shared(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D], the output of the shared experts."""
        assert self.shared is not None
        made = self.shared(x)
        return made if self.shared_gate is None else self.shared_gate(x) * made

    def idle_parameters(self) -> int:
        """Return the number of parameters of the experts that do not serve a given token."""
        return (
            sum(p.numel() for p in self.experts.parameters())
            // self.num_experts
            * (self.num_experts - self.top_k)
        )

    def load(self, sums: Tensor) -> dict[str, Tensor]:
        """Let the router learn from the sums of a step over all ranks; return statistics, [] each.

        A router whose weight is frozen learns nothing.
        """
        load = Load.of(sums)
        if self.router.weight.requires_grad:
            self.router.learn(load)
        return load.statistics() | dict(self.router.statistics())


class SharedGate(nn.Module):
    """The gate of the shared experts: sigmoid(w x), one number per token."""

    roles: ClassVar[dict[str, Role]] = {"weight": "router"}
    residual_writers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, 1]."""
        return nn.functional.linear(x, self.weight).sigmoid()


def _shared(config: MoEConfig, dim: int) -> nn.Module:
    """Build all shared experts as one feed-forward: their sum equals one with the sum of their widths."""
    hidden = config.shared_hidden(dim)
    return (GatedFfn if config.gated else MLP)(dim, hidden, config.activation, False)


def _dropped(routing: Routing, num_experts: int) -> Tensor:
    """Return [E + len(EXTRAS)] float64 with the number of dropped pairs at index `dropped`, else zeros."""
    dropped = (routing.experts == num_experts).sum().double()
    place = num_experts + EXTRAS.index("dropped")
    return torch.nn.functional.pad(dropped[None], (place, len(EXTRAS) - EXTRAS.index("dropped") - 1))


def expert_layers(model: nn.Module) -> dict[str, ExpertLayer]:
    """Return the layers of experts in a model by name: all modules that declare `holds_experts`."""
    named = model.named_modules()
    found = {name: layer for name, layer in named if getattr(layer, "holds_experts", False)}
    for name, layer in found.items():
        needed = (*ExpertLayer.__annotations__, "idle_parameters", "load")
        if missing := [one for one in needed if not hasattr(layer, one)]:
            raise ModelError(
                f"{name}, a {type(layer).__name__}, says holds_experts and has no {', '.join(missing)}; see "
                "forge_model.moe.layer.ExpertLayer"
            )
    return cast(dict[str, ExpertLayer], found)


def gradient_scales(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield the experts of each layer that scales their gradients, and the factors [E] float64.

    The factors are known after `learn_from_load` of the step. Experts without load have gradient 0 anyway.
    """
    for layer in expert_layers(model).values():
        if getattr(layer, "scale_gradients", False) and layer.tally.last is not None:
            counts = layer.tally.last[: layer.num_experts]
            yield layer.experts, counts.mean() / counts.clamp(min=1)


def learn_from_load(layers: dict[str, ExpertLayer], sum_: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Let routers learn from the load of a step, with one sum over ranks for all. Collective.

    Args:
        layers: from `expert_layers`, the same on all ranks of the sum.
        sum_: sums a tensor over all ranks that have other tokens.

    Returns:
        Statistics on the device, [] each, by `<name of the layer>/<statistic>`.
    """
    if not layers:
        return {}
    sizes = [layer.tally.size for layer in layers.values()]
    taken = [layer.tally.take() for layer in layers.values()]
    device = next(next(iter(layers.values())).experts.parameters()).device
    sums = [
        torch.zeros(size, dtype=torch.float64, device=device) if one is None else one
        for one, size in zip(taken, sizes, strict=True)
    ]
    everyone = sum_(torch.cat(sums)).split(sizes)
    found = {}
    for (name, layer), total in zip(layers.items(), everyone, strict=True):
        layer.tally.last = total
        found |= {f"{name}/{key}": value for key, value in layer.load(total).items()}
    return found
