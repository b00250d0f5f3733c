import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, replace

import pytest
from forge_ckpt.error import LockedError
from forge_ckpt.lease import Holder, newest_epoch, read_holder, take

START = """
import sys, time
from pathlib import Path
from forge_ckpt.error import LockedError
from forge_ckpt.lease import take
folder, gate = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    while not (gate / str(number)).exists():
        pass
    try:
        lease = take(folder / str(number) / "lease")
        print("won", flush=True)
    except LockedError:
        print("lost", flush=True)
sys.stdin.read()
"""


def starters(folder, gate, processes, rounds):
    line = [sys.executable, "-c", START, str(folder), str(gate), str(rounds)]
    started = [
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for one in started:
        assert one.stdout.readline() == "ready\n"
    return started


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def strangers(folder, **changes):
    """A lease that a process on another machine took, and did not give back."""
    folder.mkdir(parents=True, exist_ok=True)
    me = replace(Holder.me(), host="node7", machine="another", **changes)
    (folder / "epoch-000000001").write_text(json.dumps(asdict(me)))
    (folder / "beat-000000001").write_text("1")


def test_take_refuses_a_second_start_and_names_the_first(tmp_path):
    lease = take(tmp_path / "lease")
    before = sorted(os.listdir(lease.folder))
    with pytest.raises(LockedError, match=rf"process {os.getpid()} on .* since 20"):
        take(tmp_path / "lease")
    assert sorted(os.listdir(lease.folder)) == before
    lease.release()
    take(tmp_path / "lease").release()


@pytest.mark.parametrize("before", ["nothing", "given back", "dead"])
@pytest.mark.parametrize("links", [True, False])
def test_of_many_starts_at_once_exactly_one_wins(tmp_path, before, links, monkeypatch):
    processes, rounds = 6, 15
    gate = tmp_path / "gate"
    gate.mkdir()
    for number in range(rounds if before != "nothing" else 0):
        lease = take(tmp_path / str(number) / "lease")
        lease.release()
        if before == "dead":
            (lease.folder / "free-000000001").unlink()
            dead = replace(Holder.me(), started="1")
            (lease.folder / "epoch-000000001").write_text(json.dumps(asdict(dead)))
    if not links:
        code = "import os, errno\ndef no(*_): raise OSError(errno.EPERM, 'no hard links')\nos.link = no\n"
        monkeypatch.setattr(sys.modules[__name__], "START", code + START)
    started = starters(tmp_path, gate, processes, rounds)
    try:
        for number in range(rounds):
            (gate / str(number)).touch()
            answers = Counter(one.stdout.readline() for one in started)
            assert answers == {"won\n": 1, "lost\n": processes - 1}, number
    finally:
        for one in started:
            end(one)


def test_take_follows_a_killed_holder_at_once(tmp_path):
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "0").touch()
    (holder,) = starters(tmp_path, gate, 1, 1)
    assert holder.stdout.readline() == "won\n"
    folder = tmp_path / "0" / "lease"
    os.kill(holder.pid, signal.SIGSTOP)  # a stopped process still holds
    with pytest.raises(LockedError, match=str(holder.pid)):
        take(folder)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet waited for
    start = time.monotonic()
    lease = take(folder, stale_s=60)
    assert time.monotonic() - start < 5
    assert read_holder(folder).pid == os.getpid()
    lease.release()
    end(holder)


def test_process_id_given_out_again_is_another_process(tmp_path):
    lease = take(tmp_path / "lease")
    lease.release()
    (lease.folder / "free-000000001").unlink()
    same_id = replace(Holder.me(), started="1")
    (lease.folder / "epoch-000000001").write_text(json.dumps(asdict(same_id)))
    take(tmp_path / "lease").release()


def test_holder_elsewhere_is_alive_as_long_as_its_number_grows(tmp_path):
    folder = tmp_path / "lease"
    strangers(folder)
    stop = threading.Event()

    def live():
        number = 1
        while not stop.wait(0.05):
            number += 1
            (folder / "beat-000000001").write_text(str(number))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(LockedError, match="node7"):
            take(folder, beat_s=0.1, stale_s=10)
    finally:
        stop.set()
        thread.join()
    start = time.monotonic()
    lease = take(folder, beat_s=0.1, stale_s=0.6)
    assert time.monotonic() - start >= 0.6
    assert lease.epoch == 2
    lease.release()


def test_age_is_watched_and_not_read_from_clocks(tmp_path):
    folder = tmp_path / "lease"
    strangers(folder, since="2999-01-01T00:00:00+00:00")
    for path in folder.iterdir():
        os.utime(path, (time.time() + 3600, time.time() + 3600))
    take(folder, beat_s=0.05, stale_s=0.2).release()


@pytest.mark.parametrize("text", ["", "{", '{"host": 1}', "[]"])
def test_holder_that_cannot_be_read_is_watched(tmp_path, text):
    folder = tmp_path / "lease"
    strangers(folder)
    (folder / "epoch-000000001").write_text(text)
    assert read_holder(folder) is None
    take(folder, beat_s=0.05, stale_s=0.2).release()


def test_holder_learns_that_it_was_taken_over(tmp_path):
    folder = tmp_path / "lease"
    first = take(folder, beat_s=0.05)
    assert first.is_held()
    me = replace(Holder.me(), nonce="other")
    (folder / "epoch-000000002").write_text(json.dumps(asdict(me)))
    end_s = time.monotonic() + 10
    while first.is_held() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not first.is_held()
    first.release()
    assert not (folder / "free-000000002").exists()


def test_holder_that_was_stopped_asks_before_it_goes_on(tmp_path):
    folder = tmp_path / "lease"
    lease = take(folder, beat_s=1000, stale_s=0.02)
    (folder / "epoch-000000002").write_text(json.dumps(asdict(Holder.me())))
    time.sleep(0.05)
    assert not lease.is_held()
    lease.release()


def test_a_disk_that_answers_errors_does_not_lose_the_lease(tmp_path, monkeypatch):
    lease = take(tmp_path / "lease", beat_s=0.01, stale_s=0.02)
    broken = OSError(errno.EIO, "input/output error")

    def fail(*_, **__):
        raise broken

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        time.sleep(0.1)
        assert lease.is_held()
    lease.release()


def test_epochs_only_grow_and_older_ones_are_removed(tmp_path):
    folder = tmp_path / "lease"
    for number in range(1, 5):
        lease = take(folder)
        assert lease.epoch == newest_epoch(folder) == number
        lease.release()
    assert sorted(os.listdir(folder)) == ["beat-000000004", "epoch-000000004", "free-000000004"]


def test_holder_whose_folder_was_removed_sees_who_took_the_same_number(tmp_path):
    first = take(tmp_path / "lease", beat_s=0.02)
    shutil.rmtree(tmp_path / "lease")
    time.sleep(0.1)
    assert first.is_held(), "nobody else writes"
    second = take(tmp_path / "lease", beat_s=0.02)
    assert second.epoch == first.epoch
    end = time.monotonic() + 10
    while first.is_held() and time.monotonic() < end:
        time.sleep(0.02)
    assert not first.is_held() and second.is_held()
    first.release()
    second.release()
