"""Auxiliary losses of routers and statistics of their load. B batch, T tokens, E experts."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

EXTRAS = ("balance", "z_loss", "dropped", "tokens")
"""Names of the sums over tokens that a tally has besides the counts of experts."""


class Tally:
    """Accumulates statistics of a router over the micro-batches of a step.

    Values are added in the backward pass, which happens once for each micro-batch, however often
    activations are recomputed, and never in an evaluation.

    Args:
        size: how many numbers are accumulated; for `Load` E counts of experts, then `EXTRAS`.

    Attributes:
        sums: [size] float64, exact for counts; None before the first values.
        last: [size] sums of the last step over all ranks; None before the first step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sums: Tensor | None = None
        self.last: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add the values of one micro-batch."""
        self.sums = values.clone() if self.sums is None else self.sums + values

    def take(self) -> Tensor | None:
        """Return the sums and begin anew."""
        taken, self.sums = self.sums, None
        return taken


class GlobalBalance(NamedTuple):
    """The balance loss of a micro-batch against the load of the global batch so far (arXiv:2501.11873).

    Attributes:
        affinities: [E] means over the tokens of this micro-batch; the affinities of each token sum to one.
        weight: weight of the loss, a number or [].
        sum_: sums a tensor, in place, over the ranks with other tokens of the global batch; None if there are
            none.
    """

    affinities: Tensor
    weight: float | Tensor
    sum_: Callable[[Tensor], Tensor] | None = None


def tallied(
    out: Tensor, loss: Tensor, values: Tensor, tally: Tally, balance: GlobalBalance | None = None
) -> Tensor:
    """Return `out`; its backward pass adds the gradient of `loss` and fills the tally.

    A loss computed inside a model then need not be returned through blocks or pipeline stages.

    Args:
        out: any tensor on the way to the loss of the model.
        loss: [] auxiliary loss, added to the loss that is differentiated.
        values: values for the tally.
        tally: tally that the backward pass fills.
        balance: a further loss whose load is that of all ranks in the micro-batches of the step up to this
            one, known only in the backward pass; its value is tallied under `balance` of `EXTRAS`.
            Collective.
    """
    affinities = None if balance is None else balance.affinities
    return _Tallied.apply(out, loss, affinities, values, tally, balance)


def tallied_at_once(values: Tensor, tally: Tally, balance: GlobalBalance | None = None) -> None:
    """Fill the tally now if there will be no backward pass: this layer and all before it are frozen.

    Args:
        values: values for the tally.
        tally: tally that is filled.
        balance: as in `tallied`. Collective.
    """
    tally.add(values)
    if balance is not None:
        _of_affinities(balance, values, tally)


class _Tallied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        loss: Tensor,
        affinities: Tensor | None,
        values: Tensor,
        tally: Tally,
        balance: GlobalBalance | None,
    ) -> Tensor:
        ctx.values, ctx.tally, ctx.like = values, tally, (loss.dtype, loss.device)
        ctx.balance = balance and balance._replace(affinities=balance.affinities.detach())
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.tally.add(ctx.values)
        dtype, device = ctx.like
        ones = torch.ones((), dtype=dtype, device=device)
        of_affinities = None if ctx.balance is None else _of_affinities(ctx.balance, ctx.values, ctx.tally)
        return gradient, ones, of_affinities, None, None, None


def _of_affinities(balance: GlobalBalance, values: Tensor, tally: Tally) -> Tensor:
    """Return the weighted gradient [E] of E sum_i f_i P_i by P; add the loss itself to the tally."""
    assert tally.sums is not None
    experts = len(balance.affinities)
    counts = tally.sums[:experts].clone()
    counts = counts if balance.sum_ is None else balance.sum_(counts)
    slope = experts * counts / counts.sum().clamp(min=1)
    tokens = values[experts + EXTRAS.index("tokens")]
    tally.sums[experts + EXTRAS.index("balance")] += (slope * balance.affinities).sum() * tokens
    return (slope * balance.weight).to(balance.affinities.dtype)


def assigned(experts: Tensor, groups: int, num_experts: int) -> Tensor:
    """Return how often each expert is chosen in each group of tokens. Waits for no device.

    Args:
        experts: [R] int64, sorted by group, equally many in each group; the value E counts for no expert.
        groups: number of groups.
        num_experts: E.

    Returns:
        [groups, E] int64.
    """
    rows = torch.arange(groups, device=experts.device).repeat_interleave(
        len(experts) // groups, output_size=len(experts)
    )
    counts = experts.new_zeros(groups * (num_experts + 1))
    counts.scatter_add_(0, rows * (num_experts + 1) + experts, torch.ones_like(experts))
    return counts.view(groups, num_experts + 1)[:, :num_experts]


def balance_loss(affinities: Tensor, counts: Tensor, real: Tensor | None = None) -> Tensor:
    """Return E sum_i f_i P_i, which is 1 for an even load, as mean over groups weighted by their tokens.

    f_i is the share of choices that fell on expert i, P_i the mean affinity to it, normalized to sum to one
    over the experts. For one group and one choice per token this is arXiv:2101.03961 eq. 4 to 6; for groups
    that are sequences arXiv:2412.19437 eq. 17 to 20, with the choices as they were made, bias and groups
    included.

    Args:
        affinities: [groups, tokens, E], not negative.
        counts: [groups, E], from `assigned`.
        real: [groups, tokens] bool, false for padding; None if there is no padding.
    """
    shares = counts.to(affinities.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
    if real is None:
        return counts.shape[1] * (shares * to_sum_one(affinities).mean(1)).sum(1).mean()
    sums = (to_sum_one(affinities) * real[..., None]).sum(1)
    return counts.shape[1] * (shares * sums).sum() / real.sum().clamp(min=1)


def to_sum_one(x: Tensor) -> Tensor:
    """Divide non-negative [..., n] by their sum; the result is close to zero where the sum is below 1e-20.

    The bound is far above the smallest float32, because gradients are divided by it.
    """
    return x / x.sum(-1, keepdim=True).clamp(min=1e-20)


def mean_of(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean of [N, ...] over the tokens, or over the tokens that `real` [N] bool selects."""
    if real is None:
        return x.mean(0)
    return (x * real.view(-1, *[1] * (x.ndim - 1))).sum(0) / real.sum().clamp(min=1)


