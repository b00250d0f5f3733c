"""Groups of experts for each modality. B batch, T tokens, D width, E experts of a group, K candidates."""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from forge_model.config import SwiGLUConfig
from forge_model.init import Init
from forge_model.layers import Linear
from forge_model.moe.balance import Tally, tallied, to_sum_one
from forge_model.moe.experts import Experts
from forge_model.moe.layer import Dispatch, here
from forge_model.moe.router import Router
from forge_model.moe.router_config import RouterConfig
from forge_model.moe.routing import Routing, one_per_slot, serve
from torch import Tensor, nn

from forge_vlm.fusion.modalities_config import MODALITIES
from forge_vlm.fusion.moma_config import MomaFfnConfig


class Chosen(NamedTuple):
    """Which experts serve which tokens.

    Attributes:
        mask: [B, T, E] bool.
        tokens: [B, K, E] int64, candidates of each expert, by descending logit.
        taken: [B, K] bool, the candidates that every expert takes.
        cutoffs: [B, E] the logit of the last token that the expert takes; meaningless if it takes none.
    """

    mask: Tensor
    tokens: Tensor
    taken: Tensor
    cutoffs: Tensor

    def routing(self, weights: Tensor) -> Routing:
        """Return pairs of all candidates with weights [B, T, E]; candidates not taken are dropped."""
        batch, length, experts = weights.shape
        numbers = torch.arange(experts, device=weights.device)
        rows = torch.arange(batch, device=weights.device)[:, None, None] * length
        taken = self.taken[..., None]
        return Routing(
            (self.tokens + rows).flatten(),
            numbers.where(taken, experts).flatten(),
            weights.gather(1, self.tokens).where(taken, 0).flatten(),
            drops=True,
        )


def choose(logits: Tensor, mine: Tensor, capacity: float) -> Chosen:
    """Let each expert choose the tokens with its highest logits in each sequence, earlier ones among equals.

    Logits are compared in steps of `STEP`: tokens may be equal, such as the first ones of several samples,
    and rounding of sums must not decide which of them is chosen.

    Args:
        logits: [B, T, E].
        mine: [B, T] bool, the tokens that can be chosen.
        capacity: fraction of these tokens that an expert chooses, rounded up; at most 1.
    """
    stepped = (logits.detach() / STEP).floor().masked_fill(~mine[..., None], float("-inf"))
    ranked = stepped.argsort(dim=1, descending=True, stable=True)
    most = ceil(mine.shape[1] * capacity - ROUNDING)
    each = (mine.sum(1).double() * capacity - ROUNDING).ceil().long()
    taken = torch.arange(most, device=mine.device) < each[:, None]
    tokens = ranked[:, :most]
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, tokens, taken[..., None].expand_as(tokens))
    last = ranked.gather(1, (each - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[2]))
    return Chosen(mask, tokens, taken, logits.detach().gather(1, last)[:, 0])


STEP = 2.0**-10
ROUNDING = 1e-9
"""Tolerance for rounding up: a capacity of 3 x (1/3) tokens is 1 token."""


class Scores(Router):
    """The router of a group: logits of tokens for its experts."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(RouterConfig(), dim, num_experts, 1)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[B, T, D] -> [B, T, E], in float32 at least."""
        return self.logits(x).view(*x.shape[:2], self.num_experts)


