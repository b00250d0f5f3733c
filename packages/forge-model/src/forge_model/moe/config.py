"""The section `[model.ffn]` with `type = "moe"`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from forge_config import Config, Meta
from msgspec.structs import replace

from forge_model.ffn.config import Count, FfnConfig, SwiGLUConfig, ffns
from forge_model.moe.router_config import MAX_FLOAT, ExpertChoiceConfig, RouterConfig, SoftmaxRouterConfig

if TYPE_CHECKING:
    from torch import nn


class ClampConfig(Config):
    """The gated unit (w_up x + 1) g sigmoid(alpha g), g = w_gate x, with bounds (GPT-OSS, arXiv:2508.10925).

    Attributes:
        limit: upper bound of w_gate x, and bound of the magnitude of w_up x.
        alpha: steepness of the sigmoid.
    """

    limit: Annotated[float, Meta(gt=0)] = 7.0
    alpha: Annotated[float, Meta(gt=0)] = 1.702


@ffns.register("moe")
class MoEConfig(FfnConfig):
    """Mixture of experts: each token is served by a few of many feed-forwards (arXiv:1701.06538 eq. 1).

    Attributes:
        dim: hidden width of one expert; absent means that of a dense layer divided by `top_k`, so that a
            token costs about as much as in a dense layer.
        bias: biases on the projections of the experts.
        num_experts: number of experts.
        top_k: experts of a token (on average, where experts choose).
        router: how tokens and experts are matched.
        activation: the nonlinearity.
        gated: an expert is w_down(activation(w_gate x) * w_up x); otherwise w_down(activation(w_up x)).
        clamp: the gated unit of GPT-OSS in place of silu; absent means the plain one.
        capacity_factor: an expert serves at most this many times its even share of the tokens that are routed
            at once, and drops the others. Absent means that it drops none.
        drop: which tokens an expert beyond its capacity drops: `last` the last ones, so that no token loses
            its expert to a later one; `lightest` those with the least router weight, which depends on later
            tokens: not for models that generate.
        shared_experts: number of experts, each of the width `shared_dim`, that serve every token.
        shared_dim: hidden width of each shared expert; absent means `dim`.
        shared_gate: weight the shared experts by a sigmoid for each token (as Qwen2-MoE).
        scale_gradients: before clipping, multiply the weight gradients of each expert by the mean load of the
            experts over its own load in the whole step: rarely chosen experts learn about as fast as others.
            The forward pass does not change.
    """

    num_experts: Count = 8
    top_k: Count = 2
    router: RouterConfig = SoftmaxRouterConfig()
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"] = "silu"
    gated: bool = True
    clamp: ClampConfig | None = None
    capacity_factor: Annotated[float, Meta(gt=0, le=MAX_FLOAT)] | None = None
    drop: Literal["last", "lightest"] = "last"
    shared_experts: Annotated[int, Meta(ge=0)] = 0
    shared_dim: Count | None = None
    shared_gate: bool = False
    scale_gradients: bool = False

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.top_k > self.num_experts:
            yield (f"top_k = {self.top_k} of num_experts = {self.num_experts}; choose no more than there are")
        if self.capacity_factor is not None and isinstance(self.router, ExpertChoiceConfig):
            yield (
                "capacity_factor with an expert_choice router, whose experts all serve the same number of "
                "tokens; leave it out"
            )
        if self.drop != "last" and self.capacity_factor is None:
            yield f'drop = "{self.drop}" without capacity_factor, which drops nothing; set capacity_factor'
        if not self.shared_experts and (self.shared_gate or self.shared_dim is not None):
            yield ("shared_gate or shared_dim without shared_experts; give their number")
        if self.clamp is not None and (self.shared_experts or not self.gated or self.activation != "silu"):
            yield (
                "clamp with shared experts, without gates, or with another activation than silu; it stands "
                "for the gated unit with silu, which shared experts have"
            )
        try:
            self.router.require(self.num_experts, self.top_k)
        except ValueError as error:
            yield str(error)

    def hidden(self, dim: int) -> int:
        """See `FfnConfig.hidden`; the width of one expert."""
        if self.dim is not None:
            return self.dim
        return -(-SwiGLUConfig().hidden(dim) // self.top_k // 8) * 8

    def resolved(self, dim: int) -> FfnConfig:
        """See `FfnConfig.resolved`."""
        hidden = self.hidden(dim)
        shared = (self.shared_dim or hidden) if self.shared_experts else None
        return replace(self, dim=hidden, shared_dim=shared)

    def shared_hidden(self, dim: int) -> int:
        """Hidden width of all shared experts together."""
        return self.shared_experts * (self.shared_dim or self.hidden(dim))

    def build(self, dim: int) -> nn.Module:
        """See `FfnConfig.build`."""
        from forge_model.moe.layer import MoE

        return MoE(self, dim)

    def tensor_sizes(self, dim: int) -> dict[str, int]:
        """See `FfnConfig.tensor_sizes`; experts are not sharded."""
        return {}

    def expert_counts(self) -> dict[str, int]:
        """See `FfnConfig.expert_counts`."""
        return {"": self.num_experts}

    def require_learning(self) -> None:
        """See `FfnConfig.require_learning`."""
        if self.top_k == 1 and getattr(self.router, "normalize", False):
            raise ValueError(
                "ffn.top_k = 1 with router.normalize = true: the weight of the only expert is always 1, so "
                "that the loss tells the router nothing; set router.normalize = false"
            )

    def require_cut_experts(self, dim: int, ranks: int) -> None:
        """See `FfnConfig.require_cut_experts`."""
        if isinstance(self.router, ExpertChoiceConfig):
            raise ValueError(
                "experts of an expert_choice router choose among the tokens of a rank, and cut over ranks "
                'they would have to choose together; set tensor_parallel.experts = "whole"'
            )
        sizes = {"dim": self.hidden(dim), "shared_experts times shared_dim": self.shared_hidden(dim)}
        if uneven := [f"{name} = {size}" for name, size in sizes.items() if size % ranks]:
            raise ValueError(
                f"ffn.{' and '.join(uneven)} cannot be cut over mesh.tp = {ranks} ranks; use a multiple, or "
                'tensor_parallel.experts = "whole"'
            )

    def expert_groups(self) -> dict[str, int]:
        """See `FfnConfig.expert_groups`."""
        groups, top = getattr(self.router, "groups", 1), getattr(self.router, "top_groups", 1)
        return {"": groups if groups > top else 1}

    def forward_flops(self, dim: int) -> float:
        """See `FfnConfig.forward_flops`; counts the experts that a token uses, none dropped."""
        matrices = 3 if self.gated else 2
        width = self.top_k * self.hidden(dim) + self.shared_hidden(dim)
        return 2 * dim * (self.num_experts + matrices * width + self.shared_gate)
