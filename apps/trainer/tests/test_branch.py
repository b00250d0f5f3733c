"""A branch holds a whole checkpoint of its run, what rollbacks left out of the data, and remembers both."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from forge_ckpt import CheckpointError, Snapshot, Store
from forge_config import to_toml
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from forge_trainer.recovery.incidents import read_rollbacks
from forge_trainer.run_dir.files import RunFiles

DEBUG = Path(__file__).parents[3] / "configs" / "runs" / "debug.toml"
ROLLBACK = {"to": 3, "first": 5, "end": 7, "why": "a spike", "skip": True, "margin": 1}


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints, the second and the third after a rollback."""
    directory = tmp_path / "runs" / "one"
    job = load_job(DEBUG, [f'--job.root="{tmp_path / "runs"}"', '--job.name="one"']).value
    store = Store(directory / "checkpoints", keep=9)
    for step, rollbacks in ((3, 0), (8, 1), (9, 1)):
        store.save(step, Snapshot({"w": torch.ones(2)}, {"rollbacks": rollbacks}))
    (directory / "config.toml").write_text(to_toml(job))
    lines = [{"kind": "repeated", "step": 4}, {"kind": "rollback", **ROLLBACK}]
    (directory / "incidents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def damage(run, step):
    path = run / "checkpoints" / f"step-{step:09d}" / "rank-00000.bin"
    path.write_bytes(b"x" * path.stat().st_size)


def branch(run, *flags):
    return main(["branch", str(run), str(run.parent / "new"), *flags])


def test_branch_remembers_its_checkpoint_and_what_rollbacks_left_out(run):
    assert branch(run) == 0
    new = run.parent / "new"
    files = RunFiles(new)
    assert Store(files.checkpoints).steps() == [9]
    assert [one.to for one in read_rollbacks(new)] == [3]
    shutil.rmtree(files.checkpoints)
    assert Store(files.checkpoints, marks=files.progress_marks).progress() == 9
    with pytest.raises(CheckpointError, match="once held step 9"):
        Store(files.checkpoints, marks=files.progress_marks).resume(lambda held: {})


def test_branch_from_before_a_rollback_knows_nothing_of_it(run):
    assert branch(run, "--step=3") == 0
    assert read_rollbacks(run.parent / "new") == []


def test_branch_takes_the_newest_that_is_intact(run, caplog):
    caplog.set_level(logging.WARNING)
    damage(run, 9)
    assert branch(run) == 0
    assert Store(run.parent / "new" / "checkpoints").steps() == [8]
    assert "step 9 is passed over" in caplog.text


def test_branch_of_a_damaged_step_is_refused_and_leaves_nothing(run, capsys):
    damage(run, 9)
    before = {path.name for path in run.parent.iterdir()}
    assert branch(run, "--step=9") == 78
    assert "step 9 cannot be copied" in capsys.readouterr().err
    assert {path.name for path in run.parent.iterdir()} == before


def test_branch_of_a_live_run_takes_another_step_when_one_is_removed_meanwhile(run, monkeypatch):
    copytree, gone = shutil.copytree, []

    def removed_midway(source, target):
        if not gone:
            gone.append(shutil.rmtree(source))
        return copytree(source, target)

    monkeypatch.setattr(shutil, "copytree", removed_midway)
    assert branch(run) == 0
    assert Store(run.parent / "new" / "checkpoints").steps() == [8]


def test_status_of_a_run_whose_checkpoints_are_gone_says_that_it_will_not_start(run, capsys):
    Store(run / "checkpoints", marks=RunFiles(run).progress_marks).save(10, Snapshot({}))
    shutil.rmtree(run / "checkpoints")
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert "none, and there was one of step 10" in told and "refuses to begin at step 0" in told
    (run / "checkpoints").touch()
    assert main(["status", str(run)]) == 0
    assert "cannot be read" in capsys.readouterr().out


def test_disk_that_is_full_is_no_damage(run, monkeypatch, capsys):
    def full(source, target):
        raise shutil.Error([(source, target, "[Errno 28] No space left on device")])

    monkeypatch.setattr(shutil, "copytree", full)
    assert branch(run) == 78
    assert "No space left on device" in capsys.readouterr().err and not (run.parent / "new").exists()
