"""At which steps a checkpoint is due, from the TOML of a run on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from forge_resilience.exit_codes import ExitCode
from forge_resilience.verdict import Verdict
from forge_trainer.checkpoints.checkpoints import Interval
from forge_trainer.config.job import load_job
from forge_trainer.launch import _outcome
from forge_trainer.progress import Progress

RUN = Path(__file__).parents[3] / "configs" / "runs" / "debug.toml"


@pytest.mark.parametrize(("every", "others"), [("10", {10, 20, 30}), ('"auto"', {20, 21, 22, 23, 24})])
def test_steps_of_dense_windows_are_due_beside_the_others(tmp_path, every, others):
    path = tmp_path / "dense.toml"
    path.write_text(
        f'extends = ["{RUN}"]\n[checkpoint]\nevery_steps = {every}\n[[checkpoint.dense]]\nto_step = 16\n'
        "[[checkpoint.dense]]\nfrom_step = 12\nto_step = 15\nevery = 3\n"
    )
    saves = Interval(load_job(path).value.checkpoint, Progress(until=24), None)
    due = {step for step in range(1, 25) if saves.due(step)}
    assert {1, 2, 4, 8, 16, 12, 15} <= due
    assert due - {1, 2, 4, 8, 16, 12, 15} == {step for step in others if step < 24} | {24}


@pytest.mark.parametrize("every", ["7", '"auto"'])
def test_milestones_are_due_whatever_the_distance_of_the_others(tmp_path, every):
    path = tmp_path / "milestones.toml"
    path.write_text(f'extends = ["{RUN}"]\n[checkpoint]\nevery_steps = {every}\nkeep_every_steps = 5\n')
    saves = Interval(load_job(path).value.checkpoint, Progress(until=24), None)
    assert {5, 10, 15, 20} <= {step for step in range(1, 25) if saves.due(step)}


@pytest.mark.parametrize(("failed", "code"), [(False, ExitCode.PREEMPTED), (True, ExitCode.FAILED)])
def test_stop_whose_checkpoint_could_not_be_written_is_a_failure(failed, code):
    """Starts that fail in a row without getting further come to an end, preempted ones go on for ever."""
    run = SimpleNamespace(
        progress=Progress(5, until=9),
        checkpoints=SimpleNamespace(failed=failed),
    )
    assert _outcome(run, Verdict.STOP, SimpleNamespace())[0] is code
