"""benchmarks/interp.py compares tools that store the same rows; here on a tiny model, without its peers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = ("nnsight", "transformer_lens")


@pytest.fixture(scope="module")
def benchmark():
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import interp
    finally:
        sys.path.remove(str(BENCHMARKS))
    return interp


def test_every_tool_that_is_measured_exists(benchmark):
    assert {*benchmark.ALL, *benchmark.MIDDLE, *benchmark.GROWING} <= benchmark.TOOLS.keys()


def test_tools_store_what_the_plain_hook_saw(benchmark, tmp_path):
    shape = benchmark.Shape(layers=3, width=16, heads=2, vocab=40, batch=2, context=8, batches=3)
    model = benchmark.build(shape)
    tokens = torch.randint(40, (6, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for tool in benchmark.TOOLS:
            if not tool.startswith(PEERS):
                benchmark.TOOLS[tool](model, range(3))(tokens.split(2), tmp_path / tool)
    for layer in range(3):
        expected = benchmark.rows(tmp_path / "hooks, streamed", layer, 16)
        assert expected.shape == (48, 16) and expected.std() > 0
        for tool in benchmark.TOOLS:
            if tool.startswith(("hooks", "forge")):
                assert np.array_equal(benchmark.rows(tmp_path / tool, layer, 16), expected), tool


def test_ratio_is_the_median_of_rounds_beside_that_of_the_least_times(benchmark, tmp_path):
    runner = benchmark.Runner.__new__(benchmark.Runner)
    runner.found = {
        ("all", "tool"): [{"cpu_s": 2.0}, {"cpu_s": 9.0}, {"cpu_s": 3.0}],
        ("all", "forward"): [{"cpu_s": 1.0}, {"cpu_s": 3.0}, {"cpu_s": 1.5}],
    }
    assert runner.ratio(("all", "tool"), ("all", "forward")) == (2.0, 2.0)
    runner.found["all", "tool"][0]["cpu_s"] = 1.2
    assert runner.ratio(("all", "tool"), ("all", "forward")) == (2.0, 1.2)
