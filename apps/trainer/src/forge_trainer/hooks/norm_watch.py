"""Measures norms around the step of the optimizer, for any layout of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from forge_parallel.tensor import is_first_copy, local_part, local_shard
from torch import Tensor
from torch.optim import Optimizer

from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput

WEIGHT, GRADIENT, UPDATE = range(3)


class NormWatch(Hook):
    """The hook of `NormsConfig`. Building it is collective.

    Args:
        run: the run.
        every: steps between measurements.
        layer_of: returns the layer of a parameter, by the name of the parameter.
    """

    span = "norms"

    def __init__(self, run: RunView, every: int, layer_of: Callable[[str], str]) -> None:
        self.every, self._run = every, run
        named = [(n, p) for part in run.parts for n, p in part.named_parameters() if p.requires_grad]
        mine = [layer_of(name) for name, _ in named]
        self._layers = _everywhere(mine, run)
        self._parameters = [p for _, p in named]
        self._places = torch.tensor([self._layers.index(layer) for layer in mine], device=run.mesh.device)
        self._before: list[Tensor] = []
        self._squares: Tensor | None = None  # [3, layers]
        self._handles = [
            run.optimizer.register_step_pre_hook(self._before_step),
            run.optimizer.register_step_post_hook(self._after_step),
        ]

    def _is_due(self) -> bool:
        step = self._run.progress.step + 1
        return step % self.every == 0 or step == self._run.progress.until

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_due():
            return
        gradients = [p.grad for p in self._parameters]
        weights = self._added([p.detach() for p in self._parameters])
        self._squares = torch.stack([weights, self._added(gradients), torch.zeros_like(weights)])
        self._before = [local_part(p).clone() for p in self._parameters]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._before or self._squares is None:
            return
        # the first copy of each part holds what all of them hold
        moved = []
        for parameter, before in zip(self._parameters, self._before, strict=True):
            shard = local_shard(parameter, self._run.mesh)
            moved.append(_square(shard.values.double() - before.double()) * shard.is_first_copy)
        self._squares[UPDATE] = self._by_layer(moved)
        self._before = []

    def _added(self, tensors: list[Tensor | None]) -> Tensor:
        found = []
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            if tensor is None:
                found.append(torch.zeros((), dtype=torch.float64))
                continue
            found.append(_square(local_part(tensor)) * is_first_copy(parameter, self._run.mesh))
        return self._by_layer(found)

    def _by_layer(self, squares: list[Tensor]) -> Tensor:
        device = self._run.mesh.device
        total = torch.zeros(len(self._layers), dtype=torch.float64, device=device)
        if squares:
            total.index_add_(0, self._places, torch.stack([one.to(device) for one in squares]))
        return total

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device. Collective."""
        squares, self._squares = self._squares, None
        if squares is None:  # an optimizer that was not asked for a step that is not finite
            squares = torch.full((3, len(self._layers)), torch.nan, dtype=torch.float64)
            squares = squares.to(self._run.mesh.device)
        mesh = self._run.mesh
        norms = mesh.pipeline.sum_(mesh.stage.sum_(squares)).sqrt()
        if limit := self._run.job.train.clip_norm:
            norms[GRADIENT] /= (limit / (out.grad_norm.double() + 1e-6)).clamp(max=1.0)
        norms[UPDATE] /= norms[WEIGHT]
        names = [
            f"norms/{kind}/{layer}" for kind in ("weight", "grad", "update_ratio") for layer in self._layers
        ]
        self._run.log(dict(zip(names, norms.flatten().tolist(), strict=True)))

    def close(self) -> None:
        """See `Hook.close`."""
        for handle in self._handles:
            handle.remove()


def _square(values: Tensor) -> Tensor:
    return values.double().square().sum()


def _everywhere(mine: list[str], run: RunView) -> list[str]:
    """Return the layers of all pipeline stages, in the same order on all ranks. Collective."""
    everyone = [mine]
    if (group := run.mesh.control_group) is not None:
        import torch.distributed as dist

        everyone = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
    return list(dict.fromkeys(layer for layers in everyone for layer in layers))
