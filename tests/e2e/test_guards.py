"""The real command and what may end it early: steps that are not finite, and time that runs out."""

import json
import signal

import pytest
from forge_ckpt.store import Store

POISON = """
from forge_trainer.hooks import Hook, HookConfig, hooks

@hooks.register("poison")
class PoisonConfig(HookConfig):
    first: int = 3
    last: int

    def build(self, run):
        def spoil(gradient):
            return gradient * float("inf") if self.first <= run.progress.step + 1 <= self.last else gradient
        next(run.parts[0].parameters()).register_hook(spoil)
        return Hook()
"""


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
    assert Store(tmp_path / "runs" / "tiny" / "checkpoints").steps() == [3, 6]


def test_log_counts_the_steps_skipped_since_its_last_line_across_a_restart(forge, poisoned, tmp_path):
    path, extra = poisoned(last=8), ("--train.log_every_steps=4",)
    forge.stop_at(path, 4, signal.SIGTERM, 1, *extra)
    forge("train", path, *extra)
    assert skipped(tmp_path / "runs" / "tiny") == {4: 2, 8: 4, 12: 0}


def test_time_of_a_run_counts_from_the_start_of_its_process(forge, tiny, tmp_path):
    limits = "--resilience.max_runtime_s=0.5", "--resilience.save_margin_s=0"
    done = forge("train", tiny(steps=100000), *limits, check=False)
    assert done.returncode == 85, done.stderr
    assert Store(tmp_path / "runs" / "tiny" / "checkpoints").steps() == [1]
