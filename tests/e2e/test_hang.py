"""A rank of a real run that stands still: the run ends soon, says which it was, and can go on."""

import json
import os
import signal
import subprocess

import pytest
from runs import losses


@pytest.mark.slow
@pytest.mark.dist
def test_stopped_rank_is_named_and_the_run_goes_on(forge, tiny, tmp_path):
    whole = tiny(steps=300, name="whole.toml", root=tmp_path / "whole")
    forge("train", whole, ranks=2)
    path, run = tiny(steps=300), tmp_path / "runs" / "tiny"
    line = [*forge.command("train", path, ranks=2), "--resilience.hang_least_s=5"]
    process = subprocess.Popen(line, env=forge.environment, stderr=subprocess.DEVNULL)
    forge.wait_for_step(run / "metrics.jsonl", 120, process)
    ranks = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
    os.kill(int(ranks[-1]), signal.SIGSTOP)
    assert process.wait(timeout=60) == 1  # torchrun's
    ended = json.loads((run / "exit.json").read_text())
    assert ended["code"] == 86 and f"(pid {ranks[-1]})" in ended["reason"], ended
    assert "the process is stopped" in ended["reason"]
    assert "forge_trainer" in (run / "hang" / "stacks-0.txt").read_text()
    assert json.loads((run / "hang" / "collectives-0.json").read_text())["entries"]
    said = forge("status", run).stdout
    assert said.count("hang: rank 1") == 1
    forge("train", path, ranks=2)
    assert losses(run) == losses(tmp_path / "whole" / "tiny")
