"""A series of checkpoints is evaluated, generated from, exported and verified by one command each."""

import csv
import json
import os
import signal
import time

import pytest
import torch
from forge_ckpt.config import CheckpointConfig
from forge_model.init import initialize
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job
from runs import state
from safetensors.torch import load_file

TP = "--mesh.tp=2", "--model.attention.num_kv_heads=2"


def test_steps_that_grow_stay_for_good():
    config = CheckpointConfig(keep_growing=1.5, keep_initial=True)
    assert [n for n in range(40) if config.is_dense(n)] == [0, 1, 2, 3, 5, 8, 12, 18, 27]
    assert [n for n in range(70) if CheckpointConfig(keep_growing=2).is_dense(n)] == [1, 2, 4, 8, 16, 32, 64]
    assert not any(CheckpointConfig().is_dense(n) for n in range(10))


def weights(run, step):
    return load_model(read_job(run), step=step)[0].state_dict()


def test_one_command_says_of_each_step_what_a_command_a_step_says(forge, tiny, tmp_path):
    job, run = tiny(steps=6), tmp_path / "runs" / "tiny"
    forge("train", job, "--checkpoint.keep_initial=true", "--checkpoint.keep_growing=2")
    steps = sorted(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").glob("step-*"))
    assert steps == [0, 1, 2, 3, 4, 6]

    # the weights of step 0 are those of a run that has not begun
    fresh = read_job(run).model.build()
    initialize(fresh, 0)
    for name, value in weights(run, 0).items():
        assert torch.equal(value, fresh.state_dict()[name]), name

    table, out = tmp_path / "table.csv", tmp_path / "all.json"
    said = forge("eval", run, "--step", "all", "--table", table, "--json", out).stdout
    found = json.loads(out.read_text())
    assert [row["step"] for row in found] == steps
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["eval/loss"]) for row in rows] == [row["eval/loss"] for row in found]
    assert (tmp_path / "table.svg").read_text().startswith("<svg") and f"{found[0]['eval/loss']:.4f}" in said
    assert found[0]["eval/loss"] > found[-1]["eval/loss"]
    forge("eval", run, "--step", "2", "--json", out)
    assert json.loads(out.read_text()) == found[2]

    forge("export", run, tmp_path / "hf", "--step", "1-3", "--dtype", "bfloat16")
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]
    for step in (1, 3):
        (file,) = (tmp_path / "hf" / f"step-0000000{step}").glob("*.safetensors")
        written = load_file(file)
        assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
        ours = weights(run, step)["embed.weight"]
        assert torch.equal(written["model.embed_tokens.weight"], ours.to(torch.bfloat16))
    assert forge("verify-export", run, tmp_path / "hf", "--step", "1-3").stdout.count("logits differ by") == 3

    said = forge("generate", run, "--step", "0-2", "--max-new-tokens", "3", "--temperature", "0").stdout
    assert [line for line in said.splitlines() if line.startswith("step ")] == [
        f"step {n}:" for n in range(3)
    ]

    there = "there are 0, 1, 2, 3, 4, 6"
    for wrong, needle in (("9", there), ("7-9", "no such checkpoint"), ("x", "expected a step")):
        refused = forge("eval", run, "--step", wrong, check=False)
        assert refused.returncode != 0 and needle in refused.stderr
    refused = forge("eval", tmp_path / "hf" / "step-00000001", "--step", "1", check=False)
    assert refused.returncode == 78 and "is no run" in refused.stderr


def test_an_initial_checkpoint_changes_nothing_and_a_run_goes_on_from_it(forge, tiny, tmp_path):
    plain, kept = tmp_path / "plain", tmp_path / "kept"
    forge("train", tiny(steps=4, root=plain))
    job, found = tiny(steps=4, root=kept), kept / "tiny" / "checkpoints" / "step-000000000"
    running = forge.start("train", job, "--checkpoint.keep_initial=true")
    end = time.monotonic() + 120
    while not found.exists() and time.monotonic() < end:
        time.sleep(0.002)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    begun = sorted(path.name for path in found.parent.glob("step-*"))
    assert begun and begun[-1] != "step-000000004", "it was killed before its end"
    forge("train", job, "--checkpoint.keep_initial=true")
    assert state(plain / "tiny") == state(kept / "tiny"), begun


