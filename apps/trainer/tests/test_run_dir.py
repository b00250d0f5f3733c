import os
from argparse import Namespace

import pytest
from forge_config import Change, ConfigError, to_toml
from forge_trainer.commands.branch import branch_run
from forge_trainer.config.job import load_job
from forge_trainer.run_dir.files import RunFiles, append_history, read_history, read_job


def test_event_after_a_torn_line_is_not_lost(tmp_path):
    append_history(tmp_path, 3, [Change("train.steps", 10, 20)])
    with RunFiles(tmp_path).history.open("a") as file:
        file.write('{"step": 5, "key": "optim')  # a crash
    append_history(tmp_path, 7, [Change("optimizer.lr", 0.1, 0.2)])
    assert [event["key"] for event in read_history(tmp_path)] == ["train.steps", "optimizer.lr"]


def test_code_of_another_user_is_executed_only_where_that_is_allowed(tmp_path, monkeypatch):
    """Whoever evaluates, exports or branches a run imports what it names."""
    (tmp_path / "my_trap.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'sprung')!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FORGE_TRUST", raising=False)
    job = load_job("configs/runs/debug.toml", [f'--job.root="{tmp_path}"']).value
    run = job.job.directory
    run.mkdir()
    (run / "config.toml").write_text(to_toml(job, imports=["my_trap"]))
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigError, match=r"of another user .* my_trap; .* FORGE_TRUST=1"):
        read_job(run)
    with pytest.raises(ConfigError, match="FORGE_TRUST=1"):
        branch_run(Namespace(directory=run, out=tmp_path / "new"), [])
    assert not (tmp_path / "sprung").exists()
    monkeypatch.setenv("FORGE_TRUST", "1")
    assert read_job(run).job.name == "debug" and (tmp_path / "sprung").exists()
    (run / "config.toml").write_text(to_toml(job))
    monkeypatch.delenv("FORGE_TRUST")
    assert read_job(run).job.name == "debug", "without code there is nothing to be allowed"
