"""Hooks of a user in the real command: when they are called, what they keep, and what they do wrong."""

import json
import signal
from pathlib import Path

import pytest
from runs import losses, records, state

HOOK = """
[hooks.best]
type = "class"
path = "{path}"
options = {options}
"""

ODD = """
import torch
from forge_trainer.hooks import Hook


class Late(Hook):
    def __init__(self, run):
        self.run = run

    def on_step(self, progress, out):
        out.metrics |= {"text": "no number", "loss": 7.0}
        self.run.log({"odd": object(), "fine": torch.tensor(2.5), "whole": 3, "complex": 1j})


class Early(Hook):
    def __init__(self, run):
        run.step.train = self.wrapped(run.step.train)

    @staticmethod
    def wrapped(train):
        def odd(batch, index):
            out = train(batch, index)
            out.metrics |= {"text": "no number", "two": torch.ones(2), "mine": torch.tensor(1.5)}
            out.metrics |= {"step": torch.tensor(-1.0), "loss": torch.tensor(-1.0)}
            return out

        return odd


class Unsaved(Hook):
    def __init__(self, run):
        pass

    def state(self):
        return {"set": {1, 2}}

    def load_state(self, state):
        pass


class NoHook:
    pass
"""


@pytest.fixture
def with_hook(tiny, tmp_path):
    """A tiny job with a hook by its path; modules lie beside the configuration."""
    page = (Path(__file__).parents[2] / "docs" / "plugs.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    (tmp_path / "my_lab_diary.py").write_text(next(block for block in blocks if "class Best" in block))
    (tmp_path / "my_lab_odd.py").write_text(ODD)

    def write(path="my_lab_diary:Best", options="{}", **given):
        return tiny(extra=HOOK.format(path=path, options=options), **given)

    return write


def diary(path):
    """The lines, without what the best loss was."""
    return [line.partition(", best")[0] for line in path.read_text().splitlines()]


def test_hook_of_the_docs_sees_a_whole_run_and_goes_on_after_a_stop(forge, with_hook, tmp_path):
    flags = ("--eval.every_steps=2",)
    told = f'{{ path = "{tmp_path}/whole.txt" }}'
    whole = with_hook(options=told, steps=9, name="whole.toml", root=tmp_path / "whole")
    forge("train", whole, *flags)
    saves = [f"save at {step}" for step in (3, 6, 9)]
    lines = diary(tmp_path / "whole.txt")
    assert lines[:-1] == ["start at 0", *saves] and lines[-1].startswith("end at 9 ")
    logged = records(tmp_path / "whole" / "tiny")
    seen = [record["eval/loss"] for record in logged if "eval/loss" in record]
    best = [record["eval/best"] for record in logged if "eval/best" in record]
    assert best == [min(seen[: i + 1]) for i in range(5)]

    cut = with_hook(options=f'{{ path = "{tmp_path}/cut.txt" }}', steps=9)
    assert forge.stop_at(cut, 5, signal.SIGTERM, 1, *flags) == 85
    stopped = diary(tmp_path / "cut.txt")[-1]
    assert stopped.startswith("end at ") and stopped.endswith("(STOP)")
    forge("train", cut, *flags)
    lines = (tmp_path / "cut.txt").read_text().splitlines()
    again = next(line for line in lines[1:] if line.startswith("start at "))
    assert "best None" not in again, "what it kept came back before on_start"
    assert state(tmp_path / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")


@pytest.mark.parametrize("name", ["Late", "Early"])
def test_metrics_that_no_tracker_can_log_do_not_end_a_run(forge, with_hook, tmp_path, name):
    done = forge("train", with_hook(path=f"my_lab_odd:{name}", steps=3))
    run = tmp_path / "runs" / "tiny"
    assert len(losses(run)) == 3
    logged = records(run)
    assert [record["step"] for record in logged if "loss" in record] == [1, 2, 3]
    assert not any({"text", "two", "odd", "complex"} & record.keys() for record in logged)
    if name == "Late":
        assert [(r["fine"], r["whole"]) for r in logged if "fine" in r] == [(2.5, 3)] * 3
        assert done.stderr.count("odd is not logged") == 1
    else:
        assert [record["mine"] for record in logged if "loss" in record] == [1.5] * 3
        assert all(record["loss"] > 0 for record in logged if "loss" in record)
        assert done.stderr.count("two is not logged") == 1


def test_state_that_json_cannot_hold_is_refused_by_name(forge, with_hook):
    done = forge("train", with_hook(path="my_lab_odd:Unsaved", steps=3), check=False)
    assert done.returncode == 78
    assert "hooks.best: state() returned what a checkpoint cannot hold" in done.stderr


@pytest.mark.parametrize(
    ("path", "options", "error"),
    [
        ("my_lab_nothing:Best", "{}", "my_lab_nothing cannot be imported"),
        ("my_lab_diary:Worst", "{}", "Worst is no such name in my_lab_diary"),
        ("my_lab_odd:NoHook", "{}", "NoHook is no subclass of forge_trainer.hooks.Hook"),
        ("my_lab_diary.Best", "{}", "hooks.best.path"),
        ("my_lab_diary:Best", "{ file = 1 }", "unexpected keyword argument 'file'"),
    ],
)
def test_paths_that_name_no_hook_are_refused(forge, with_hook, path, options, error):
    done = forge("train", with_hook(path=path, options=options, steps=3), check=False)
    assert done.returncode == 78, done.stderr
    assert error in done.stderr
    assert "Traceback" not in done.stderr


FAILING = """
from forge_config import ConfigError
from forge_trainer.hooks import Hook


class Failing(Hook):
    def __init__(self, run, rank, error):
        self.run, self.rank = run, rank
        self.error = {"config": ConfigError, "bug": KeyError}[error]

    def on_step(self, progress, out):
        if progress.step == 3 and self.run.env.rank == self.rank:
            raise self.error("this is what is wrong")
"""


@pytest.mark.parametrize(("rank", "error", "code"), [(1, "config", 78), (0, "bug", 1)])
def test_ranks_end_for_the_reason_of_the_one_that_failed(forge, with_hook, tmp_path, rank, error, code):
    (tmp_path / "my_lab_failing.py").write_text(FAILING)
    path = with_hook("my_lab_failing:Failing", f'{{rank = {rank}, error = "{error}"}}')
    done = forge("train", path, "--mesh.dp_shard=2", ranks=2, check=False, cwd=tmp_path)
    other = 1 - rank
    assert f"rank {other} ends, as another rank failed: rank {rank}: " in done.stderr
    assert done.stderr.count("wrong") == 2 + (error == "bug"), "said by each rank, and in the line of a bug"
    assert "Connection" not in done.stderr
    ours = [
        line for line in done.stderr.splitlines() if line.startswith('  File "') and "forge_trainer" in line
    ]
    assert bool(ours) == (error == "bug"), "a traceback of the rank with a bug, and of no other"
    ended = json.loads((tmp_path / "runs" / "tiny" / "exit.json").read_text())
    assert (ended["code"], ended["step"]) == (code, 3) and "what is wrong" in ended["reason"]
