"""Memory of the allocator as figures, and times of the device from events that come to pass later."""

import pytest
import torch
from forge_trainer.hooks.memory import GIB, figures_of, memory_figures
from forge_trainer.profile.device_time import HostStamp, Parts


def test_memory_of_the_allocator_as_figures():
    stats = {
        "allocated_bytes.all.current": 3 * GIB,
        "allocated_bytes.all.peak": 6 * GIB,
        "reserved_bytes.all.current": 4 * GIB,
        "reserved_bytes.all.peak": 8 * GIB,
        "num_alloc_retries": 2,
    }
    assert figures_of(stats, 16 * GIB) == {
        "memory/allocated_gib": 3.0,
        "memory/reserved_gib": 4.0,
        "memory/peak_allocated_gib": 6.0,
        "memory/peak_reserved_gib": 8.0,
        "memory/utilization": 0.5,
        "memory/fragmentation": 0.25,
        "memory/retries": 2.0,
    }
    assert figures_of({}, GIB)["memory/fragmentation"] == 0.0


def test_cpu_has_no_such_memory():
    assert memory_figures(torch.device("cpu")) == {}


class Played:
    """An event of a device that comes to what is in its queue when the test says so."""

    host_ms, device_ms, made = 0.0, 0.0, 0

    def __init__(self):
        type(self).made += 1

    def record(self):
        self.at = Played.host_ms

    def query(self):
        return Played.device_ms >= self.at

    def elapsed_time(self, end_event):
        assert end_event.query() and self.query(), "torch raises where an event has not come to pass"
        return end_event.at - self.at


def test_parts_are_timed_once_the_device_has_done_them():
    parts = Parts(Played)
    for at, name in [(0, "data"), (3, "step"), (10, "step"), (20, "optimizer"), (25, "step"), (26, "log")]:
        Played.host_ms = at
        parts.enter(name)
    Played.device_ms = 20
    parts.read()
    assert dict(parts.total_s) == pytest.approx({"data": 0.003, "step": 0.017})
    parts.clear()
    Played.device_ms, Played.host_ms = 100, 30
    parts.enter("data")
    parts.read()
    assert dict(parts.total_s) == pytest.approx({"optimizer": 0.005, "step": 0.001, "log": 0.004})
    assert dict(parts.begun) == {"optimizer": 1, "step": 1, "log": 1}
    made = Played.made
    for _ in range(50):
        parts.enter("step")
        parts.enter("data")
        parts.read()
    assert Played.made <= made + 1, "events are used again"


def test_stamps_of_a_host_measure_its_time():
    first, second = HostStamp(), HostStamp()
    first.record()
    second.record()
    assert first.query() and 0 <= first.elapsed_time(second) < 1000
