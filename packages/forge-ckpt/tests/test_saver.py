import errno
import resource
import threading
from pathlib import Path

import pytest
import torch
from forge_ckpt import CheckpointError, Saver, Store, TrainState
from forge_ckpt import saver as savers
from torch import nn


def made(root) -> tuple[nn.Module, torch.optim.Optimizer, Store, Saver]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    store = Store(root)
    return model, optimizer, store, Saver(store, TrainState([model], optimizer), asynchronous=True)


def step(model, optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Held:
    """Saves wait until they are released."""

    def __init__(self, store, monkeypatch):
        self.go, self.begun, original = threading.Event(), threading.Event(), store._write_all

        def wait(*args):
            self.begun.set()
            assert self.go.wait(20)
            original(*args)

        monkeypatch.setattr(store, "_write_all", wait)


def test_asynchronous_save_holds_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    model, optimizer, store, saver = made(tmp_path)
    step(model, optimizer)
    before = {key: value.clone() for key, value in TrainState([model], optimizer).capture().tensors.items()}
    held, meta = Held(store, monkeypatch), {"progress": {"step": 1}}
    saver.save(1, meta)
    assert held.begun.wait(20)
    meta["progress"]["step"] = 9
    step(model, optimizer)
    assert store.steps() == []
    held.go.set()
    saver.finish()
    assert saver.saved_step == 1 and store.newest().meta == {"progress": {"step": 1}}
    saved = store.tensors(1)
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[key], value) for key, value in before.items())


def test_one_save_is_in_flight_and_the_next_waits_for_it(tmp_path, monkeypatch):
    _, _, store, saver = made(tmp_path)
    held = Held(store, monkeypatch)
    saver.save(1, {})
    later = threading.Thread(target=saver.save, args=(2, {}))
    later.start()
    later.join(0.2)
    assert later.is_alive() and store.steps() == []
    held.go.set()
    later.join(20)
    saver.finish()
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_save_warns_and_the_third_in_a_row_stops(tmp_path, monkeypatch, caplog, asynchronous):
    model, optimizer, store, _ = made(tmp_path)
    saver = Saver(store, TrainState([model], optimizer), asynchronous)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(at: int) -> None:
        monkeypatch.setattr("forge_ckpt.shards.write_boxes", full)
        saver.save(at, {})
        saver.finish()

    fail(1)
    fail(2)
    assert "No space left" in caplog.text and "(2 of 3 failures in a row)" in caplog.text
    monkeypatch.undo()
    saver.save(3, {})
    saver.finish()
    assert saver.failures == 0 and store.steps() == [3]
    fail(4)
    fail(5)
    with pytest.raises(CheckpointError, match=r"3 saves in a row.*No space left.*newest.*is 3"):
        fail(6)
    assert store.steps() == [3]


def test_save_is_synchronous_where_memory_does_not_suffice(tmp_path, monkeypatch, caplog):
    _, _, store, saver = made(tmp_path)
    monkeypatch.setattr(savers, "free_memory_bytes", lambda: 40)
    saver.save(1, {})
    assert store.steps() == [1] and "training waits for checkpoints" in caplog.text
    monkeypatch.setattr(savers, "free_memory_bytes", lambda: 10**6)
    held = Held(store, monkeypatch)
    saver.save(2, {})
    assert held.begun.wait(20) and store.steps() == [1]
    held.go.set()
    saver.finish()
    monkeypatch.setattr(savers, "free_memory_bytes", lambda: 0)
    saver.save(3, {})  # the memory of the copy before is there already
    saver.finish()
    assert caplog.text.count("training waits") == 1


def test_save_is_synchronous_where_a_copy_finds_no_memory_after_all(tmp_path, caplog):
    model = nn.Linear(4096, 4096)
    store = Store(tmp_path)
    state = TrainState([model], torch.optim.SGD(model.parameters()))
    saver = Saver(store, state, asynchronous=True)
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:  # less than the copy takes, which the free memory of the machine does not say
        resource.setrlimit(resource.RLIMIT_AS, (taken + (40 << 20), before[1]))
        for at in (1, 2):
            saver.save(at, {})
            assert store.steps()[-1] == at
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert caplog.text.count("training waits for checkpoints") == 1 and saver.failures == 0
    assert torch.equal(store.tensors(2)["model.weight"], model.weight)
    saver.save(3, {})
    saver.finish()
    assert store.steps() == [1, 2, 3] and saver.saved_step == 3


