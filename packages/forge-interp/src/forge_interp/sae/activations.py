"""Which features are active, and which loss terms keep them few?

Parameters and formulas are those of SAELens 6 (sae_lens/saes/*.py). Letters: R rows, D input dim, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge_interp.sae.autoencoder import SparseAutoencoder

Reduce = Callable[[Tensor], Tensor]
"""Function from [n] of this rank to the concatenation over all ranks."""


@dataclass(frozen=True)
class Penalty:
    """How training keeps features sparse; an activation ignores fields that it does not use."""

    coefficient: float = 1.0  # factor of the L1 (relu, gated) or L0 (jumprelu) penalty, after its warm-up
    bandwidth: float = 0.05  # width of the straight-through estimator (jumprelu)
    pre_act: float = 0.0  # pulls the pre-activations of dead features up to the threshold (jumprelu)
    auxiliary: float = 1.0  # factor of the loss of dead features that explain the error (topk, batch_topk)


class _Relu:
    """Bricken et al. 2023: relu, and an L1 penalty weighted by the norms of decoder rows."""

    initial = {"b_enc": 0.0}

    def pre(self, sae: SparseAutoencoder, linear: Tensor) -> Tensor:
        """Return [R, F] pre-activations of `linear` = input @ W_enc."""
        return linear + sae.b_enc

    def infer(self, sae: SparseAutoencoder, pre: Tensor) -> Tensor:
        """Return [..., F] features outside of training."""
        return pre.relu()

    def train(self, sae: SparseAutoencoder, pre: Tensor, penalty: Penalty, reduce: Reduce) -> Tensor:
        """Return [R, F] features of a batch, with gradients."""
        return self.infer(sae, pre)

    def losses(self, sae: SparseAutoencoder, batch: Batch, penalty: Penalty) -> Tensor:
        """Return [R], the addition to the squared error of each row."""
        return penalty.coefficient * (batch.acts * sae.W_dec.norm(dim=1)).sum(-1)


class _TopK(_Relu):
    """Gao et al. 2024, arXiv:2406.04093: the k largest of a row; dead features explain the rest."""

    def pre(self, sae: SparseAutoencoder, linear: Tensor) -> Tensor:
        pre = linear + sae.b_enc
        return pre * sae.W_dec.norm(dim=-1) if sae.config.rescale_acts_by_decoder_norm else pre

    def infer(self, sae: SparseAutoencoder, pre: Tensor) -> Tensor:
        top = pre.topk(int(sae.config.k or 0), dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter(-1, top.indices, top.values.relu())

    def losses(self, sae: SparseAutoencoder, batch: Batch, penalty: Penalty) -> Tensor:
        """Return [R], ibid. A.2 and B.1: a row's D / 2 largest dead features, compared with its error."""
        num_dead, most = int(batch.dead.sum()), batch.inputs.shape[-1] // 2
        if not num_dead or not penalty.auxiliary:
            return batch.acts.new_zeros(len(batch.acts))
        top = batch.pre.masked_fill(~batch.dead, -torch.inf).topk(min(most, num_dead), sorted=False)
        acts = torch.zeros_like(batch.pre).scatter(-1, top.indices, top.values)
        error = (batch.target - batch.output).detach()
        made = sae.unscaled(acts) @ sae.W_dec
        return penalty.auxiliary * min(num_dead / most, 1.0) * (made - error).square().sum(-1)


class _BatchTopK(_TopK):
    """Bussmann et al. 2024, arXiv:2412.06410: the k R largest of a batch; a threshold for single rows."""

    def infer(self, sae: SparseAutoencoder, pre: Tensor) -> Tensor:
        """Return [..., F] above the threshold: the running mean of the least active feature of a batch."""
        return pre.relu() * (pre > sae.topk_threshold.to(pre.dtype))

    def train(self, sae: SparseAutoencoder, pre: Tensor, penalty: Penalty, reduce: Reduce) -> Tensor:
        acts = pre.relu()
        flat = acts.detach().flatten()
        count = int((sae.config.k or 0) * len(reduce(flat.new_zeros(len(acts)))))
        largest = reduce(flat.topk(min(count, len(flat))).values).topk(count).values
        acts = acts * (acts >= largest[-1])
        if bool(largest[0] > 0):
            least = largest[largest > 0][-1].to(sae.topk_threshold.dtype)
            sae.topk_threshold.mul_(1 - sae.threshold_rate).add_(sae.threshold_rate * least)
        return acts


