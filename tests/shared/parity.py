"""Training under a layout, for comparison with one process: losses, norms, weights."""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from forge_data.loading.loader import MicroBatch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_parallel import (
    Env,
    Mesh,
    MeshConfig,
    ParallelConfig,
    Plan,
    build_mesh,
    local_shard,
    materialize,
    parallelize,
)
from forge_parallel.stages import keep_stage, stages_of
from forge_trainer.optim import AdamWConfig, OptimizerConfig, trainable
from forge_trainer.optim.groups import freeze
from forge_trainer.schedule import CosineConfig
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update
from torch import Tensor, nn
from torch.optim import Optimizer

VOCAB, TOKENS, GLOBAL, STEPS = 68, 16, 16, 10
EPS = 1e-5
"""Of AdamW: far above the rounding of a float32 gradient (1e-9 here). With 1e-8 a gradient that is nearly
zero moves its weight by its rounding errors, which no two layouts share, and on some CPUs that is more than
the tolerance."""


def batch(index: int, mesh: Mesh, micro_batches: int = 2, together: bool = False) -> list[MicroBatch]:
    """This rank's part, in some micro-batches, of packed documents with unequal counts of valid targets.

    With `together` the micro-batches of all ranks at one place are the same sequences under every layout, and
    rows end in padding.
    """
    generator = torch.Generator().manual_seed(index)
    rows = torch.randint(VOCAB, (GLOBAL, TOKENS + 1), generator=generator)
    ends = torch.rand(GLOBAL, TOKENS + 1, generator=generator) < 0.2
    doc_ids = ends.cumsum(1)
    labels = rows[:, 1:].clone()
    for row in range(GLOBAL):
        labels[row, : row % (TOKENS + 1)] = -100
    rank, ranks = mesh.batch.rank, mesh.batch.size
    if together:
        for row in range(GLOBAL):
            doc_ids[row, TOKENS - row % 7 :] = -1
            labels[row, TOKENS - row % 7 :] = -100
        parts = [part.chunk(ranks)[rank] for part in torch.arange(GLOBAL).chunk(micro_batches)]
    else:
        parts = torch.arange(GLOBAL).chunk(ranks)[rank].chunk(micro_batches)
    return [
        MicroBatch(
            {"tokens": rows[part, :-1], "labels": labels[part], "doc_ids": doc_ids[part, :-1]},
            {"targets": (labels[part] >= 0).sum()},
        )
        for part in parts
    ]


class Made(NamedTuple):
    """A run under a layout, before its first step."""

    parts: list[nn.Module]
    optimizer: Optimizer
    step: TextStep
    mesh: Mesh


def made(
    sizes: dict,
    config: DecoderConfig,
    dtype: str,
    parallel: ParallelConfig | None = None,
    seed: int = 3,
    optimizer: OptimizerConfig | None = None,
) -> Made:
    """A decoder with the weights of a seed; on one rank nothing is made parallel."""
    env, parallel = Env.detect(), parallel or ParallelConfig()
    trains = optimizer or AdamWConfig(lr=3e-3, eps=EPS)
    mesh = build_mesh(MeshConfig(**sizes), env) if env.world_size > 1 else Mesh(env.device)
    parts = []
    for stage in stages_of(mesh.pipeline.rank, mesh.pipeline.size, parallel.pipeline):
        with torch.device("meta"):
            model = config.build().to(getattr(torch, dtype))
        freeze(model, trains.groups)
        keep_stage(model, Plan.of(model), stage, mesh.pipeline.size, parallel.pipeline)
        if env.world_size > 1:
            parallelize(model, mesh, Plan.of(model), parallel)
        parts.append(materialize(model, mesh.device))
        initialize(model, seed, local_shard)
    built = trains.build(trainable(parts), mesh)
    factor = partial(CosineConfig(warmup_steps=2).factor, steps=20)
    update = Update(parts, built, factor, 0.5, mesh, trains.ema_decay)
    loss = LossConfig(chunk_tokens=37, z_loss_weight=1e-3).build()
    return Made(parts, built, TextStep(parts, loss, mesh, update=update), mesh)


def trained(
    sizes: dict,
    config: DecoderConfig,
    dtype: str,
    parallel: ParallelConfig,
    micro_batches: int = 2,
    steps: int = STEPS,
) -> dict[str, list]:
    """Losses, norms, and the weights before and after."""
    parts, _, step, mesh = made(sizes, config, dtype, parallel)
    before = full(parameters(parts))
    outs = [step.train(batch(index, mesh, micro_batches), index) for index in range(steps)]
    return {
        "loss": [out.loss.item() for out in outs],
        "norm": [out.grad_norm.item() for out in outs],
        "before": before,
        "validation": step.evaluate([batch(STEPS, mesh)])["loss"],
        "after": full(parameters(parts)),
    }


def parameters(parts: list[nn.Module]) -> dict[str, Tensor]:
    """Those that this rank holds, by name."""
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


def full(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor, put together from what each rank says it holds; copies must be equal bit for bit."""
    shards = {name: (tensor.shape, local_shard(tensor)) for name, tensor in mine.items()}
    boxes = {name: (shape, shard.values.clone(), shard.offsets) for name, (shape, shard) in shards.items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, boxes)
    found: dict = {}
    for name, (shape, values, offsets) in (item for boxes in everyone for item in boxes.items()):
        found.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
        place = found[name][tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))]
        assert torch.equal(place[~place.isnan()], values[~place.isnan()]), f"copies of {name} differ"
        place.copy_(values)
    return found
