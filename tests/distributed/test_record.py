"""The recording hook in runs of several ranks: training is not changed, the file is that of one rank."""

import hashlib
import json
import logging
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from forge_config import ConfigError
from forge_interp.extraction.store import ActivationStore
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
cache_dir = "{root}/../cache"
validation_samples = 4
tokenizer = {{ type = "bytes" }}
[[data.sources]]
type = "files"
paths = ["{text}/*.py"]
held_out = 0.3
[train]
steps = 5
global_batch = 16
micro_batch = 2
log_every_steps = 1
[optimizer]
type = "adamw"
lr = 1e-2
[schedule]
type = "constant"
[eval]
every_steps = 2
"""
HOOK = """
[hooks.record]
type = "record"
every_steps = 2
samples = 5
summaries = true
sites = ["layers.*:out", "layers.*.attention:attn.entropy", "layers.*.ffn.w_down:in"]
"""
EXTRAS = {
    "plain": "",
    "hsdp": "[mesh]\ndp_replicate = 2\ndp_shard = 2\n",
    "checkpointed": '[activation_checkpointing]\nmode = "full"\n',
    "compiled": '[compile]\nenabled = true\nbackend = "aot_eager"\n',
    "bf16": '[precision]\ncompute = "bfloat16"\n',
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for source in sorted(Path(logging.__file__).parent.glob("*.py")):
        (folder / source.name).write_text(source.read_text())
    return folder


def trained(path: str) -> tuple[list[float], str]:
    """The losses, and a digest of the weights."""
    # `run_ranks` has made the process group already
    with ExitStack() as stack, patch("forge_trainer.build.process_group", lambda *_, **__: nullcontext()):
        run = build(load_job(path).value, stack)
        run.train()
    digest = hashlib.sha256()
    # not `run.parts`: after a forward pass FSDP2 may hold the whole root, in the format of the computation
    for parameter in run.step.update.optimizer.param_groups[0]["params"]:
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().contiguous().numpy().tobytes())
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record], digest.hexdigest()


@pytest.fixture
def job(tmp_path, text):
    def write(name: str, extra: str) -> str:
        (tmp_path / name).mkdir()
        path = tmp_path / f"{name}.toml"
        path.write_text(JOB.format(root=tmp_path / name, text=text) + extra)
        (tmp_path / name / "tiny").mkdir()
        return str(path)

    return write


def recorded(tmp_path: Path, name: str, step: int) -> ActivationStore:
    return ActivationStore.open(tmp_path / name / "tiny" / "activations" / f"step-{step:08d}")


@pytest.mark.parametrize(
    ("world_size", "extra"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [(2, "bf16"), (2, "plain"), (4, "hsdp"), (2, "checkpointed"), (2, "compiled")]
    ],
)
def test_record_changes_no_bit_of_sharded_training(tmp_path, job, world_size, extra):
    expected = run_ranks(trained, world_size, job("plain", EXTRAS[extra]), timeout_s=120)
    found = run_ranks(trained, world_size, job("watched", EXTRAS[extra] + HOOK), timeout_s=120)
    assert found == expected
    assert len(expected[0][0]) == 5
    folder = tmp_path / "watched" / "tiny" / "activations"
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{n:08d}" for n in (0, 2, 4, 5)]


@pytest.mark.parametrize("many", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_record_of_several_ranks_is_that_of_one(tmp_path, job, many):
    for world_size in (1, many):
        run_ranks(trained, world_size, job(str(world_size), HOOK))
    for step in (0, 4):
        expected = recorded(tmp_path, "1", step)
        assert expected.rows == 5 * 16 and len(expected) == 6
        found = recorded(tmp_path, str(many), step)
        assert list(found) == list(expected)
        assert found.sample_id.equal(expected.sample_id) and found.token_id.equal(expected.token_id)
        for site in expected:
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if step == 0 else {"rtol": 1e-3, "atol": 1e-4}
            np.testing.assert_allclose(found[site], expected[site], err_msg=site, **tolerance)


def refused(path: str) -> str:
    with ExitStack() as stack, patch("forge_trainer.build.process_group", lambda *_, **__: nullcontext()):
        with pytest.raises(ConfigError) as caught:
            build(load_job(path).value, stack)
        return str(caught.value)


@pytest.mark.parametrize(
    ("site", "said"),
    [("layer.*:out", "layers.*"), ("layers.0:kw.mask2", "mask2"), ("head:out", "expected [samples")],
)
def test_bad_site_is_refused_on_all_ranks_before_the_first_step(job, site, said):
    for message in run_ranks(
        refused, 2, job("bad", HOOK + f'[hooks.bad]\ntype = "record"\nsites = ["{site}"]\nfolder = "bad"\n')
    ):
        assert said in message
