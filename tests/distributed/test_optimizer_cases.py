"""Every optimizer where something is odd: NaN on one rank, no targets, tiny matrices, frozen ones."""

from functools import cache
from math import isnan

import pytest
import torch
from forge_data.loading.loader import MicroBatch
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_parallel import Env, Mesh, MeshConfig, build_mesh
from forge_parallel.tensor import local_part
from forge_parallel.testing import run_ranks
from forge_trainer.optim import (
    AdamWConfig,
    GroupRule,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    trainable,
)
from forge_trainer.steps.update import Update
from msgspec.structs import replace
from parity import TOKENS, VOCAB, batch, made
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(lr=0.01),
    "adamw-ema": AdamWConfig(lr=0.01, ema_decay=0.5),
    "adamw-bfloat16-moments": AdamWConfig(lr=0.01, moments="bfloat16"),
    "lion": LionConfig(lr=0.01),
    "muon": MuonConfig(lr=0.01, scale="original"),
    "schedule-free": ScheduleFreeAdamWConfig(lr=0.01),
}
SHAPES = {
    "row": (1, 6),
    "column": (6, 1),
    "single": (1, 1),
    "odd": (5, 3),
    "gain": (1,),
    "frozen": (4, 4),
    "free": (4, 4),
}
ROLES = {"gain": "norm"}
RULES = (GroupRule(match=("frozen",), freeze_until=4), GroupRule(match=("free",), decay=0.0))
BAD = {2: ("row", 0), 3: ("odd", 4)}
"""Steps at which one number of a gradient is not finite, which one rank alone holds."""


class Tensors(nn.Module):
    """Parameters of odd shapes, of which a rank may hold nothing."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(sharded(value, mesh)))

    def parameter_roles(self):
        return {name: ROLES.get(name, "matrix") for name in SHAPES}


def sharded(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    if mesh.fsdp is None:
        return value
    return distribute_tensor(value, mesh.fsdp, [Shard(0)], src_data_rank=None)


def stepped(name: str) -> tuple[list[bool], list[dict[str, torch.Tensor]]]:
    """Whether each step was finite, and all weights after it."""
    env = Env.detect()
    mesh = build_mesh(MeshConfig(), env) if env.world_size > 1 else Mesh(env.device)
    config = replace(OPTIMIZERS[name], groups=RULES)
    model = Tensors(mesh)
    update = Update([model], config.build(trainable([model]), mesh), lambda step: 1.0, 1.0, mesh)
    finite, found = [], []
    for step in range(7):
        generator = torch.Generator().manual_seed(step)
        for key, parameter in model.named_parameters():
            gradient = torch.randn(SHAPES[key], generator=generator, dtype=torch.float64)
            if step in BAD and BAD[step][0] == key:
                gradient[BAD[step][1]] = float("nan") if step == 2 else float("inf")
            parameter.grad = sharded(gradient, mesh)
        before = [local_part(p).clone() for p in model.parameters()]
        finite.append(bool(update(step, torch.tensor(1.0, dtype=torch.float64)).finite))
        same = [torch.equal(a, local_part(b)) for a, b in zip(before, model.parameters(), strict=True)]
        assert finite[-1] or all(same), "a bad step changed weights"
        tensors = {key: p.detach() for key, p in model.named_parameters()}
        found.append({k: t.full_tensor() if mesh.fsdp is not None else t.clone() for k, t in tensors.items()})
    return finite, found


@cache
def single(name: str) -> tuple[list[bool], list[dict[str, torch.Tensor]]]:
    return run_ranks(stepped, 1, name)[0]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_odd_matrices_and_bad_numbers_of_one_rank(name, ranks):
    finite, one = single(name)
    assert finite == [step not in BAD for step in range(7)]
    for many_finite, many in run_ranks(stepped, ranks, name):
        assert many_finite == finite
        for step, weights in enumerate(one):
            for key, value in weights.items():
                torch.testing.assert_close(
                    many[step][key], value, rtol=1e-10, atol=1e-12, msg=f"{step} {key}"
                )


@pytest.mark.dist
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_and_undecayed_parameters(name):
    """Frozen ones keep every bit, then move; the decay of one group does not reach the other."""
    weights = single(name)[1]
    assert all(torch.equal(weights[step]["frozen"], weights[0]["frozen"]) for step in range(4))
    for step in (4, 5, 6):
        assert not torch.equal(weights[step]["frozen"], weights[step - 1]["frozen"])


MODEL = DecoderConfig(
    vocab_size=VOCAB, dim=16, num_layers=1, max_tokens=TOKENS, attention=GroupedQueryConfig(num_heads=4)
)


def without_targets(micro: MicroBatch) -> MicroBatch:
    labels = torch.full_like(micro.inputs["labels"], -100)
    return MicroBatch(micro.inputs | {"labels": labels}, {"targets": torch.zeros((), dtype=torch.int64)})


def on_targets(name: str, case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Four steps, in which some micro-batches have no targets; losses, and what this rank holds.

    A step without any target is seen to be none: not finite, and no weight moves.
    """
    config = replace(OPTIMIZERS[name], weight_decay=0.0)
    run = made({}, MODEL, "float64", optimizer=config)
    losses = []
    for index in range(4):
        micros = batch(index, run.mesh)
        if case == "nothing at all" or (case == "a batch" and index == 2):
            micros = [without_targets(micro) for micro in micros]
        if case == "a micro-batch":
            micros = [without_targets(micros[0]), *micros[1:]]
        if case == "left out":
            micros = micros[1:]
        before, targets = held(run.parts), sum(int(micro.statistics["targets"]) for micro in micros)
        out = run.step.train(micros, index)
        assert bool(out.finite) == (targets > 0)
        assert targets or all(torch.equal(before[name], now) for name, now in held(run.parts).items())
        losses.append(out.loss.item())
    return losses, held(run.parts)


def held(parts) -> dict[str, torch.Tensor]:
    """What this rank holds of each parameter."""
    return {n: local_part(p).clone() for part in parts for n, p in part.named_parameters()}


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batch_without_targets_is_as_if_it_were_left_out(name, ranks):
    pairs = zip(
        run_ranks(on_targets, ranks, name, "a micro-batch"),
        run_ranks(on_targets, ranks, name, "left out"),
        strict=True,
    )
    for (losses, weights), (expected, reference) in pairs:
        assert losses == pytest.approx(expected, rel=1e-12)
        for key, value in reference.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batch_without_targets_is_a_step_without_effect(name, ranks):
    """Its loss is no number, and no weight moves, whatever momentum there is."""
    for losses, _ in run_ranks(on_targets, ranks, name, "a batch"):
        assert isnan(losses[2]) and losses[3] > 0
    for losses, weights in run_ranks(on_targets, ranks, name, "nothing at all"):
        assert all(map(isnan, losses))
        for key, value in run_ranks(untrained, 1)[0].items() if ranks == 1 else ():
            assert torch.equal(weights[key], value), key


def untrained() -> dict[str, torch.Tensor]:
    run = made({}, MODEL, "float64")
    return {n: p.detach().clone() for part in run.parts for n, p in part.named_parameters()}
