"""One start of a run: how it leaves the run directory when it ends early."""

import errno
import json
import os

import pytest
from forge_ckpt.error import CheckpointError
from forge_ckpt.lease import read_holder
from forge_resilience.signals import Stopped
from forge_trainer.config.job import load_job
from forge_trainer.progress import Progress
from forge_trainer.run_dir import claim

CONFIG = """
[job]
name = "here"
root = "{root}"
[model]
vocab_size = 272
dim = 32
num_layers = 1
max_tokens = 32
attention = {{ num_heads = 2 }}
[data]
max_tokens = 32
[[data.sources]]
type = "python-stdlib"
[train]
steps = 40
global_batch = 8
micro_batch = 8
[optimizer]
lr = 1e-3
[schedule]
"""


def test_start_that_is_signalled_right_after_it_took_the_lease_gives_it_back(tmp_path, monkeypatch):
    def signalled(*_):
        raise Stopped

    (tmp_path / "job.toml").write_text(CONFIG.format(root=tmp_path))
    loaded = load_job(tmp_path / "job.toml")
    monkeypatch.setattr(claim, "recorded_changes", signalled)
    with pytest.raises(Stopped), claim.Claim(loaded).hold(None):
        pass
    assert json.loads((tmp_path / "here" / "exit.json").read_text())["code"] == 85
    assert read_holder(tmp_path / "here" / "lease") is None


def test_first_step_on_a_full_disk_is_an_error_that_says_so_and_leaves_no_half_file(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(CONFIG.format(root=tmp_path))
    begun = claim.Claim(load_job(tmp_path / "job.toml"))
    (tmp_path / "here").mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"here cannot be written: .*No space left on device; make room"
    ):
        begun.begin(0)
    assert list((tmp_path / "here").iterdir()) == []


def test_what_is_kept_of_the_environment_holds_no_secrets_and_is_read_by_its_user_only(tmp_path, monkeypatch):
    for name in ("SLURM_JWT", "NCCL_SECRET_TOKEN", "OMP_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "a-live-credential")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (tmp_path / "job.toml").write_text(CONFIG.format(root=tmp_path))
    (tmp_path / "here").mkdir()
    claim.Claim(load_job(tmp_path / "job.toml")).begin(0)
    kept = tmp_path / "here" / "environment.json"
    assert "a-live-credential" not in kept.read_text()
    assert json.loads(kept.read_text())["variables"]["OMP_NUM_THREADS"] == "3"
    assert kept.stat().st_mode & 0o777 == 0o600


def test_step_of_a_start_that_ends_by_an_error_is_kept(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG.format(root=tmp_path))
    mine = claim.Claim(load_job(tmp_path / "job.toml"))
    with pytest.raises(ZeroDivisionError), mine.hold(None):
        mine.progress = Progress(step=7)
        raise ZeroDivisionError
    assert json.loads((tmp_path / "here" / "exit.json").read_text())["step"] == 7
