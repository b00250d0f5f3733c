"""Computes comparable figures of a run: speed by device and relative to its peak, and memory."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from forge_trainer.console import emit
from forge_trainer.hooks.memory import GIB

if TYPE_CHECKING:
    from forge_parallel.mesh import Mesh

    from forge_trainer.config.job import Job
    from forge_trainer.hooks.base import RunView

PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.0,
    "NVIDIA GH200 480GB": 989.0,
}
"""Peak of dense bfloat16 with float32 sums, by torch's name of the device; from NVIDIA's data sheets."""

KIB = 1 << 10


class Figures:
    """Computes figures from tokens a second.

    Args:
        run: the run.
        frozen: names of the frozen parts of the model, see `frozen_parts`.
    """

    def __init__(self, run: RunView, frozen: Collection[str]) -> None:
        job = run.job
        self._device = run.mesh.device
        self._ranks = run.env.world_size
        self._model, self._text = job.model, [{"tokens": (1, job.data.max_tokens)}]
        compute = job.precision.compute_dtype(self._device.type)
        self._repeated, self._frozen = repeated_flops(job), frozen
        self._peak = job.track.peak_tflops or _peak(self._device, compute)

    def of(self, tokens_per_s: float, shapes: Sequence[Mapping[str, Sequence[int]]] = ()) -> dict[str, float]:
        """Return figures by name; figures by device, `mfu*`, `hfu` and `memory_gib` are for one device.

        Args:
            tokens_per_s: tokens a second of the whole run.
            shapes: input shapes of recent micro-batches, from which the cost of a token is computed.
        """
        by_device = tokens_per_s / self._ranks
        flops, full = (self._flops(shapes or self._text, causal) for causal in (True, False))
        found = {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": by_device,
            "model_tflops": tokens_per_s * flops / 1e12,
            "memory_gib": _memory_bytes(self._device) / GIB,
        }
        if self._peak is not None:
            found["mfu"] = by_device * flops / 1e12 / self._peak
            found["mfu_full_attention"] = by_device * full / 1e12 / self._peak
            if self._repeated is not None:
                found["hfu"] = by_device * (flops + self._repeated) / 1e12 / self._peak
        return found

    def _flops(self, shapes: Sequence[Mapping[str, Sequence[int]]], causal: bool) -> float:
        """Return the model FLOPs of a token."""
        alike = Counter(tuple((name, *shape) for name, shape in one.items()) for one in shapes)
        given = [({name: shape for name, *shape in key}, count) for key, count in alike.items()]
        tokens = sum(prod(one["tokens"]) * count for one, count in given)
        return sum(self._model.step_flops(one, causal, self._frozen) * count for one, count in given) / tokens


def frozen_parts(models: Sequence[nn.Module], mesh: Mesh) -> set[str]:
    """Return the direct submodules of a model that no pipeline stage trains at all. Collective.

    Modules without parameters are left out.
    """
    trained: dict[str, bool] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            part = name.partition(".")[0]
            trained[part] = trained.get(part, False) or parameter.requires_grad
    stages = [trained]
    if mesh.pipeline.size > 1:
        stages = stages * dist.get_world_size(mesh.control_group)
        dist.all_gather_object(stages, trained, group=mesh.control_group)
    moves = {part for stage in stages for part, is_trained in stage.items() if is_trained}
    return {part for stage in stages for part in stage} - moves


def repeated_flops(job: Job, causal: bool = True) -> float | None:
    """Return the FLOPs of a token in matmuls and attention that activation checkpointing computes again.

    A checkpointed block counts in full, as in Korthikanti et al. 2022, arXiv:2205.05198. None if unknown: the
    compiler chooses what to repeat, each pipeline stage counts its blocks separately, or the model does not
    give the cost of a block.
    """
    config = job.activation_checkpointing
    if config.mode not in ("full", "every", "budget"):
        return 0.0  # `selective` repeats neither matmuls nor attention
    layers = job.model.layer_flops(job.data.max_tokens, causal)
    if config.mode == "budget" or not layers or (config.mode == "every" and job.mesh.pp > 1):
        return None
    return sum(layers[:: config.every if config.mode == "every" else 1])


def _peak(device: torch.device, compute: str) -> float | None:
    """Return the peak of a device; print a message and return None if it is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if name in PEAK_TFLOPS and compute == "bfloat16":
        return PEAK_TFLOPS[name]
    emit(
        f"no MFU is logged: the peak of {name!r} in {compute} is not known; give track.peak_tflops\n",
        sys.stderr,
    )
    return None


def _memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far: of tensors on a GPU, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB
