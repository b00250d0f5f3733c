"""Computes new weights from gradients: the half of a training step that all kinds of steps share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from forge_model.moe.layer import gradient_scales
from forge_parallel.capabilities import without_dynamo
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_shard
from forge_resilience.finite import BuffersBefore, step_if_finite
from torch import Tensor, nn

from forge_trainer.optim.averaged import average_weights
from forge_trainer.optim.groups import drop_frozen_gradients
from forge_trainer.optim.stages import stage_lr_factor


class Updated(NamedTuple):
    """The result of an update.

    Attributes:
        grad_norm: [] float32 gradient norm before clipping.
        finite: [] bool; when false, nothing was changed.
        lr: learning rate of the first parameter group.
        statistics: [] each, by name: statistics of the step from this rank's parts of the model, equal on
            all ranks that have these parts.
    """

    grad_norm: Tensor
    finite: Tensor
    lr: float
    statistics: dict[str, Tensor]


@dataclass
class Update:
    """The update of a step: clips, sets the learning rate, takes the optimizer step, clears the gradients.

    A part of the model that has a method `before_optimizer_step(sum_)` is called before gradients are
    clipped; then the gradients of experts are scaled if their layer asks for it. The method may change
    buffers, such as the bias of a router, by its counts, and may return statistics. `sum_` sums a tensor over
    all ranks that have the same part of the model; ranks of tp have seen the same tokens, or parts of them
    with `tensor_parallel.sequence`. If the step is skipped, persistent buffers get back their values at
    `begin`. `begin` calls the method `before_micro_batches(tokens)` of a part, if any, with the number of
    tokens in the global batch (without padding if that is known), and `before_step(step)` with the step.

    Attributes:
        parts: this rank's parts of the model.
        optimizer: optimizer whose groups have `initial_lr`.
        lr_factor: returns the factor of the peak learning rate for a step, from 0.
        clip_norm: largest gradient norm; 0 never clips.
        mesh: the grid of ranks.
        ema_decay: decay of the moving average of the weights; 0 keeps no average.
        on_first_step: called in the first step of a run, after the backward pass. Collective.
    """

    parts: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    lr_factor: Callable[[int], float]
    clip_norm: float
    mesh: Mesh
    ema_decay: float = 0.0
    on_first_step: Callable[[], None] | None = None

    def begin(self, tokens: int | Tensor, step: int = 0) -> list[BuffersBefore]:
        """Announce a step to the parts before its first forward pass; return copies of their buffers."""
        for part in self.parts:
            if (begin := getattr(part, "before_micro_batches", None)) is not None:
                begin(tokens)
            if (number := getattr(part, "before_step", None)) is not None:
                number(step)
        return [BuffersBefore(part) for part in self.parts]

    def __call__(self, step: int, loss: Tensor, saved_buffers: Sequence[BuffersBefore] = ()) -> Updated:
        """Take step number `step`; without effect if the loss or any gradient is not finite. Collective.

        Args:
            step: number of the step, from 0.
            loss: [] loss of the global batch.
            saved_buffers: result of `begin`.
        """
        if step == 0 and self.on_first_step is not None:
            self.on_first_step()
        drop_frozen_gradients(self.optimizer, step)
        statistics = self._prepare()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # if this rank trains nothing, its frozen parameters give the dtype in which ranks add up
        parameters = parameters or [p for part in self.parts for p in part.parameters()]
        norm = global_norm(parameters, self.mesh)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        if self.clip_norm:
            clip_(parameters, self.clip_norm, norm)
        lr = self._set_lr(step)
        with without_dynamo():
            # where the optimizer runs: on the host, if the weights are there
            step_if_finite(self.optimizer, finite.to(parameters[0].device))
            self.optimizer.zero_grad()
            if self.ema_decay:
                average_weights(self.optimizer, self.ema_decay, finite.to(parameters[0].device))
        self._reset_lr()
        for buffers in saved_buffers:
            buffers.restore_unless(finite)
        return Updated(norm, finite, lr, statistics)

    def _prepare(self) -> dict[str, Tensor]:
        """Run each part's `before_optimizer_step` and return the statistics. Collective."""
        statistics: dict[str, Tensor] = {}
        for part in self.parts:
            if (prepare := getattr(part, "before_optimizer_step", None)) is not None:
                statistics |= prepare(self.mesh.stage.sum_) or {}
            for experts, scales in gradient_scales(part):
                _scale_gradients(experts, scales)
        return statistics

    def _set_lr(self, step: int) -> float:
        factor = self.lr_factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor * stage_lr_factor(group.get("curves", ()), step)
        first = next(iter(self.optimizer.param_groups), None)
        return self.optimizer.defaults["lr"] * factor if first is None else first["lr"]

    def _reset_lr(self) -> None:
        """Reset the learning rate: it is a function of the step, so a checkpoint need not contain it."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]


@torch.no_grad()
def _scale_gradients(experts: nn.Module, scales: Tensor) -> None:
    """Multiply this rank's gradients of stacked parameters [E, ...] by `scales` [E], in place."""
    for parameter in experts.parameters():
        if parameter.grad is not None:
            local, offsets, _ = local_shard(parameter.grad)
            mine = scales[offsets[0] : offsets[0] + len(local)].to(local)
            local.mul_(mine.view(-1, *[1] * (local.ndim - 1)))