class _JumpRelu(_Relu):
    """Rajamanoharan et al. 2024, arXiv:2407.14435: a threshold for each feature, and an L0 penalty."""

    initial = {"b_enc": 0.0, "threshold": 0.01}

    def infer(self, sae: SparseAutoencoder, pre: Tensor) -> Tensor:
        return pre.relu() * (pre > sae.threshold)

    def train(self, sae: SparseAutoencoder, pre: Tensor, penalty: Penalty, reduce: Reduce) -> Tensor:
        """Return [R, F], with the straight-through gradient of the threshold (eq. 11)."""
        return _Jump.apply(pre, sae.threshold, penalty.bandwidth, False)  # type: ignore[return-value]

    def losses(self, sae: SparseAutoencoder, batch: Batch, penalty: Penalty) -> Tensor:
        """Return [R], eq. 9 and 12, and SAELens' `pre_act_loss` on dead features."""
        active: Any = _Jump.apply(batch.pre, sae.threshold, penalty.bandwidth, True)
        loss = penalty.coefficient * active.sum(-1)
        if penalty.pre_act:
            short = (sae.threshold - batch.pre).relu() * batch.dead * sae.W_dec.norm(dim=1)
            loss = loss + penalty.pre_act * short.sum(-1)
        return loss


class _Gated(_Relu):
    """Rajamanoharan et al. 2024, arXiv:2404.16014: separate gate and magnitude of each feature."""

    initial = {"b_gate": 0.0, "b_mag": 0.0, "r_mag": 0.0}

    def pre(self, sae: SparseAutoencoder, linear: Tensor) -> Tensor:
        return linear

    def infer(self, sae: SparseAutoencoder, pre: Tensor) -> Tensor:
        return (pre + sae.b_gate > 0) * (pre * sae.r_mag.exp() + sae.b_mag).relu()

    def losses(self, sae: SparseAutoencoder, batch: Batch, penalty: Penalty) -> Tensor:
        """Return [R], eq. 8: L1 of the gate, and the error of the reconstruction by the gate alone."""
        gate = (batch.pre + sae.b_gate).relu()
        error = (gate @ sae.W_dec + sae.b_dec - batch.target).square().sum(-1)
        return penalty.coefficient * (gate * sae.W_dec.norm(dim=1)).sum(-1) + error


ACTIVATIONS: dict[str, _Relu] = dict(
    relu=_Relu(), topk=_TopK(), batch_topk=_BatchTopK(), jumprelu=_JumpRelu(), gated=_Gated()
)


@dataclass(frozen=True)
class Batch:
    """Rows of a training step, with features and outputs."""

    inputs: Tensor  # [R, D]
    target: Tensor  # [R, D'], to be reconstructed
    pre: Tensor  # [R, F]
    acts: Tensor  # [R, F]
    output: Tensor  # [R, D']
    dead: Tensor  # [F] bool


class _Jump(torch.autograd.Function):
    """x (1 with `counts`) where x > threshold, else 0; with `counts` only the threshold has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor, bandwidth: float, counts: bool) -> Tensor:
        ctx.save_for_backward(x, threshold)
        ctx.bandwidth, ctx.counts = bandwidth, counts
        return (x > threshold).to(x) if counts else x * (x > threshold)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:  # type: ignore[override]
        x, threshold = ctx.saved_tensors
        near = ((x - threshold).abs() < ctx.bandwidth / 2) * grad / ctx.bandwidth
        height = 1.0 if ctx.counts else threshold
        return None if ctx.counts else (x > threshold) * grad, -(height * near).sum(0), None, None
