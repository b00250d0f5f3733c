import os
import subprocess
import time

import pytest
from forge_resilience.deadline import Deadline, process_age_s
from forge_resilience.verdict import Verdict


def test_deadline_stops_when_only_the_margin_is_left():
    assert Deadline(1000, 10, {}, age_s=0).verdict() == Verdict.CONTINUE
    assert Deadline(5, 10, {}, age_s=0).verdict() == Verdict.STOP
    assert Deadline(None, 10, {}).verdict() == Verdict.CONTINUE


def test_deadline_learns_how_long_a_save_takes():
    deadline = Deadline(100, 1, {}, age_s=0)
    assert deadline.verdict() == Verdict.CONTINUE
    deadline.observe("save", 90)
    assert deadline.verdict() == Verdict.STOP


def test_deadline_keeps_its_margin_when_saves_are_fast():
    deadline = Deadline(20, 30, {}, age_s=0)
    deadline.observe("save", 0.1)
    assert deadline.verdict() == Verdict.STOP


def test_deadline_needs_time_for_the_longest_of_each_kind_and_a_save():
    deadline = Deadline(None, 1, {})
    for kind, seconds in [("step", 5), ("step", 2), ("Evaluate", 8), ("save", 4), ("save", 3)]:
        deadline.observe(kind, seconds)
    assert deadline.needed_s() == 5 + 8 + 1.5 * 4
    assert deadline.needed_s(save_due=True) == 5 + 8 + 4 + 1.5 * 4


def test_deadline_knows_after_the_first_hook_that_another_one_does_not_fit():
    deadline = Deadline(12, 1, {}, age_s=0)
    with deadline.span("hook"):
        pass
    assert deadline.verdict() == Verdict.CONTINUE
    deadline.observe("hook", 11.5)
    assert deadline.verdict() == Verdict.STOP


def test_deadline_forgets_a_slow_span_in_the_end():
    deadline = Deadline(None, 0, {})
    deadline.observe("step", 100)
    for _ in range(300):
        deadline.observe("step", 1)
    assert deadline.needed_s() == 1


def test_deadline_counts_from_the_start_of_the_process():
    age = float(subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getpid())], text=True))
    assert process_age_s() == pytest.approx(age, abs=1.1)
    assert Deadline(age + 100, 0, {}).left_s() == pytest.approx(100, abs=3)
    assert Deadline(10, 5, {}, age_s=6).verdict() == Verdict.STOP


def test_deadline_is_the_earlier_one_of_two():
    soon, late = str(time.time() + 20), str(time.time() + 900)
    assert Deadline(1000, 30, {"SLURM_JOB_END_TIME": soon}, age_s=0).verdict() == Verdict.STOP
    assert Deadline(20, 30, {"SLURM_JOB_END_TIME": late}, age_s=0).verdict() == Verdict.STOP
    assert Deadline(1000, 30, {"SLURM_JOB_END_TIME": late}, age_s=0).verdict() == Verdict.CONTINUE


@pytest.mark.parametrize("unknown", ["Unknown", "", "N/A", "nan", "inf", "0"])
def test_deadline_has_no_end_where_slurm_does_not_know_it(unknown, caplog):
    assert Deadline(None, 30, {"SLURM_JOB_END_TIME": unknown}).left_s() == float("inf")
    assert "SLURM_JOB_END_TIME" in caplog.text


def test_deadline_respects_slurm():
    assert Deadline(None, 30, {"SLURM_JOB_END_TIME": str(time.time() + 20)}).verdict() == Verdict.STOP
    assert Deadline(None, 30, {"SLURM_JOB_END_TIME": str(time.time() + 900)}).verdict() == Verdict.CONTINUE