def test_a_damaged_step_is_passed_over_and_the_others_are_kept(forge, tiny, tmp_path):
    job, run, table = tiny(steps=3), tmp_path / "runs" / "tiny", tmp_path / "table.csv"
    forge("train", job, "--checkpoint.every_steps=1", "--checkpoint.keep=4")
    path = run / "checkpoints" / "step-000000002" / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)

    for command in (
        ("eval", run, "--table", table),
        ("export", run, tmp_path / "hf"),
        ("verify-export", run, tmp_path / "hf"),
        ("generate", run, "--max-new-tokens", "1"),
    ):
        done = forge(*command, "--step", "all", check=False)
        assert done.returncode == 78, command
        assert "passed over" in done.stderr and str(path) in done.stderr, command
    assert [row["step"] for row in csv.DictReader(table.read_text().splitlines())] == ["1", "3"]
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["step-00000001", "step-00000003"]
    single = forge("eval", run, "--step", "2", check=False)
    assert single.returncode != 0 and str(path) in single.stderr


@pytest.mark.dist
@pytest.mark.parametrize(
    "mesh",
    [(), pytest.param(TP, marks=pytest.mark.slow), pytest.param(("--mesh.pp=2",), marks=pytest.mark.slow)],
)
def test_ranks_that_share_a_model_evaluate_a_series_as_one_process_does(forge, tiny, tmp_path, mesh):
    job, run = tiny(steps=4), tmp_path / "runs" / "tiny"
    forge("train", job, "--checkpoint.every_steps=1", "--checkpoint.keep=4", *mesh, ranks=2)
    one, many, table = tmp_path / "one.json", tmp_path / "many.json", tmp_path / "many.csv"
    forge("eval", run, "--step", "all", "--json", one)
    said = forge("eval", run, "--step", "all", "--json", many, "--table", table, ranks=2).stdout
    assert said.count("at step 3: loss") == 1, "the first rank alone says it"
    expected, found = (json.loads(path.read_text()) for path in (one, many))
    assert [row["step"] for row in found] == [1, 2, 3, 4] == [row["step"] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert found[0]["eval/loss"] != pytest.approx(found[3]["eval/loss"], rel=1e-4)
    assert [row["step"] for row in csv.DictReader(table.read_text().splitlines())] == ["1", "2", "3", "4"]

    path = run / "checkpoints" / "step-000000003" / "rank-00001.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    done = forge("eval", run, "--step", "all", "--json", many, ranks=2, check=False)
    assert done.returncode == 78 and f"step 3 is passed over: {path}" in done.stderr
    assert json.loads(many.read_text()) == [row for row in found if row["step"] != 3]
    refused = forge("eval", run, "--step", "9", ranks=2, check=False)
    assert refused.returncode == 78 and "there are 1, 2, 3, 4" in refused.stderr
    refused = forge("export", run, tmp_path / "hf", "--step", "all", ranks=2, check=False)
    assert refused.returncode == 78 and "runs in one process" in refused.stderr


@pytest.mark.dist
def test_ranks_evaluate_averages_of_a_run_whose_batch_they_could_not_share(forge, tiny, tmp_path):
    run, one, many = tmp_path / "runs" / "tiny", tmp_path / "one.json", tmp_path / "many.json"
    forge("train", tiny(steps=3), "--train.micro_batch=8", "--optimizer.ema_decay=0.9")
    forge("eval", run, "--json", one)
    forge("eval", run, "--json", many, ranks=2)
    assert json.loads(many.read_text()) == pytest.approx(json.loads(one.read_text()), rel=1e-6)


@pytest.mark.dist
def test_ranks_evaluate_on_a_mesh_of_their_own(forge, tiny, tmp_path):
    run, one, many = tmp_path / "runs" / "tiny", tmp_path / "one.json", tmp_path / "many.json"
    forge("train", tiny(steps=3))
    forge("eval", run, "--json", one)
    keys = ("--mesh.tp=2", "--mesh.dp_shard=1", "--tensor_parallel.sequence=false")
    said = forge("eval", run, "--json", many, *keys, ranks=2)
    assert json.loads(many.read_text()) == pytest.approx(json.loads(one.read_text()), rel=1e-6), said.stderr
    alone = forge("eval", run, "--mesh.tp=1", check=False)
    assert alone.returncode == 78 and "several ranks" in alone.stderr
    other = forge("eval", run, "--train.micro_batch=1", check=False)
    assert other.returncode == 78 and "--train.micro_batch=1" in other.stderr
    too_many = forge("eval", run, "--mesh.tp=3", ranks=2, check=False)
    assert too_many.returncode == 78 and "mesh" in too_many.stderr
