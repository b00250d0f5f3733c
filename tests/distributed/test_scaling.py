"""`[model.scaling]` under layouts: initial values and rates of a wide model are those of one process."""

import pytest
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_model.scaling import ScalingConfig
from forge_parallel import ParallelConfig
from forge_parallel.testing import run_ranks
from parity import TOKENS, VOCAB, trained

CONFIG = DecoderConfig(
    vocab_size=VOCAB, dim=64, num_layers=2, max_tokens=TOKENS, init_std=0.1, ffn=SwiGLUConfig(dim=96),
    attention=GroupedQueryConfig(num_heads=4, num_kv_heads=4, bias=True),
    scaling=ScalingConfig(base_dim=16, base_layers=1),
)  # fmt: skip
LAYOUTS = {"fsdp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_training_equals_one_process(layout):
    one = run_ranks(trained, 1, {}, CONFIG, "float64", ParallelConfig(), 2, 4)[0]
    parameters = (LAYOUTS[layout], CONFIG, "float64", ParallelConfig(), 2, 4)
    for many in run_ranks(trained, 2, *parameters, timeout_s=120):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-10)
        for key, value in one["after"].items():
            assert (many["after"][key] - value).abs().max() <= 1e-10 * value.abs().max(), key
