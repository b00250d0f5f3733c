"""Training in (emulated) 8 bits under FSDP2 and tensor parallelism: gathering in 8 bits changes no number."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_model import DecoderConfig, initialize
from forge_model.attention.config import GroupedQueryConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_parallel import Env, MeshConfig, ParallelConfig, Plan, build_mesh, local_shard, parallelize
from forge_parallel.apply import materialize, set_sync
from forge_parallel.fp8_config import FP8Config
from forge_parallel.testing import run_ranks
from msgspec.structs import replace
from parity import TOKENS, VOCAB, trained
from torch.distributed.tensor.debug import CommDebugMode

MODEL = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=2,
    max_tokens=TOKENS,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=4),
    ffn=SwiGLUConfig(dim=96),
)


def tensorwise(gather: bool) -> ParallelConfig:
    return ParallelConfig(fp8=FP8Config(recipe="tensorwise", min_size=16, gather=gather, emulate=True))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("gather", [False, True])
def test_heads_that_ranks_share_multiply_in_8_bits(gather):
    """Two key heads of 16 outputs on four ranks: each rounds the rows of its own."""
    model = replace(
        MODEL,
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2, head_dim=16),
        ffn=SwiGLUConfig(dim=128),
    )
    one = run_ranks(trained, 1, {}, model, "float32", ParallelConfig(), 2, 4)[0]
    for many in run_ranks(trained, 8 if gather else 4, {"tp": 4}, model, "float32", tensorwise(gather), 2, 4):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-2)
        assert many["loss"] != one["loss"]
        assert many["norm"] == pytest.approx(one["norm"], rel=5e-2)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {}),
        pytest.param(4, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"dp_replicate": 2}, marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "fsdp2-tp2", "hsdp2x2"],
)
def test_gathering_in_8_bits_trains_like_rounding_after_the_gather(ranks, sizes):
    plain, rough = (
        run_ranks(trained, ranks, sizes, MODEL, "float32", config, 2, 4)
        for config in (ParallelConfig(), tensorwise(False))
    )
    found = run_ranks(trained, ranks, sizes, MODEL, "float32", tensorwise(True), 2, 4)
    for one, other, exact in zip(found, rough, plain, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6) != exact["loss"]
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
        assert one["validation"] == pytest.approx(other["validation"], rel=1e-6)
        assert one["loss"] == pytest.approx(exact["loss"], rel=1e-2)
        for name, value in one["after"].items():
            assert value.dtype == torch.float32
            assert torch.equal(one["before"][name], exact["before"][name]), name
            assert (value - other["after"][name]).abs().max() <= 1e-4 * value.abs().max(), name


def said_by_steps(folder: str) -> dict[str, object]:
    """Collectives of a step of two micro-batches, what a checkpoint holds, and whether it comes back."""
    mesh = build_mesh(MeshConfig(), Env.detect())
    with torch.device("meta"):
        model = MODEL.build()
    parallelize(model, mesh, Plan.of(model), tensorwise(True))
    initialize(materialize(model, mesh.device), 0, local_shard)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = TrainState([model], optimizer)
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64)

    def step() -> int:
        with CommDebugMode() as said:
            for last in (False, True):
                set_sync(model, last)
                model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(n for op, n in said.get_comm_counts().items() if "allreduce" in str(op).replace("_", ""))

    counts = [step() for _ in range(3)]
    store = Store(Path(folder), group=mesh.control_group, local_shard=partial(local_shard, mesh=mesh))
    store.save(3, state.capture())
    held = dict(model.named_parameters())
    before = {name: local_shard(p).values.clone() for name, p in held.items()}
    step()
    store.resume(state.targets)
    after = {name: local_shard(p).values for name, p in held.items()}
    kept = {(type(x).__name__, x.dtype) for x in after.values()}
    return {"counts": counts, "kept": kept, "same": all(torch.equal(before[n], after[n]) for n in after)}


@pytest.mark.dist
def test_scales_are_one_maximum_a_step_and_checkpoints_hold_high_precision(tmp_path):
    for found in run_ranks(said_by_steps, 2, str(tmp_path / "store")):
        assert found["counts"] == [1, 1, 1]
        assert found["kept"] == {("Tensor", torch.float32)} and found["same"]
