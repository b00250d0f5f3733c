"""How often the host reads the counts of rows that travel to experts of other ranks: it waits each time."""

from collections import Counter
from unittest.mock import patch

import pytest
from forge_model import DecoderConfig
from forge_model.config import MoEConfig, SigmoidRouterConfig
from forge_parallel import ParallelConfig
from forge_parallel.config import ActivationCheckpointingConfig
from forge_parallel.dispatch_config import AllToAllConfig, TwoLevelConfig
from forge_parallel.testing import run_ranks
from forge_trainer.optim.local_parameters import LocalOptimizer
from host_waits import Reads, Waits
from parity import TOKENS, VOCAB, batch, made

MICRO_BATCHES, LAYERS = 2, 2
MODEL = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=LAYERS,
    max_tokens=TOKENS,
    ffn=MoEConfig(num_experts=8, top_k=3, dim=24, router=SigmoidRouterConfig(), shared_experts=1),
)


def reads(sizes: dict, parallel: ParallelConfig) -> int:
    """In one step, once the first one is taken."""
    parts, _, step, mesh = made(sizes, MODEL, "float32", parallel)
    for module in (module for part in parts for module in part.modules()):
        if hasattr(module, "_fused"):
            module._fused = False  # as on a GPU, where all experts are one product
    with patch.object(LocalOptimizer, "finite", lambda self: self.found_inf == 0):
        step.train(batch(0, mesh, MICRO_BATCHES), 0)
        with Waits() as waits, Reads() as others:
            step.train(batch(1, mesh, MICRO_BATCHES), 1)
    assert not others.found and +waits.found == Counter(tolist=waits.found["tolist"]), (
        others.found,
        waits.found,
    )
    return waits.found["tolist"]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["none", "full", "every", "selective"])
def test_counts_are_read_once_a_layer_and_micro_batch_also_where_it_is_computed_again(mode):
    for expert_parallel in (AllToAllConfig(), AllToAllConfig(chunks=2)):
        parallel = ParallelConfig(
            activation_checkpointing=ActivationCheckpointingConfig(mode=mode), expert_parallel=expert_parallel
        )
        assert run_ranks(reads, 2, {"ep": 2}, parallel) == [MICRO_BATCHES * LAYERS] * 2


@pytest.mark.dist
def test_counts_of_two_levels_are_read_once():
    parallel = ParallelConfig(
        activation_checkpointing=ActivationCheckpointingConfig(mode="full"),
        expert_parallel=TwoLevelConfig(node_ranks=2),
    )
    assert run_ranks(reads, 4, {"ep": 4}, parallel) == [MICRO_BATCHES * LAYERS] * 4
