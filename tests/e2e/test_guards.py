"""The real command and what may end it early: steps that are not finite, and time that runs out."""

import json
import os
import signal
import subprocess

import pytest
from forge_ckpt.store import Store
from poison import POISON
from runs import losses, state


@pytest.fixture
def poisoned(tiny, tmp_path):
    """A job of 12 steps whose gradients are infinite from step 3 to a given one."""
    (tmp_path / "my_poison.py").write_text(POISON)

    def write(last, **options):
        path = tiny(steps=12, extra=f'\n[hooks.poison]\ntype = "poison"\nlast = {last}\n', **options)
        path.write_text('imports = ["my_poison"]\n' + path.read_text())
        return path

    return write


def skipped(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["skipped"] for line in lines if "skipped" in line}


def test_run_that_only_ever_diverged_does_not_end_as_done(forge, tiny, tmp_path):
    done = forge("train", tiny(steps=9), "--optimizer.lr=1e30", "--train.log_every_steps=3", check=False)
    assert done.returncode == 87, done.stderr
    assert "not finite" in done.stderr and "Traceback" not in done.stderr
    assert sum(skipped(tmp_path / "runs" / "tiny").values()) > 3


def test_run_that_was_ended_for_steps_that_are_not_finite_ends_so_again(forge, poisoned, tmp_path):
    arguments = poisoned(last=100), "--resilience.max_bad_steps=5"
    for _ in range(2):
        assert forge("train", *arguments, check=False).returncode == 87
    incidents = (tmp_path / "runs" / "tiny" / "incidents.jsonl").read_text().splitlines()
    ended = [line for line in map(json.loads, incidents) if line["kind"] == "ended"]
    assert len(ended) == 2 and all("not finite" in line["why"] for line in ended)
    assert Store(tmp_path / "runs" / "tiny" / "checkpoints").steps() == [3, 6]


def test_log_counts_the_steps_skipped_since_its_last_line_across_a_restart(forge, poisoned, tmp_path):
    path, extra = poisoned(last=8), ("--train.log_every_steps=4",)
    forge.stop_at(path, 4, signal.SIGTERM, 1, *extra)
    forge("train", path, *extra)
    assert skipped(tmp_path / "runs" / "tiny") == {4: 2, 8: 4, 12: 0}


def test_time_of_a_run_counts_from_the_start_of_its_process(forge, tiny, tmp_path):
    limits = "--resilience.max_runtime_s=0.5", "--resilience.save_margin_s=0"
    cold = forge.command("train", tiny(steps=100000), *limits)  # its imports alone take longer
    done = subprocess.run(cold, env=forge.environment, capture_output=True, text=True)
    assert done.returncode == 85, done.stderr
    assert Store(tmp_path / "runs" / "tiny" / "checkpoints").steps() == [1]


FLIP = """
import os
from pathlib import Path

import torch
from forge_parallel.tensor import local_part
from forge_trainer.hooks import Hook, HookConfig, hooks

class Flip(Hook):
    def __init__(self, run, config):
        self.run, self.config = run, config

    def on_step(self, progress, out):
        done = Path(self.config.done)
        if progress.step == self.config.step and self.run.env.rank == self.config.rank and not done.exists():
            done.touch()
            bits = local_part(list(self.run.parts[0].parameters())[3]).view(torch.int32)
            bits.view(-1)[5] ^= 1 << self.config.bit

@hooks.register("flip")
class FlipConfig(HookConfig):
    step: int = 5
    rank: int = 1
    bit: int = 0
    done: str

    def build(self, run):
        return Flip(run, self)
"""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("compare", [2, 1000], ids=["every 2 steps", "before a checkpoint"])
def test_flipped_bit_on_one_replica_is_found_and_undone(forge, tiny, tmp_path, compare):
    keys = "--mesh.dp_replicate=2", "--mesh.dp_shard=1", f"--resilience.compare_copies_every_steps={compare}"
    forge("train", tiny(name="whole.toml", root=tmp_path / "whole"), *keys, ranks=2)
    (tmp_path / "my_flip.py").write_text(FLIP)
    path = tiny(extra=f'\n[hooks.flip]\ntype = "flip"\ndone = "{tmp_path / "done"}"\n')
    path.write_text('imports = ["my_flip"]\n' + path.read_text())
    said = forge("train", path, *keys, ranks=2).stderr
    assert "step 6: copies of " in said and "back to the checkpoint of step 3" in said
    run = tmp_path / "runs" / "tiny"
    (found,) = [json.loads(line) for line in (run / "incidents.jsonl").read_text().splitlines()]
    assert (found["kind"], found["to"], found["skip"]) == ("rollback", 3, False)
    assert "rank 0 on" in found["why"] and "rank 1 on" in found["why"]
    mine, whole = state(run), state(tmp_path / "whole" / "tiny")
    assert {key: mine[key] for key in mine if key != "meta"} == {
        key: whole[key] for key in whole if key != "meta"
    }
    assert losses(run) == losses(tmp_path / "whole" / "tiny")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kill", [False, True], ids=["goes on", "killed"])
@pytest.mark.parametrize("streams", [False, True], ids=["store", "stream"])
def test_two_ranks_go_back_alike(forge, tiny, rows, stream, tmp_path, streams, kill):
    def write(**settings):
        path = tiny(steps=200 if kill else 14, **settings)
        return stream(path, rows) if streams else path

    (tmp_path / "my_poison.py").write_text(POISON)
    hook = '\n[hooks.poison]\ntype = "poison"\nfirst = 8\nlast = 10\nheals = true\n'
    keys = "--resilience.max_bad_steps=3", "--resilience.check_every_steps=1"
    path = write(extra=hook)
    path.write_text('imports = ["my_poison"]\n' + path.read_text())
    if kill:
        process = subprocess.Popen(forge.command("train", path, *keys, ranks=2), env=forge.environment)
        forge.wait_for_step(tmp_path / "runs" / "tiny" / "metrics.jsonl", 60, process)
        ranks = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
        for rank in ranks:
            os.kill(int(rank), signal.SIGKILL)
        assert process.wait(timeout=60) != 0
    forge("train", path, *keys, ranks=2)
    without = write(name="without.toml", root=tmp_path / "without")
    forge("train", without, "--data.skip=[{start_step=7,end_step=10}]", ranks=2)
    run, other = tmp_path / "runs" / "tiny", tmp_path / "without" / "tiny"
    mine, whole = state(run), state(other)
    assert {key: mine[key] for key in mine if key != "meta"} == {
        key: whole[key] for key in whole if key != "meta"
    }
    assert losses(run) == losses(other)
    assert (run / "incidents.jsonl").read_text().count('"rollback"') == 1
