"""Gradients of what all ranks of tensor parallelism hold: summed once a step, and the same by any loop."""

import pytest
import torch
from forge_model import DecoderConfig, LossConfig
from forge_model.config import GroupedQueryConfig, MoEConfig, SigmoidRouterConfig
from forge_parallel import ParallelConfig, local_shard
from forge_parallel.apply import set_sync
from forge_parallel.config import TensorParallelConfig
from forge_parallel.runner import build_runner
from forge_parallel.testing import run_ranks
from parity import TOKENS, VOCAB, batch, full, made, parameters

MODEL = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=2,
    max_tokens=TOKENS,
    init_std=0.1,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=1, qk_norm=True, output_bias=True),
    ffn=MoEConfig(num_experts=4, top_k=2, dim=24, bias=True, router=SigmoidRouterConfig()),
    tie_embeddings=True,
)


def gradients(sizes: dict, parallel: ParallelConfig, loop: str) -> dict[str, torch.Tensor]:
    """Those of four micro-batches by one call of the runner, by two, or by a loop without a runner."""
    parts, _, step, mesh = made(sizes, MODEL, "float64", parallel)
    inputs = [micro.inputs | {"loss_fn": LossConfig().build()} for micro in batch(0, mesh, 4)]
    if loop == "plain":
        for index, one in enumerate(inputs):
            set_sync(parts[0], last=index == 3)
            parts[0](**one).total.backward()
    for some in {"one": [inputs], "two": [inputs[:1], inputs[1:]], "plain": []}[loop]:
        step.runner.backward(some, lambda terms: terms.total)
    held = {name: one.grad for name, one in parameters(parts).items()}
    assert all(local_shard(one).values.isfinite().all() for one in held.values())
    return full(held)


@pytest.mark.dist
@pytest.mark.parametrize("loop", ["one", "two", "plain"])
@pytest.mark.parametrize(
    ("ranks", "sizes", "parallel"),
    [
        (2, {"tp": 2}, ParallelConfig()),
        pytest.param(
            2,
            {"tp": 2},
            ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=False, experts="cut")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            {"tp": 2},
            ParallelConfig(tensor_parallel=TensorParallelConfig(experts="cut")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_of_any_loop_are_those_of_one_process(ranks, sizes, parallel, loop):
    expected = run_ranks(gradients, 1, {}, ParallelConfig(), "plain")[0]
    for found in run_ranks(gradients, ranks, sizes, parallel, loop):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


def unfrozen(sizes: dict) -> dict[str, torch.Tensor]:
    """Gradients after norms and routers, frozen when the runner was built, are trained again."""
    parts, _, _, mesh = made(sizes, MODEL, "float64")
    later = [one for name, one in parameters(parts).items() if "norm" in name or "router" in name]
    for one in later:
        one.requires_grad_(False)
    runner = build_runner(parts, mesh)
    for one in later:
        one.requires_grad_(True)
    inputs = [micro.inputs | {"loss_fn": LossConfig().build()} for micro in batch(0, mesh)]
    runner.backward(inputs, lambda terms: terms.total)
    return full({name: one.grad for name, one in parameters(parts).items()})


@pytest.mark.dist
def test_gradients_of_what_is_trained_again_are_summed():
    expected = run_ranks(unfrozen, 1, {})[0]
    for found in run_ranks(unfrozen, 2, {"tp": 2}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)
