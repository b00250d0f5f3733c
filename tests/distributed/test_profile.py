"""The profiling hook on two ranks: training is not changed, what is slow on purpose is named first."""

import hashlib
import json
import logging
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from forge_parallel.testing import run_ranks
from forge_trainer.build import build
from forge_trainer.config.job import load_job

pytestmark = pytest.mark.dist

JOB = """
[job]
name = "tiny"
root = "{root}"
[model]
vocab_size = 272
dim = 32
num_layers = 2
max_tokens = 16
attention = {{ num_heads = 4, num_kv_heads = 2 }}
[data]
max_tokens = 16
workers = 0
cache_dir = "{cache}"
tokenizer = {{ type = "bytes" }}
[[data.sources]]
type = "files"
paths = ["{text}/*.py"]
held_out = 0.3
[train]
steps = 5
global_batch = 8
micro_batch = 2
log_every_steps = 1
[optimizer]
type = "adamw"
lr = 1e-2
[schedule]
type = "constant"
[eval]
every_steps = 0
"""
HOOK = '[hooks.look]\ntype = "profile"\nfirst_step = 2\nsteps = 2\nranks = [0, 1]\n'
EXTRAS = {
    "fsdp": "",
    "tp": "[mesh]\ntp = 2\n",
    "pp": "[mesh]\npp = 2\n",
    "compiled": '[compile]\nenabled = true\nbackend = "aot_eager"\n',
}


@pytest.fixture
def job(tmp_path, tmp_path_factory):
    """Writes a job, and returns its path."""
    text = tmp_path_factory.getbasetemp() / "profile-text"
    if not text.exists():
        text.mkdir()
        for source in sorted(Path(logging.__file__).parent.glob("*.py")):
            (text / source.name).write_text(source.read_text())

    def write(name, extra):
        path = tmp_path / f"{name}.toml"
        (tmp_path / name / "tiny").mkdir(parents=True)
        cache = tmp_path_factory.getbasetemp() / "profile-cache"
        path.write_text(JOB.format(root=tmp_path / name, text=text, cache=cache) + extra)
        return str(path)

    return write


def slow(train, what):
    """A step with something slow in it that changes nothing."""
    message, matrix = torch.ones(32_000_000), torch.ones(1600, 1600)

    def doing(batch, index):
        if what == "all-reduce":
            torch.distributed.all_reduce(message)
        elif what == "matmul":
            torch.mm(matrix, matrix)
        return train(batch, index)

    return doing


def trained(path: str, what: str = "") -> tuple[list[float], str]:
    """The losses, and a digest of the weights."""
    # `run_ranks` has made the process group already
    with ExitStack() as stack, patch("forge_trainer.build.process_group", lambda *_, **__: nullcontext()):
        run = build(load_job(path).value, stack)
        run.step.train = slow(run.step.train, what)
        run.train()
    digest = hashlib.sha256()
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.detach().contiguous().numpy().tobytes())
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record], digest.hexdigest()


def summaries(tmp_path, name):
    folder = tmp_path / name / "tiny" / "profile" / "step-00000002"
    return [json.loads((folder / f"rank-{rank}" / "summary.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "layout", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp", "pp", "compiled"))]
)
def test_training_computes_the_same_bits_when_it_is_profiled(job, tmp_path, layout):
    plain = run_ranks(trained, 2, job("plain", EXTRAS[layout]))
    seen = run_ranks(trained, 2, job("seen", EXTRAS[layout] + HOOK))
    assert plain == seen and len(plain[0][0]) == 5
    for summary in summaries(tmp_path, "seen"):
        assert summary["steps"] == 2
        assert sum(summary["classes_s"].values()) == pytest.approx(summary["step_s"], rel=1e-9)
        axis = {"fsdp": "dp_shard", "compiled": "dp_shard"}.get(layout, layout)
        assert summary["communication"][axis]["calls"] > 0
        assert summary["communication"]["decisions (CPU)"]["calls"] > 0


@pytest.mark.parametrize("what", ["all-reduce", pytest.param("matmul", marks=pytest.mark.slow)])
def test_what_is_slow_on_purpose_is_named_first(job, tmp_path, what):
    run_ranks(trained, 2, job("seen", HOOK), what)
    for rank, summary in enumerate(summaries(tmp_path, "seen")):
        first = summary["longest"][0]
        largest = max(summary["classes_s"], key=summary["classes_s"].get)
        if what == "matmul":
            assert first["what"] == "aten::mm [1600, 1600] x [1600, 1600]"
            assert (first["class"], largest, first["calls"]) == ("matmul", "matmul", 1)
        else:
            assert first["what"] == "all_reduce over dp_shard"
            assert (first["class"], largest) == ("communication", "communication")
            row = summary["communication"]["dp_shard"]
            assert row["exposed_s"] > 0.9 * first["s"] and row["bytes"] > 4 * 32_000_000
        page = tmp_path / "seen" / "tiny" / "profile" / "step-00000002" / f"rank-{rank}" / "summary.md"
        rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
        assert rows[1].startswith(f"| {largest} |"), rows
