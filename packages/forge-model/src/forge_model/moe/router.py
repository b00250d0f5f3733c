"""Routers: which expert serves which token. B batch, T tokens of a row, N tokens, K chosen, E experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_model.init import Init
from forge_model.moe.balance import EXTRAS, Load, assigned, balance_loss, mean_of, to_sum_one, z_loss
from forge_model.moe.router_config import ExpertChoiceConfig, RouterConfig, SigmoidRouterConfig, TopKConfig
from forge_model.moe.routing import Routing, one_per_slot
from forge_model.roles import Role

Sum_ = Callable[[Tensor], Tensor]


class Routed(NamedTuple):
    """The result of a router.

    Attributes:
        routing: pairs of tokens and experts, none dropped.
        loss: [] weighted auxiliary losses, means over the tokens.
        counted: [E + len(EXTRAS)] float64, sums over the tokens; `dropped` is not yet known.
        affinities: [E] mean affinities over the tokens if the balance loss is over the global batch, else
            None.
    """

    routing: Routing
    loss: Tensor
    counted: Tensor
    affinities: Tensor | None = None


class Router(nn.Module):
    """The base of routers: computes logits of tokens for experts, always in float32 at least.

    Attributes:
        weight: [E, D].
        bias: [E], or None.
        step: number of the next optimizer step, from 0.
    """

    roles: ClassVar[dict[str, Role]] = {"weight": "router", "bias": "bias"}
    residual_writers: ClassVar[tuple[str, ...]] = ()
    step: int = 0

    def __init__(self, config: RouterConfig, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.z_loss_weight = config.z_loss_weight
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        biased = isinstance(config, TopKConfig) and config.bias
        self.bias: nn.Parameter | None = nn.Parameter(torch.empty(num_experts)) if biased else None

    def forward(
        self, x: Tensor, sum_over_sequence: Sum_ | None = None, padding: Tensor | None = None
    ) -> Routed:
        """Route [B, T, D].

        Args:
            x: the tokens of this rank.
            sum_over_sequence: sums a tensor, in place, over the ranks with other tokens of the same
                sequences; None if there are none.
            padding: [B, T] bool, tokens that count in no loss and no statistic; None if there are none.
        """
        raise NotImplementedError

    @torch.no_grad()
    def learn(self, load: Load) -> None:
        """Update, in place, what follows the load of a step; called before the optimizer step."""

    def statistics(self) -> Mapping[str, Tensor]:
        """Return further statistics by name, [] each, besides those of the load."""
        return {}

    def logits(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [N, E]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.linear(x.flatten(0, 1).to(wide), self.weight.to(wide), bias)

    def _counted(self, counts: Tensor, extras: Mapping[str, Tensor], tokens: int | Tensor) -> Tensor:
        """Return counts and, for `EXTRAS`, means multiplied by the number of tokens."""
        # numbers of the host are written by kernels: a copy of them would wait for the device
        zero = torch.zeros((), dtype=torch.float64, device=counts.device)
        sums = [extras[name].detach().double() * tokens if name in extras else zero for name in EXTRAS[:2]]
        return torch.cat([counts.double(), torch.stack([*sums, zero, zero + tokens])])


class TopKRouter(Router):
    """A router whose tokens choose `top_k` experts each."""

    def __init__(self, config: TopKConfig, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__(config, dim, num_experts, top_k)
        self.config = config

    def affinities(self, logits: Tensor) -> Tensor:
        """[N, E] -> [N, E], not negative: the numbers from which weights are computed."""
        raise NotImplementedError

    def selected_by(self, affinities: Tensor) -> Tensor:
        """[N, E] -> [N, E]: the scores by which experts are selected."""
        return affinities

    def group_scores(self, scores: Tensor) -> Tensor:
        """[N, groups, E / groups] -> [N, groups]: the scores by which groups are selected."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, sum_over_sequence: Sum_ | None = None, padding: Tensor | None = None
    ) -> Routed:
        """See `Router.forward`."""
        logits = self.logits(x)
        affinities = self.affinities(logits)
        with torch.no_grad():
            experts = self._in_best_groups(self.selected_by(affinities)).topk(self.top_k).indices
        weights = affinities.gather(1, experts)
        if self.config.normalize:
            weights = to_sum_one(weights)
        routing = one_per_slot(experts, weights * self.config.scale)
        real = None if padding is None else ~padding.flatten()
        seen_experts = experts if real is None else experts.where(real[:, None], self.num_experts)
        counts = assigned(seen_experts.flatten(), len(x), self.num_experts)
        loss, seen = self._losses(logits, affinities, counts, sum_over_sequence, real)
        counted = self._counted(counts.sum(0), seen, len(logits) if real is None else real.sum())
        is_global = self.config.balance_scope == "global"
        return Routed(routing, loss, counted, mean_of(to_sum_one(affinities), real) if is_global else None)

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """Set scores [N, E] of experts outside of the chosen groups to -inf."""
        config = self.config
        if config.groups == config.top_groups:
            return scores
        grouped = scores.unflatten(1, (config.groups, -1))
        best = self.group_scores(grouped).topk(config.top_groups).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)

    def _losses(
        self, logits: Tensor, affinities: Tensor, counts: Tensor, sum_: Sum_ | None, real: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the losses, and each loss without its weight."""
        config, rows = self.config, len(counts)
        normalizers = z_loss(logits, real)
        of_batch = config.balance_scope == "batch"
        weighs_batch = of_batch and config.batch_balance_weight > 0
        if sum_ is not None and (weighs_batch or config.sequence_balance_weight):
            # these losses are linear in the affinities: each rank adds those of its tokens
            counts = sum_(counts.clone())
        loss, seen = self.z_loss_weight * normalizers, {"z_loss": normalizers}
        if of_batch:
            seen["balance"] = balance_loss(
                affinities[None], counts.sum(0, keepdim=True), None if real is None else real[None]
            )
            loss = loss + config.batch_balance_weight * seen["balance"]
        if config.sequence_balance_weight:
            sequences = balance_loss(
                affinities.unflatten(0, (rows, -1)), counts, None if real is None else real.view(rows, -1)
            )
            loss = loss + config.sequence_balance_weight * sequences
        return loss, seen


class SoftmaxRouter(TopKRouter):
    """Affinities are a softmax over the experts. Source: Fedus et al. 2021, arXiv:2101.03961 eq. 1."""

    def affinities(self, logits: Tensor) -> Tensor:
        """See `TopKRouter.affinities`."""
        return logits.softmax(-1)

    def group_scores(self, scores: Tensor) -> Tensor:
        """See `TopKRouter.group_scores`; DeepSeek-V2, arXiv:2405.04434 section 2.1.4."""
        return scores.amax(-1)


class SigmoidRouter(TopKRouter):
    """Affinities are sigmoids; a bias that follows the load is added for the selection.

    Source: DeepSeek-V3, arXiv:2412.19437 eq. 13 to 16.

    Attributes:
        selection_bias: [E] float32, added for selection only; no gradient flows into it.
    """

    initial: ClassVar[dict[str, Init]] = {"selection_bias": Init("constant", 0.0)}
    selection_bias: Tensor

    def __init__(self, config: SigmoidRouterConfig, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__(config, dim, num_experts, top_k)
        self.rate = config.rate
        self.register_buffer("selection_bias", torch.empty(num_experts))

    def affinities(self, logits: Tensor) -> Tensor:
        """See `TopKRouter.affinities`."""
        return logits.sigmoid()

    def selected_by(self, affinities: Tensor) -> Tensor:
        """See `TopKRouter.selected_by`."""
        return affinities + self.selection_bias

    def group_scores(self, scores: Tensor) -> Tensor:
        """See `TopKRouter.group_scores`."""
        return scores.topk(2).values.sum(-1)

    @torch.no_grad()
    def learn(self, load: Load) -> None:
        """See `Router.learn`. Source: arXiv:2408.15664 algorithm 1, by the sign of the error."""
        error = load.counts.mean() - load.counts
        self.selection_bias.add_(error.sign().to(self.selection_bias.dtype), alpha=self.rate(self.step))

    def statistics(self) -> Mapping[str, Tensor]:
        """See `Router.statistics`."""
        return {"bias_range": self.selection_bias.max() - self.selection_bias.min()}


class ExpertChoiceRouter(Router):
    """Each expert chooses its tokens. Source: Zhou et al. 2022, arXiv:2202.09368 eq. 1 to 3."""

    def __init__(self, config: ExpertChoiceConfig, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__(config, dim, num_experts, top_k)

    def forward(
        self, x: Tensor, sum_over_sequence: Sum_ | None = None, padding: Tensor | None = None
    ) -> Routed:
        """See `Router.forward`; each expert serves N top_k / E tokens, at least one; padding comes last."""
        logits = self.logits(x)
        tokens = len(logits)
        each = min(tokens, max(1, tokens * self.top_k // self.num_experts))
        scores, real = logits.softmax(-1), None
        if padding is not None:
            real = ~padding.flatten()
            scores = scores.where(real[:, None], -1)
        weights, chosen = scores.t().topk(each)
        experts = torch.arange(self.num_experts, device=x.device).repeat_interleave(
            each, output_size=each * self.num_experts
        )
        normalizers = z_loss(logits, real)
        counts = torch.full((self.num_experts,), each, dtype=torch.int64, device=x.device)
        if real is not None:
            counts, weights = real[chosen].sum(1), weights.where(real[chosen], 0)
        counted = self._counted(counts, {"z_loss": normalizers}, tokens if real is None else real.sum())
        routing = Routing(chosen.flatten(), experts, weights.flatten())
        return Routed(routing, self.z_loss_weight * normalizers, counted)