def z_loss(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean of the squared log-normalizers of logits [N, E] (arXiv:2202.08906 eq. 5)."""
    return mean_of(logits.logsumexp(-1).square(), real)


class Load(NamedTuple):
    """The load of one router in a step, over all ranks, on the device.

    Attributes:
        counts: [E] number of pairs for each expert, dropped ones included.
        extras: [] each, by name of `EXTRAS`.
    """

    counts: Tensor
    extras: dict[str, Tensor]

    @classmethod
    def of(cls, sums: Tensor) -> Load:
        """Build it from the sums of a tally."""
        experts = len(sums) - len(EXTRAS)
        return cls(sums[:experts], dict(zip(EXTRAS, sums[experts:].unbind(), strict=True)))

    def statistics(self) -> dict[str, Tensor]:
        """Return by name, [] each, how even the load is (1 is even), and means over tokens."""
        total, tokens = self.counts.sum().clamp(min=1), self.extras["tokens"].clamp(min=1)
        shares = self.counts / total
        entropy = -torch.xlogy(shares, shares).sum() / log(max(len(shares), 2))
        return {
            "load_max_over_mean": shares.max() * len(shares),
            "load_entropy": entropy,
            "dead_experts": (self.counts == 0).sum().to(shares.dtype),
            "drop_rate": self.extras["dropped"] / total,
            "balance_loss": self.extras["balance"] / tokens,
            "router_z_loss": self.extras["z_loss"] / tokens,
        }
