"""The recording hook in a run of this process: what it writes, and that training does not notice."""

import errno
import json
import logging
import math
import os
import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forge_config import ConfigError
from forge_interp import capture
from forge_interp.extraction.store import ActivationStore
from forge_trainer import clock
from forge_trainer.build import build
from forge_trainer.config.job import load_job
from forge_trainer.hooks import RecordConfig, hooks, recorder
from forge_trainer.hooks.recorder import summary
from forge_trainer.steps.evaluation import evaluating
from torch import nn

JOB = """
[job]
name = "tiny"
root = "{root}"

[model]
vocab_size = 272
dim = 16
num_layers = 2
max_tokens = 16
attention = {{ num_heads = 2, num_kv_heads = 1 }}

[data]
max_tokens = 16
workers = 0
cache_dir = "{cache}"
validation_samples = 4
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

[checkpoint]
every_steps = 3
"""
HOOK = '\n[hooks.record]\ntype = "record"\nevery_steps = 2\nsamples = 3\n'
SITES = ["layers.0:out", "layers.1:out"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for source in sorted(Path(logging.__file__).parent.glob("*.py")):
        (folder / source.name).write_text(source.read_text())
    return folder


@pytest.fixture
def job(tmp_path, text):
    """Writes a job and loads it; `overrides` are those of the command line."""

    def make(extra="", *overrides, name="run"):
        path = tmp_path / f"{name}.toml"
        path.write_text(JOB.format(root=tmp_path / name, cache=text.parent / "cache", text=text) + extra)
        loaded = load_job(path, overrides).value
        loaded.job.directory.mkdir(parents=True, exist_ok=True)
        return loaded

    return make


def train(job) -> tuple[list[float], nn.Module]:
    with ExitStack() as stack:
        run = build(job, stack)
        run.train()
    lines = (job.job.directory / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record], run.parts[0]


def files(job) -> list[str]:
    return sorted(path.name for path in (job.job.directory / "activations").iterdir())


def store(job, step: int) -> ActivationStore:
    return ActivationStore.open(job.job.directory / "activations" / f"step-{step:08d}")


def test_record_writes_the_start_every_n_steps_and_the_end(job):
    tiny = job(HOOK)
    train(tiny)
    assert files(tiny) == [f"step-{step:08d}" for step in (0, 2, 4, 5)]
    opened = store(tiny, 2)
    assert list(opened) == SITES
    assert opened["layers.0:out"].shape == (3 * 16, 16)
    assert opened.sample_id.tolist() == [n for n in range(3) for _ in range(16)]
    assert opened.position.tolist() == list(range(16)) * 3
    assert "interp/" not in (tiny.job.directory / "metrics.jsonl").read_text()


def test_record_holds_what_the_trained_model_computes_on_held_out_text(job):
    tiny = job(HOOK)
    _, model = train(tiny)
    opened = store(tiny, 5)
    tokens = opened.token_id.view(3, 16)
    with torch.no_grad(), capture(model.eval(), SITES) as acts:
        for start in (0, 2):
            acts.clear()
            model(tokens[start : start + 2])
            for site in SITES:
                found = opened[site].view(3, 16, 16)[start : start + 2]
                torch.testing.assert_close(found, acts[site], rtol=0, atol=0)
    assert not torch.equal(store(tiny, 0)[SITES[1]], opened[SITES[1]])
    assert torch.equal(store(tiny, 0).token_id, opened.token_id)


@pytest.mark.parametrize(
    "extra",
    [
        "",
        '\n[activation_checkpointing]\nmode = "full"\n',
        '\n[compile]\nenabled = true\nbackend = "aot_eager"\n',
    ],
    ids=["plain", "checkpointed", "compiled"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_record_changes_no_bit_of_the_training(job, extra):
    expected, plain = train(job(extra, name="plain"))
    sites = '\nsites = ["layers.*:out", "layers.*.attention:attn.entropy", "layers.*.ffn:in"]\n'
    found, watched = train(job(extra + HOOK + sites, name="watched"))
    assert found == expected and len(found) == 5
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_record_leaves_no_hook_mode_or_random_number_behind(job):
    with ExitStack() as stack:
        run = build(job(HOOK), stack)
        run.parts[0].layers["1"].eval()
        before = [(module.training, len(module._forward_hooks)) for module in run.parts[0].modules()]
        states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        run.hooks[-1].on_step(run.progress, None)
        assert [(m.training, len(m._forward_hooks)) for m in run.parts[0].modules()] == before
        assert all("forward" not in vars(module) for module in run.parts[0].modules())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.array_equal(np.random.get_state()[1], states[1]) and random.getstate() == states[2]
        assert all(parameter.grad is None for parameter in run.parts[0].parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_record_has_nothing_compiled_anew(job):
    from torch._dynamo.utils import counters

    compiled = '\n[compile]\nenabled = true\nbackend = "aot_eager"\n'
    with ExitStack() as stack:
        run = build(job(compiled + HOOK + 'sites = ["layers.*.ffn:in"]\n'), stack)
        batches = iter(run.data.loader)
        run.step.train(next(batches), 0)
        graphs, ran = counters["stats"]["unique_graphs"], counters["aot_autograd"].copy()
        assert graphs > 0
        run.hooks[-1].on_step(run.progress, None)
        run.step.train(next(batches), 0)
        assert counters["stats"]["unique_graphs"] == graphs
        assert counters["aot_autograd"] == ran


def test_record_holds_no_more_sequences_at_once_than_training(job):
    sizes = []
    with ExitStack() as stack:
        run = build(job(HOOK), stack)
        run.parts[0].register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(len(kwargs["tokens"])), with_kwargs=True
        )
        run.hooks[-1].on_step(run.progress, None)
    assert sizes == [2, 1]


def test_a_recording_is_left_out_of_the_speed(job, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes_a_minute(*_, **__):
        now[0] += 60

    with ExitStack() as stack:
        run = build(job(HOOK), stack)
        monkeypatch.setattr(recorder, "extract_representations", takes_a_minute)
        run.clock.lap()
        now[0] += 2
        with run.clock.span(run.hooks[-1].span):
            run.hooks[-1].on_step(run.progress, None)
        assert run.clock.lap() == {"record": 60, "training": 2}


def test_evaluating_gives_back_what_an_inner_draw_and_an_error_took(job):
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2).eval())
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    with pytest.raises(KeyError), evaluating(model):
        assert not model[0].training and not torch.is_grad_enabled()
        torch.rand(1), np.random.rand(), random.random()
        raise KeyError
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert model[0].training and not model[1].training and torch.is_grad_enabled()


def test_record_goes_on_after_a_resume_and_overwrites_with_the_same_bytes(job):
    tiny = job(HOOK)
    train(tiny)
    folder = tiny.job.directory / "activations"
    expected = {path: path.read_bytes() for path in folder.rglob("*.*")}
    shutil.rmtree(folder / "step-00000004")
    (folder / "step-00000004").write_bytes(b"of an earlier attempt")
    (folder / "step-00000005" / "index.json").unlink()
    (folder / "step-00000005" / "part-00000.safetensors").write_bytes(b"of an earlier attempt")
    (folder / "step-00000099").mkdir()
    newest = max((tiny.job.directory / "checkpoints").glob("step-*"))
    assert newest.name.endswith("5")
    newest.rename(newest.with_name("aside"))
    found, _ = train(tiny)
    assert len(found) == 5
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == expected
    assert files(tiny) == [f"step-{step:08d}" for step in (0, 2, 4, 5)]


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        ('["layers.*:out", "layer.*.attention:out"]', "layers.*.attention"),
        ('["layers.0:kw.mask2"]', "mask2"),
        ('["layers.0:outt"]', "outt"),
        ('["layers.0.ffn:attn.pattern"]', "captured nothing"),
        ('["head:out"]', "expected [samples, ...]"),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_bad_sites_are_refused_before_the_first_step(job, sites, said, resumed):
    if resumed:
        train(job("", "--train.steps=3"))
    with ExitStack() as stack, pytest.raises(ConfigError, match="hooks of type record") as caught:
        build(job(f"{HOOK}sites = {sites}\n"), stack)
    assert said in str(caught.value)


def test_a_recording_that_cannot_be_written_ends_the_run_and_leaves_nothing_half_written(job, monkeypatch):
    extract = recorder.extract_representations

    def fills_the_disk(model, probe, sites, path, **rest):
        if path.name != "step-00000004":
            return extract(model, probe, sites, path, **rest)
        path.mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tiny = job(HOOK)
    with (
        monkeypatch.context() as patched,
        pytest.raises(ConfigError, match=r"004 cannot be written \(.*No space"),
    ):
        patched.setattr(recorder, "extract_representations", fills_the_disk)
        train(tiny)
    assert files(tiny) == ["step-00000000", "step-00000002"]
    train(tiny)
    assert files(tiny) == [f"step-{step:08d}" for step in (0, 2, 4, 5)]


def test_record_logs_summaries_of_the_file(job):
    tiny = job(HOOK + "summaries = true\n")
    train(tiny)
    lines = map(json.loads, (tiny.job.directory / "metrics.jsonl").read_text().splitlines())
    logged = {line["step"]: line for line in lines if "interp/layers.1:out/rms" in line}
    assert sorted(logged) == [2, 4, 5]
    x = store(tiny, 4)["layers.1:out"].double()
    assert logged[4]["interp/layers.1:out/rms"] == pytest.approx(x.square().mean().sqrt().item())
    assert logged[4]["interp/layers.1:out/max_abs"] == pytest.approx(x.abs().max().item())
    singular = torch.linalg.svdvals(x - x.mean(0))
    share = singular / singular.sum()
    entropy = -(share * share.log()).sum()
    assert logged[4]["interp/layers.1:out/effective_rank"] == pytest.approx(entropy.exp().item())


@pytest.mark.parametrize("shape", [(9, 40), (40, 9), (9, 4, 10)])
def test_summary_of_few_and_of_many_rows_is_the_definition(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1
    singular = torch.linalg.svdvals((flat := x.flatten(1).double()) - flat.mean(0))
    share = singular[singular > 1e-9] / singular.sum()
    assert summary(x)["effective_rank"] == pytest.approx(
        (-(share * share.log()).sum()).exp().item(), rel=1e-6
    )


def test_summaries_look_at_evenly_spaced_rows_of_a_large_recording(monkeypatch):
    class Rows(dict):
        sites, rows = ("a", "b"), 48

    monkeypatch.setattr(recorder, "SUMMARY_ROWS", 10)
    held = Rows(a=torch.randn(48, 3), b=torch.randn(48, 2, 2))
    found = recorder.summaries(held)
    for site in held.sites:
        assert summary(held[site][::5]).items() == {
            (name.rpartition("/")[2], value)
            for name, value in found.items()
            if name.startswith(f"interp/{site}/")
        }


def test_summary_says_what_it_can_about_odd_values():
    assert summary(torch.full((5, 3), 2.0)) == {"rms": 2.0, "max_abs": 2.0, "effective_rank": 0.0}
    assert summary(torch.tensor([3.0, torch.nan, 4.0]))["rms"] == pytest.approx(12.5**0.5)
    assert all(math.isnan(value) for value in summary(torch.tensor([[1.0, torch.inf]])).values())


def test_pooled_record_in_another_dtype(job):
    tiny = job(HOOK + 'pool = "last"\ndtype = "bfloat16"\n')
    train(tiny)
    opened = store(tiny, 5)
    assert opened["layers.0:out"].shape == (3, 16) and opened["layers.0:out"].dtype == torch.bfloat16


def test_two_recordings_of_one_run_do_not_meet(job):
    second = '\n[hooks.second]\ntype = "record"\nevery_steps = 2\nsamples = 2\n'
    with ExitStack() as stack, pytest.raises(ConfigError, match="folder"):
        build(job(HOOK + second), stack)
    tiny = job(HOOK + second + 'folder = "second"\n', name="apart")
    train(tiny)
    assert store(tiny, 2).rows == 48


def test_record_is_registered():
    assert hooks["record"] is RecordConfig
