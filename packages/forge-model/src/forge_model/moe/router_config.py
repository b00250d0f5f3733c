"""The section `[model.ffn.router]`: how tokens choose experts, or experts tokens. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import cos, pi
from typing import TYPE_CHECKING, Annotated, Literal

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from forge_model.moe.router import Router

Count = Annotated[int, Meta(ge=1)]
MAX_FLOAT = sys.float_info.max
Weight = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]


class RouterConfig(Config):
    """Interface of `[model.ffn.router]`.

    Attributes:
        z_loss_weight: weight of the mean squared log-normalizer of the logits (arXiv:2202.08906 eq. 5).
    """

    z_loss_weight: Weight = 0.0

    def build(self, dim: int, num_experts: int, top_k: int) -> Router:
        """Build a module [B, T, D] -> `forge_model.moe.router.Routed`."""
        raise NotImplementedError

    def require(self, num_experts: int, top_k: int) -> None:
        """Check that the router can choose `top_k` of `num_experts` experts.

        Raises:
            ValueError: it cannot.
        """


class TopKConfig(RouterConfig):
    """Base of routers in which each token chooses `top_k` experts.

    Attributes:
        normalize: divide the weights of the chosen experts by their sum.
        scale: factor on the weights, after normalization.
        bias: the logits have a learnt bias (as gpt-oss).
        groups: number of groups of equal size in which the experts lie, one after the other.
        top_groups: number of groups among whose experts a token chooses: with as many groups as nodes, its
            copies go to at most this many nodes (arXiv:2412.19437 section 2.1.2, node-limited routing).
        batch_balance_weight: weight of the auxiliary loss over all tokens of a micro-batch of sequences, also
            where several ranks have parts of them (arXiv:2101.03961 eq. 4 to 6).
        balance_scope: the load that this loss uses: `batch`, that of the micro-batch; `global`, that of all
            ranks in the micro-batches of the step up to this one (arXiv:2501.11873 section 3), so that
            experts may specialize on the topic of one micro-batch.
        sequence_balance_weight: weight of the auxiliary loss of each sequence (arXiv:2412.19437 eq. 17 to
            20).
    """

    normalize: bool = True
    scale: Annotated[float, Meta(gt=0, le=MAX_FLOAT)] = 1.0
    bias: bool = False
    groups: Count = 1
    top_groups: Count = 1
    batch_balance_weight: Weight = 0.0
    balance_scope: Literal["batch", "global"] = "batch"
    sequence_balance_weight: Weight = 0.0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.balance_scope == "global" and not self.batch_balance_weight:
            yield (
                'router.balance_scope = "global" without router.batch_balance_weight, the weight of the loss '
                "it is of; give it, or leave balance_scope out"
            )

    def require(self, num_experts: int, top_k: int) -> None:
        """See `RouterConfig.require`."""
        if num_experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"router.groups = {self.groups} and router.top_groups = {self.top_groups} of num_experts = "
                f"{num_experts}; groups must divide the experts, and no more than all can be chosen"
            )
        if top_k > num_experts // self.groups * self.top_groups:
            raise ValueError(
                f"top_k = {top_k} of {num_experts // self.groups * self.top_groups} experts in "
                f"router.top_groups = {self.top_groups} groups of num_experts = {num_experts}; choose fewer "
                "experts or more groups"
            )


routers = Registry("router", RouterConfig, default="softmax")


@routers.register("softmax")
class SoftmaxRouterConfig(TopKConfig):
    """Affinities are a softmax over all experts; a group is as good as its best expert (arXiv:2405.04434)."""

    def build(self, dim: int, num_experts: int, top_k: int) -> Router:
        """See `RouterConfig.build`."""
        from forge_model.moe.router import SoftmaxRouter

        return SoftmaxRouter(self, dim, num_experts, top_k)


@routers.register("sigmoid")
class SigmoidRouterConfig(TopKConfig):
    """Affinities are sigmoids (DeepSeek-V3, arXiv:2412.19437 eq. 15); a group is as good as its best two.

    Attributes:
        bias_rate: size of the move, after each step, of the bias by which experts are selected: up for
            experts below the mean load, down for experts above it (arXiv:2408.15664 algorithm 1). The bias
            changes no weight of an expert. 0 leaves it where it is.
        bias_schedule: schedule of the rate: `constant`; `linear_warmup`: it rises from 1/n of `bias_rate` in
            the first of n = `bias_schedule_steps` steps to `bias_rate` in the last of them, and stays there;
            `cosine`: it falls from `bias_rate` along half a cosine to 0 after so many steps, and stays there.
        bias_schedule_steps: length of the warm-up or of the cosine.
    """

    bias_rate: Weight = 1e-3
    bias_schedule: Literal["constant", "linear_warmup", "cosine"] = "constant"
    bias_schedule_steps: Annotated[int, Meta(ge=0)] = 0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        yield from super().contradictions()
        if (self.bias_schedule == "constant") != (self.bias_schedule_steps == 0):
            yield (
                f'router.bias_schedule = "{self.bias_schedule}" with router.bias_schedule_steps = '
                f"{self.bias_schedule_steps}; a rate that changes needs its number of steps, another one none"
            )

    def rate(self, step: int) -> float:
        """Return how far the bias moves after a step, counted from 0."""
        steps = self.bias_schedule_steps
        if self.bias_schedule == "linear_warmup":
            return self.bias_rate * min(step + 1, steps) / steps
        if self.bias_schedule == "cosine":
            return self.bias_rate * (1 + cos(pi * min(step, steps) / steps)) / 2
        return self.bias_rate

    def build(self, dim: int, num_experts: int, top_k: int) -> Router:
        """See `RouterConfig.build`."""
        from forge_model.moe.router import SigmoidRouter

        return SigmoidRouter(self, dim, num_experts, top_k)

    def require(self, num_experts: int, top_k: int) -> None:
        """See `RouterConfig.require`."""
        super().require(num_experts, top_k)
        if self.groups > 1 and num_experts // self.groups < 2:
            raise ValueError(
                f"router.groups = {self.groups} of num_experts = {num_experts}: a group is judged by its "
                "best two experts; use fewer groups"
            )


@routers.register("expert_choice")
class ExpertChoiceConfig(RouterConfig):
    """Each expert chooses the same number of tokens (arXiv:2202.09368 eq. 1 to 3).

    It chooses among all tokens that are routed at once, so that a token has `top_k` experts on average, and
    perhaps none. The experts of a token depend on later tokens: not for models that generate.
    """

    def build(self, dim: int, num_experts: int, top_k: int) -> Router:
        """See `RouterConfig.build`."""
        from forge_model.moe.router import ExpertChoiceRouter

        return ExpertChoiceRouter(self, dim, num_experts, top_k)
