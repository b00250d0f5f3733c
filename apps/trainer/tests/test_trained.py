"""What `forge generate` and `forge export` say to arguments that cannot be right."""

import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from forge_ckpt.error import CheckpointError
from forge_ckpt.inspect.checkpointed import Checkpointed
from forge_ckpt.interop.weights import Weights, write_weights
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_config import to_toml
from forge_model import initialize, to_hf
from forge_model.error import ModelError
from forge_trainer.cli import main
from forge_trainer.commands.evaluate import load_model
from forge_trainer.commands.generate import room_for
from forge_trainer.config.job import load_job
from forge_trainer.run_dir.files import RunFiles, read_job


def test_prompt_that_fills_the_model_is_told_by_its_length():
    with pytest.raises(ModelError, match=r"prompt of 100 tokens.* model.max_tokens = 32"):
        room_for(100, 32)
    assert room_for(30, 32) == 2


@pytest.mark.parametrize("seed", ["x", str(2**70), "-1"])
def test_seed_out_of_range_is_an_error_of_usage(seed, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "nowhere", f"--seed={seed}"])
    assert ended.value.code == 2 and "--seed" in capsys.readouterr().err


CUT_OFF = """
import os, signal, sys
from forge_trainer import __main__
from forge_trainer import cli
def command():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        print("cleaned up")
cli.main = command
sys.exit(__main__.main())
"""


def test_command_that_gets_sigterm_removes_what_is_partial():
    ended = subprocess.run([sys.executable, "-c", CUT_OFF], capture_output=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, b"cleaned up\n", b"")


def test_folder_whose_name_is_too_long_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match="xxx cannot be written"):
        write_weights(tmp_path / ("x" * 300), {}, {})


def test_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/out cannot be written"):
        write_weights(tmp_path / "file" / "out", {}, {})


RUN = Path(__file__).parents[3] / "configs" / "runs" / "debug.toml"


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints, and the model of each."""
    job = load_job(RUN, [f'--job.root="{tmp_path}"'])
    models = {}
    files = RunFiles(job.value.job.directory)
    for step in (1, 2):
        models[step] = job.value.model.build()
        initialize(models[step], step)
        state = TrainState([models[step]], torch.optim.SGD(models[step].parameters()))
        Store(files.checkpoints).save(step, state.capture())
    files.config.write_text(to_toml(job.value))
    return Path(job.value.job.directory), models


def exported(capsys, directory, out, *more):
    assert main(["export", str(directory), str(out), *more]) == 0, capsys.readouterr().err
    return Weights(out)


def require_weights_of(model, weights):
    theirs = to_hf(dict(model.named_parameters()), load_job(RUN).value.model)
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)


def test_export_in_several_files_is_the_model(run, tmp_path, capsys):
    directory, models = run
    weights = exported(capsys, directory, tmp_path / "out", "--shard-bytes=500000")
    require_weights_of(models[2], weights)
    assert len(list((tmp_path / "out").glob("model-*"))) > 3
    with pytest.raises(SystemExit):
        main(["export", str(directory), str(tmp_path / "none"), "--shard-bytes=0"])


def test_export_takes_the_older_checkpoint_when_the_end_of_the_newest_is_damaged(run, tmp_path, capsys):
    directory, models = run
    path = directory / "checkpoints" / "step-000000002" / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    require_weights_of(models[1], exported(capsys, directory, tmp_path / "out", "--shard-bytes=500000"))
    assert sorted(each.name for each in tmp_path.iterdir() if "out" in each.name) == ["out"]


def test_export_takes_a_newer_checkpoint_when_a_run_that_goes_on_has_removed_all_that_there_were(
    run, tmp_path, capsys, monkeypatch
):
    directory, models = run
    store, read = Store(RunFiles(directory).checkpoints, keep=1), Checkpointed.__getitem__

    def overtaken(self, name):
        if store.steps() != [3]:
            state = TrainState([models[1]], torch.optim.SGD(models[1].parameters()))
            store.save(3, state.capture())
        return read(self, name)

    monkeypatch.setattr(Checkpointed, "__getitem__", overtaken)
    require_weights_of(models[1], exported(capsys, directory, tmp_path / "out"))


def test_export_holds_one_tensor_at_a_time(run, tmp_path, capsys, monkeypatch):
    directory, _ = run
    alive, most, read = set(), [], Checkpointed.__getitem__

    def counted(self, name):
        values = read(self, name).numpy().copy()
        alive.add(id(values))
        weakref.finalize(values, alive.discard, id(values))
        most.append(len(alive))
        return torch.from_numpy(values)

    monkeypatch.setattr(Checkpointed, "__getitem__", counted)
    assert len(exported(capsys, directory, tmp_path / "out")) == len(most) and max(most) == 1


def test_eval_computes_in_the_format_in_which_training_evaluates(tmp_path):
    root, flags = tmp_path / "runs", ["--train.steps=4", "--schedule.warmup_steps=1", "--eval.every_steps=4"]
    flags += ["--precision.compute=bfloat16", "--data.max_tokens=32", "--data.validation_samples=16"]
    assert main(["train", str(RUN), f'--job.root="{root}"', *flags]) == 0
    lines = [json.loads(line) for line in (root / "debug" / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert main(["eval", str(root / "debug"), "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["eval/loss"] == pytest.approx(trained, rel=1e-6)
    assert {p.dtype for p in load_model(read_job(root / "debug"))[0].parameters()} == {torch.float32}
