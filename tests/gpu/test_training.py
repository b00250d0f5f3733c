"""Training on one GPU: beside the CPU in float32, compiled, in 8 bits, and never waiting for the device."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forge_ckpt.state import TrainState
from forge_data.loading.batches import Group
from forge_data.loading.micro_batch import MicroBatch
from forge_data.loading.micro_batch import micro_batches as cut_group
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.attention.config import GroupedQueryConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_parallel import (
    Env,
    MeshConfig,
    ParallelConfig,
    Plan,
    build_mesh,
    local_shard,
    parallelize,
    process_group,
)
from forge_parallel.apply import materialize
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import ActivationCheckpointingConfig, FSDPConfig, PrecisionConfig
from forge_parallel.fp8_config import FP8Config
from forge_trainer.optim import AdamWConfig, trainable
from forge_trainer.schedule import CosineConfig
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update
from gpu_device import BACKEND, DEVICE, needs_cuda

pytestmark = pytest.mark.gpu
MODEL = DecoderConfig(
    vocab_size=512,
    dim=256,
    num_layers=2,
    max_tokens=256,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2),
    ffn=SwiGLUConfig(dim=512),
)
FLOAT32, PURE = PrecisionConfig(compute="float32"), PrecisionConfig(pure_bf16=True)
COMPILED = CompileConfig(enabled=True, backend=BACKEND)
STEPS = 6
ON_GPU = DEVICE.type == "cuda"


def micro_batches(device: torch.device, packed: bool = True) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        rows = torch.randint(MODEL.vocab_size, (2, 257), generator=generator)
        inputs = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        if packed:
            inputs["doc_ids"] = (torch.rand(2, 256, generator=generator) < 0.02).cumsum(1)
        count = torch.tensor(inputs["labels"].numel())
        found.append(MicroBatch({name: x.to(device) for name, x in inputs.items()}, {"targets": count}))
    return found


def steps(env: Env, parallel: ParallelConfig, optimizer: AdamWConfig | None = None) -> TextStep:
    """A step on a fresh model; a process group must exist where the number format needs one."""
    mesh = build_mesh(MeshConfig(), env)
    with torch.device("meta"):
        model = MODEL.build()
    parallelize(model, mesh, Plan.of(model), parallel)
    initialize(materialize(model, mesh.device), 0, local_shard)
    built = (optimizer or AdamWConfig(lr=1e-3)).build(trainable([model]), mesh)
    update = Update([model], built, partial(CosineConfig(warmup_steps=2).factor, steps=20), 1.0, mesh)
    return TextStep([model], LossConfig().build(), mesh, update=update)


def losses(parallel: ParallelConfig, device: torch.device = DEVICE, packed: bool = True) -> list[float]:
    env = Env(0, 0, 1, device, "none")
    batch = micro_batches(device, packed)
    with process_group(env, needed=parallel.needs_group(device.type)):
        step = steps(env, parallel)
        return [step.train(batch, index).loss.item() for index in range(STEPS)]


def recomputed(mode: Any, compile: CompileConfig) -> ParallelConfig:
    return ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode=mode), compile=compile)


@pytest.fixture(scope="module")
def exact() -> list[float]:
    """On the CPU, in float32."""
    return losses(ParallelConfig(precision=FLOAT32), torch.device("cpu"))


def test_float32_training_on_a_gpu_equals_that_on_a_cpu(exact):
    assert losses(ParallelConfig(precision=FLOAT32)) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(compile=COMPILED),
        ParallelConfig(precision=PURE),
        recomputed("full", COMPILED),
        recomputed("selective", COMPILED),
        recomputed("budget", COMPILED),
        recomputed("offload", CompileConfig()),
        ParallelConfig(fsdp=FSDPConfig(reduce_gradients="every_micro_batch")),
        ParallelConfig(fsdp=FSDPConfig(offload=True, prefetch=1)),
        ParallelConfig(fsdp=FSDPConfig(offload=True), precision=PURE, compile=COMPILED),
    ],
    ids=[
        *("bf16", "compiled", "pure-bf16", "full", "selective", "budget", "activations-offloaded"),
        *("every-micro-batch", "on-host", "pure-on-host"),
    ],
)
def test_bf16_training_stays_near_float32(parallel, exact):
    found = losses(parallel)
    assert found == pytest.approx(exact, rel=1e-2)
    assert found[-1] < found[0] - 0.1


@needs_cuda
def test_offload_keeps_weights_gradients_and_moments_on_the_host():
    env, batch = Env(0, 0, 1, DEVICE, "none"), micro_batches(DEVICE)
    found = {}
    for offload in (False, True):
        parallel = ParallelConfig(fsdp=FSDPConfig(offload=offload))
        with process_group(env, needed=True):
            step = steps(env, parallel)
            for index in range(3):
                out = step.train(batch, index)
            (part,) = step.parts
            assert step.update is not None
            state = TrainState([part], step.update.optimizer).capture().tensors
            where = {p.device.type for p in [*part.parameters(), *step.update.optimizer.state]}
            moments = {s["exp_avg"].device.type for s in step.update.optimizer.state.values()}
            assert where == moments == {"cpu" if offload else "cuda"}
            assert out.grad_norm.device.type == "cuda"
            found[offload] = (out.grad_norm.item(), state)
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-4)
    assert found[True][1].keys() == found[False][1].keys()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_cuda)], ids=["eager", "compiled"])
@pytest.mark.parametrize("gather", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_eight_bit_training_stays_near_float32(recipe, gather, compiled, exact):
    if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit matmuls on this device")
    if gather and recipe != "tensorwise":
        pytest.skip("weights are gathered with one scale a tensor only")
    fp8 = FP8Config(recipe=recipe, min_size=128, gather=gather, emulate=not ON_GPU)
    found = losses(ParallelConfig(fp8=fp8, compile=CompileConfig(enabled=compiled, backend=BACKEND)))
    assert found != losses(ParallelConfig(compile=CompileConfig(enabled=compiled, backend=BACKEND)))
    assert found == pytest.approx(exact, rel=3e-2)
    assert found[-1] < found[0] - 0.1


@needs_cuda
@pytest.mark.parametrize(
    ("parallel", "optimizer"),
    [
        (ParallelConfig(), AdamWConfig(lr=1e-3)),
        (ParallelConfig(compile=COMPILED), AdamWConfig(lr=1e-3)),
        (
            ParallelConfig(precision=PURE),
            AdamWConfig(lr=1e-3, rounding="stochastic"),
        ),
        (ParallelConfig(), AdamWConfig(lr=1e-3, moments="bfloat16")),
        (ParallelConfig(fp8=FP8Config(recipe="tensorwise", min_size=128, gather=True)), AdamWConfig(lr=1e-3)),
    ],
    ids=["bf16", "compiled", "rounded", "narrow-moments", "fp8"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["causal", "documents"])
def test_hot_step_never_waits_for_the_device(parallel, optimizer, packed):
    env = Env(0, 0, 1, DEVICE, "none")
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 2, 257))
    ids = np.broadcast_to(np.arange(256) // 50, (2, 2, 256)).astype(np.int64)
    extra = {"doc_ids": ids} if packed else {}
    source, targets = np.zeros((2, 2), np.int64), np.full(2, 512)
    # as the loader gives them
    group = Group(rows, None, extra, {}, source, targets)
    host = cut_group(group, ("a",), frozenset(), pinned=True)
    with process_group(env, needed=parallel.needs_group("cuda")):
        step = steps(env, parallel, optimizer)
        for index in range(3):
            step.train(host, index)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs = [step.train(host, index) for index in range(3, 6)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(out.finite.item() for out in outs)


def test_benchmark_runs_on_this_device():
    folder = Path(__file__).parents[2] / "benchmarks" / "gpu"
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import mfu
    finally:
        del sys.path[:2]
    case = mfu.Case(model="tiny", tokens=64, micro_batch=2, state="moments-bf16", documents=16)
    found = mfu.measure(case, 2, 2)
    assert found["tokens_per_s"] > 0 and (not ON_GPU or found["memory_gib"] > 0)
