"""Where time is counted: against sleeps of known length on a fake counter."""

import pytest
from forge_resilience.watchdog import Watchdog
from forge_trainer import clock
from forge_trainer.clock import Clock


@pytest.fixture
def now(monkeypatch):
    """A counter that the test moves by hand."""
    time = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: time[0])
    return time


def test_span_counts_an_inner_span_once(now):
    clock = Clock()
    with clock.span("build"):
        now[0] += 1
        with clock.span("load"):
            now[0] += 4
        now[0] += 2
    assert clock.total_s == {"build": 3.0, "load": 4.0}


def test_span_counts_when_it_ends_by_an_exception(now):
    clock = Clock()
    with pytest.raises(KeyError), clock.span("save"):
        now[0] += 2
        raise KeyError
    assert clock.total_s == {"save": 2.0}


def test_lap_leaves_out_what_is_not_training(now):
    clock = Clock()
    with clock.span("build"):
        now[0] += 50
    with clock.span("step"):
        now[0] += 3
    now[0] += 1
    assert clock.lap() == {"build": 50.0, "step": 3.0, "training": 4.0}
    with clock.span("step"):
        now[0] += 2
    with clock.span("evaluate"):
        now[0] += 7
    assert clock.lap() == {"step": 2.0, "evaluate": 7.0, "training": 2.0}


def test_listener_hears_each_span_whole(now):
    clock = Clock()
    heard = []
    clock.listeners.append(lambda name, seconds: heard.append((name, seconds)))
    with clock.span("save"):
        now[0] += 1
        with clock.span("sync"):
            now[0] += 2
    assert heard == [("sync", 2.0), ("save", 3.0)]
    now[0] += 4
    with clock.span("data"):
        now[0] += 1
    assert heard[2:] == [("between", 4.0), ("data", 1.0)] and "between" not in clock.total_s


def test_watcher_is_told_of_the_outer_span_again_and_of_the_end():
    clock, told = Clock(), []
    clock.watchers.append(told.append)
    with pytest.raises(KeyError), clock.ending():
        with clock.span("save"), clock.span("sync"):
            pass
        raise KeyError
    assert told == ["save", "sync", "save", "between", "end"]


def test_limit_between_two_spans_is_learned_and_that_of_the_end_is_not(tmp_path):
    clock = Clock()
    with Watchdog(tmp_path / "hang", 0, 1, least_s=5, first_s=60) as dog:
        clock.watchers.append(dog.enter)
        clock.listeners.append(dog.learn)
        limits = []
        with clock.ending():
            for _ in range(2):
                with clock.span("step"):
                    pass
                limits.append(dog._beat.limit_s)
        assert [*limits, dog._beat.limit_s] == [60, 5, 60]
