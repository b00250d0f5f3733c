"""One start of a run: how it leaves the run directory when it ends early."""

import json

import pytest
from forge_ckpt.lease import read_holder
from forge_resilience.signals import Stopped
from forge_trainer import claim
from forge_trainer.job import load_job

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