class AuxRouter(nn.Module):
    """Predicts from one token alone whether experts would choose it; initially predicts that all would."""

    residual_writers: ClassVar[tuple[str, ...]] = ()
    initial: ClassVar[dict[str, Init]] = {"w_out.weight": Init("constant", 0.0)}
    tensor_roles: ClassVar[dict[str, str]] = {"w_in": "tokenwise", "w_out": "tokenwise"}

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.w_in, self.w_out = Linear(dim, hidden), Linear(hidden, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> logits [B, T, E], in float32 at least; no gradient flows into `x`."""
        logits = self.w_out(F.silu(self.w_in(x.detach())))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


STATISTICS = ("tokens", "unserved", "aux_loss", "aux_right")
"""Names of the sums over tokens of the modality that the tally has besides the counts of experts."""


class ModalityExperts(nn.Module):
    """The experts of one modality and their routers; an `ExpertLayer` of forge_model.

    Attributes:
        aux: predicts what experts would choose; None if thresholds decide.
        threshold: [E + 1] running sums of the least score at which each expert takes a token, and the running
            sum of 1 that divides them. None if experts choose.
    """

    holds_experts: ClassVar[bool] = True
    tensor_roles: ClassVar[dict[str, str]] = {"router": "tokenwise", "experts": "tokenwise"}
    dispatch: Dispatch
    step_tokens: int | Tensor | None = None
    threshold: Tensor | None

    def __init__(self, config: MomaFfnConfig, dim: int, num_experts: int) -> None:
        super().__init__()
        expert, self.options, self.num_experts = config.expert, config.moma, num_experts
        self.capacity = self.options.capacity_factor / num_experts
        self.router = Scores(dim, num_experts)
        gated, activation = isinstance(expert, SwiGLUConfig), expert.activation  # type: ignore[attr-defined]
        self.experts = Experts(num_experts, dim, expert.hidden(dim), activation, gated, expert.bias)
        chooses = self.options.routing == "choice"
        self.aux = AuxRouter(dim, self.options.aux_dim, num_experts) if chooses else None
        self.register_buffer("threshold", None if chooses else torch.empty(num_experts + 1))
        self.initial = {} if chooses else {"threshold": Init("constant", 0.0)}
        self.dispatch = here
        self.tally = Tally(num_experts + len(STATISTICS) + (0 if chooses else num_experts))

    def forward(self, x: Tensor, mine: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]: weighted sums of expert outputs; 0 for tokens outside of `mine` [B, T].

        Experts choose only in training mode with gradients, since generation cannot look at later tokens.
        """
        trains = self.training and torch.is_grad_enabled()
        logits = self._logits(x, trains)
        scores = logits.sigmoid()
        guessed = scores - self._thresholds(scores) if self.aux is None else self.aux(x)
        mask = (guessed >= 0) & mine[..., None]
        chosen = choose(logits, mine, self.capacity) if trains else None
        pairs = chosen if self.aux is not None else None
        mask = mask if pairs is None else pairs.mask
        weights = to_sum_one(scores * mask) if self.options.normalize else scores
        routing = _of_mask(mask, weights) if pairs is None else pairs.routing(weights)
        out = serve(partial(self.dispatch, self.experts), x.flatten(0, 1), routing, self.num_experts)
        out = out.view_as(x)
        if chosen is None:
            return out
        loss, counted = self._counted(guessed, mask, chosen, mine)
        step_tokens = mine.numel() if self.step_tokens is None else self.step_tokens
        return tallied(out, loss * (self.options.aux_weight / step_tokens), counted, self.tally)

    def _logits(self, x: Tensor, trains: bool) -> Tensor:
        """[B, T, D] -> [B, T, E], the logits of the router, with noise if that is configured."""
        logits = self.router(x)
        if trains and self.options.gumbel_noise:
            ones, others = (torch.empty_like(logits).exponential_().log() for _ in range(2))
            logits = logits - ones + others
        return logits

    def _thresholds(self, scores: Tensor) -> Tensor:
        """Return the running means [E] of the thresholds; 0.5 before the first step."""
        assert self.threshold is not None
        sums, weight = self.threshold[:-1], self.threshold[-1]
        return torch.where(weight > 0, sums / weight.clamp(min=TINY), 0.5).to(scores.dtype)

    def _counted(self, guessed: Tensor, mask: Tensor, chosen: Chosen, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of the auxiliary router, summed over tokens, and the values for the tally."""
        served, zero = mask.any(-1), guessed.new_zeros(())
        sums = [mine.sum(), (mine & ~served).sum(), zero, zero]
        if self.aux is None:
            cutoffs = (chosen.cutoffs.sigmoid() * mine.sum(1, keepdim=True)).sum(0)
            return zero, torch.cat([_doubles([*mask.sum((0, 1)), *sums]), cutoffs.double()])
        each = F.binary_cross_entropy_with_logits(guessed, mask.to(guessed.dtype), reduction="none")
        loss = (each.mean(-1) * mine).sum()
        right = (((guessed >= 0) == mask).double().mean(-1) * mine).sum()
        return loss, _doubles([*mask.sum((0, 1)), *sums[:2], loss.detach(), right])

    def idle_parameters(self) -> int:
        """See `ExpertLayer.idle_parameters`; for a token of this modality."""
        each = sum(p.numel() for p in self.experts.parameters()) // self.num_experts
        return round(each * (self.num_experts - self.options.capacity_factor))

    @torch.no_grad()
    def load(self, sums: Tensor) -> dict[str, Tensor]:
        """See `ExpertLayer.load`; updates the thresholds."""
        counts, rest = sums[: self.num_experts], sums[self.num_experts :]
        total = dict(zip(STATISTICS, rest[: len(STATISTICS)].unbind(), strict=True))
        tokens = total.pop("tokens").clamp(min=1)
        metrics = {"experts_of_a_token": counts.sum() / tokens, "unserved": total["unserved"] / tokens}
        if self.threshold is None:
            return metrics | {name: total[name] / tokens for name in ("aux_loss", "aux_right")}
        means = F.pad(rest[len(STATISTICS) :] / tokens, (0, 1), value=1.0).to(self.threshold.dtype)
        moved = self.threshold.lerp(means, 1 - self.options.threshold_decay)
        self.threshold.copy_(torch.where(rest[0] > 0, moved, self.threshold))
        return metrics


TINY = 1e-20


def _doubles(numbers: list[Tensor]) -> Tensor:
    return torch.stack([number.double() for number in numbers])


def _of_mask(mask: Tensor, weights: Tensor) -> Routing:
    """Return the pairs in a mask [B, T, E]; waits for the device to know their number.

    With one token per row, all pairs are returned and those outside of the mask dropped: shapes never change.
    """
    one = mask.shape[1] == 1
    mask, weights = mask.flatten(0, 1), weights.flatten(0, 1)
    if one:
        numbers = torch.arange(mask.shape[1], device=mask.device)
        slots = one_per_slot(numbers.where(mask, mask.shape[1]), weights.where(mask, 0))
        return slots._replace(drops=True)
    tokens, experts = mask.nonzero(as_tuple=True)
    return Routing(tokens, experts, weights[tokens, experts])


class MomaFfn(nn.Module):
    """The feed-forward of a layer: experts of text, and experts of images."""

    def __init__(self, config: MomaFfnConfig, dim: int) -> None:
        super().__init__()
        for name in MODALITIES:
            self.add_module(name, ModalityExperts(config, dim, getattr(config.moma.experts, name)))

    def forward(self, x: Tensor, modality: Tensor) -> Tensor:
        """[B, T, D] and [B, T] -> [B, T, D]; 0 for padding."""
        each = [getattr(self, name)(x, modality == index) for index, name in enumerate(MODALITIES)]
        return each[0] + each[1]