def test_save_is_synchronous_where_no_thread_can_start(tmp_path, monkeypatch, caplog):
    _, _, store, saver = made(tmp_path)

    def none_left(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    saver.save(1, {})
    saver.finish()
    assert store.steps() == [1] and "can't start new thread" in caplog.text


@pytest.mark.parametrize("room", [40, 10**9], ids=["waits", "beside"])
def test_ranks_that_wait_for_a_save_and_those_that_do_not_end_at_the_same_call(tmp_path, monkeypatch, room):
    _, _, _, saver = made(tmp_path)
    monkeypatch.setattr(savers, "free_memory_bytes", lambda: room)
    monkeypatch.setattr("forge_ckpt.shards.write_boxes", lambda *_: Path("/nowhere/there").read_bytes())
    for step in (1, 2, 3):
        saver.save(step, {})
    assert saver.failures == 2
    with pytest.raises(CheckpointError, match="3 saves in a row"):
        saver.finish()
    saver.finish()


def test_free_memory_is_known_here():
    assert (savers.free_memory_bytes() or 0) > 1e6


def test_values_are_those_of_the_moment_of_the_save(tmp_path, monkeypatch):
    _, _, store, saver = made(tmp_path)
    held, values = Held(store, monkeypatch), {"data.place.0": {"rows": [1]}}
    saver.save(1, {}, values)
    values["data.place.0"]["rows"].append(2)
    held.go.set()
    saver.finish()
    assert store.newest().values["data.place.0"] == {"rows": [1]}


def test_what_cannot_be_saved_is_a_failed_save_and_no_error_of_its_own(tmp_path, caplog):
    model, optimizer, store, saver = made(tmp_path)
    saver.save(1, {}, {"place": 3})
    saver.finish()
    assert saver.failures == 1 and "a value is named 'place'" in caplog.text
    optimizer.state[model.weight]["odd"] = object()
    saver.save(2, {})
    saver.finish()
    assert saver.failures == 2 and "'odd' of AdamW is " in caplog.text
    del optimizer.state[model.weight]["odd"]
    saver.save(3, {})
    saver.finish()
    assert saver.failures == 0 and store.steps() == [3]


def test_save_in_flight_that_fails_as_the_process_ends_is_told(tmp_path, monkeypatch, caplog):
    _, _, store, saver = made(tmp_path)
    saver.save(1, {})
    saver.close()
    assert saver.saved_step == 1
    monkeypatch.setattr(store, "_write_all", lambda *_: 1 / 0)
    saver.save(2, {})
    saver.close()
    assert saver.saved_step == 1 and "division by zero" in caplog.text


def test_copies_of_all_ranks_of_a_machine_must_fit(tmp_path, monkeypatch, caplog):
    _, _, store, saver = made(tmp_path)
    needed = savers.RESERVE * store.staging_bytes(saver._state.capture(copy=False).tensors, {})
    monkeypatch.setattr(savers, "free_memory_bytes", lambda: 2 * needed)
    monkeypatch.setattr(store, "ranks_on_this_machine", lambda: 3)
    saver.save(1, {})
    assert store.steps() == [1] and "training waits for checkpoints" in caplog.text


def test_wait_that_is_interrupted_forgets_no_save(tmp_path, monkeypatch):
    _, _, store, saver = made(tmp_path)
    held, wait = Held(store, monkeypatch), saver._ended.wait
    saver.save(1, {})

    def interrupted(timeout=None):
        monkeypatch.setattr(saver._ended, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(saver._ended, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.finish()
    saver.close(timeout_s=0.01)
    assert saver.saved_step is None
    threading.Timer(0.2, held.go.set).start()
    saver.save(2, {})
    saver.finish()
    assert store.steps() == [1, 2] and saver.failures == 0


def test_two_savers_of_one_store_write_one_after_the_other(tmp_path, monkeypatch):
    model, optimizer, store, one = made(tmp_path)
    other = Saver(store, TrainState([model], optimizer), asynchronous=True)
    held = Held(store, monkeypatch)
    for step, saver in ((1, one), (2, other)):
        with torch.no_grad():
            model.weight.fill_(step)
        saver.save(step, {})
    held.go.set()
    one.finish(), other.finish()
    assert [store.tensors(step)["model.weight"][0, 0] for step in store.steps()] == [1, 2]
