import os
import signal
import time

import pytest
from forge_resilience.deadline import Deadline
from forge_resilience.signals import Signals
from forge_resilience.verdict import Verdict, agree


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_signals_turn_into_stop_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.verdict() == Verdict.CONTINUE
        os.kill(os.getpid(), number)
        assert signals.verdict() == Verdict.STOP
        assert signals.received == number
    assert signal.getsignal(number) is before


def test_signals_repeated_within_a_moment_change_nothing():
    with Signals() as signals:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGTERM


def test_signals_second_interrupt_of_a_person_ends_the_process(monkeypatch):
    with Signals():
        os.kill(os.getpid(), signal.SIGINT)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.1)


def test_deadline_stops_when_only_the_margin_is_left():
    assert Deadline(1000, 10, {}).verdict() == Verdict.CONTINUE
    assert Deadline(5, 10, {}).verdict() == Verdict.STOP
    assert Deadline(None, 10, {}).verdict() == Verdict.CONTINUE


def test_deadline_learns_how_long_a_save_takes():
    deadline = Deadline(100, 1, {})
    assert deadline.verdict() == Verdict.CONTINUE
    deadline.saved(90)
    assert deadline.verdict() == Verdict.STOP


def test_deadline_respects_slurm():
    assert Deadline(None, 30, {"SLURM_JOB_END_TIME": str(time.time() + 20)}).verdict() == Verdict.STOP
    assert Deadline(None, 30, {"SLURM_JOB_END_TIME": str(time.time() + 900)}).verdict() == Verdict.CONTINUE


def test_agree_of_a_lone_process_is_its_own_verdict():
    assert [agree(v, None) for v in Verdict] == list(Verdict)
