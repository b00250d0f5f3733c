"""LongRoPE under layouts against one process: packed documents, some of them longer than the border."""

import parity
import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.attention.rope import sequence_lengths
from forge_model.attention.rope_config import LongRopeConfig
from forge_parallel import ParallelConfig
from forge_parallel.compile_config import CompileConfig
from forge_parallel.testing import run_ranks
from parity import TOKENS, VOCAB, trained

BORDER = 4
ROPE = LongRopeConfig(
    theta=50.0,
    original_max_tokens=BORDER,
    factor=4.0,
    short_factors=(1.0, 1.5, 2.0),
    long_factors=(4.0, 9.0, 20.0),
)
CONFIG = DecoderConfig(
    vocab_size=VOCAB, dim=32, num_layers=2, max_tokens=TOKENS, rope=ROPE,
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=4, rope_dim=6),
)  # fmt: skip
LAYOUTS = {
    "fsdp2": (2, {}, ParallelConfig()),
    "tp2": (2, {"tp": 2}, ParallelConfig()),
    "pp2": (2, {"pp": 2}, ParallelConfig()),
    "fsdp2-compiled": (2, {}, ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager"))),
}


def packed(index, mesh, micro_batches=2):
    """The batches of the parity table, with positions that count anew in each document."""
    made = given(index, mesh, micro_batches)
    for one in made:
        ids, rising = one.inputs["doc_ids"], torch.arange(TOKENS)
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        one.inputs["positions"] = rising - rising.where(starts, 0).cummax(1).values
    lengths = sequence_lengths(torch.cat([one.inputs["positions"] for one in made]))
    assert (lengths > BORDER).any() and (lengths <= BORDER).any()
    return made


given = parity.batch


def trained_on_documents(*parameters):
    """`trained` with positions; the batches of a rank that is kept for other tests are put back."""
    parity.batch = packed
    try:
        return trained(*parameters)
    finally:
        parity.batch = given


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_training_on_packed_documents_equals_one_process(layout):
    world_size, sizes, parallel = LAYOUTS[layout]
    one = run_ranks(trained_on_documents, 1, {}, CONFIG, "float64", ParallelConfig())[0]
    for many in run_ranks(
        trained_on_documents, world_size, sizes, CONFIG, "float64", parallel, timeout_s=120
    ):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert many["norm"] == pytest.approx(one["norm"], rel=1e-10)
        assert many["validation"] == pytest.approx(one["validation"], rel=1e-10)
        for key, value in one["after"].items():
            assert (many["after"][key] - value).abs().max() <= 1e-10 * value.abs().max(), key
