"""Metrics never stop training."""

import json
import logging
import random
import resource
import subprocess
import sys
import time
import types

import pytest
from forge_trainer.track.config import WandbConfig
from forge_trainer.track.console import duration
from forge_trainer.track.jsonl import Jsonl
from forge_trainer.track.steadfast import Steadfast


def written(path, steps=30):
    tracker = Jsonl(path, 0)
    for step in range(1, steps + 1):
        tracker.log({"step": step, "tokens": step * 100, "loss": 3.0 / step})
    tracker.close()
    return path.read_bytes()


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_records_have_the_time(tmp_path):
    before = time.time()
    written(tmp_path / "metrics.jsonl", steps=1)
    assert before - 1 < json.loads((tmp_path / "metrics.jsonl").read_text())["time"] < time.time() + 1


def test_jsonl_survives_any_flipped_bit_and_sets_damaged_lines_aside(tmp_path):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.damaged"
    good = written(path)
    lines = good.splitlines(keepends=True)
    draw = random.Random(0)
    for _ in range(300):
        aside.unlink(missing_ok=True)
        bad = bytearray(good)
        place = draw.randrange(len(bad))
        bad[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        Jsonl(path, 10**9).close()
        kept = path.read_bytes().splitlines(keepends=True)
        set_aside = aside.read_bytes().splitlines(keepends=True) if aside.exists() else []
        # every line that was not hit is kept in its order (a hit newline joins two)
        assert len(lines) - 2 <= len([line for line in kept if line in lines])
        assert sorted(b"".join(kept + set_aside).replace(b"\n", b"")) == sorted(
            bytes(bad).replace(b"\n", b"")
        ), "nothing is lost"
        assert all(type(step) is int for step in steps(path)), "what is kept can be read"


def test_jsonl_drops_what_comes_after_the_step_resumed_from_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(written(path)[:-20])
    Jsonl(path, 12).close()
    assert steps(path) == list(range(1, 13))
    assert (tmp_path / "metrics.jsonl.damaged").exists()


def test_full_disk_is_counted_and_warned_of_once_and_leaves_whole_lines(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    tracker = Steadfast("metrics.jsonl", lambda: Jsonl(path, 0))
    tracker.log({"step": 1, "tokens": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        for step in (2, 3, 4):
            tracker.log({"step": step, "tokens": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len([record for record in caplog.records if "training goes on" in record.message]) == 1
    tracker.log({"step": 5, "tokens": 1})
    tracker.close()
    assert steps(path) == [1, 5]
    assert tracker.lost == 3
    assert "metrics.jsonl did not take 3 records" in caplog.text


def test_tracker_that_cannot_be_opened_or_closed_is_a_warning(tmp_path, caplog):
    absent = Steadfast("metrics.jsonl", lambda: Jsonl(tmp_path / "no" / "such" / "folder", 0))
    absent.log({"step": 1})
    absent.close()
    assert absent.lost == 1 and "cannot be opened" in caplog.text


@pytest.mark.parametrize("breaks", ["log", "finish"])
def test_wandb_lets_nothing_out(tmp_path, monkeypatch, caplog, breaks):
    def fail(*_, **__):
        raise RuntimeError("the service is gone")

    calls = {"log": lambda *_, **__: None, "finish": lambda: None, "define_metric": lambda *_, **__: None}
    calls |= {breaks: fail}
    module = types.SimpleNamespace(init=lambda **_: types.SimpleNamespace(**calls), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    from forge_trainer.track.wandb import Wandb

    tracker = Wandb(WandbConfig(), tmp_path, "a_run", {})
    with caplog.at_level(logging.WARNING):
        tracker.log({"step": 1, "loss": 1.0})
        tracker.log({"step": 2, "loss": 1.0})
        tracker.close()
    assert caplog.text.count("the service is gone") == 1


def test_wandb_tells_runs_of_one_name_apart_and_a_continued_one_keeps_its_id(tmp_path, monkeypatch):
    ids = []

    def init(**given):
        ids.append(given["id"])
        return types.SimpleNamespace(define_metric=lambda *_, **__: None, step=0)

    module = types.SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    from forge_trainer.track.wandb import Wandb

    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        Wandb(WandbConfig(mode="offline"), tmp_path / place, "a_run", {})
    (tmp_path / "here").rename(tmp_path / "moved")
    Wandb(WandbConfig(mode="offline"), tmp_path / "moved", "a_run", {})
    first, other, continued = ids
    assert first.startswith("a_run-") and first == continued != other


class Service:
    """A run of W&B as its service keeps it: what is given for a step before the last one is dropped."""

    def __init__(self):
        self.kept, self.last, self.axes = [], -1, {}

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, record, step=None):
        step = self.last + 1 if step is None else step
        if step >= self.last:
            self.last = step
            self.kept.append((record[self.axes["*"]], record["loss"]))

    def finish(self):
        pass


def test_wandb_keeps_the_records_of_a_run_that_went_back(tmp_path, monkeypatch):
    service = Service()
    module = types.SimpleNamespace(init=lambda **_: service, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    from forge_trainer.track.wandb import Wandb

    told = [(1, 3.0), (2, 2.0), (3, 1.0), (2, 5.0), (3, 4.0)]
    tracker = Wandb(WandbConfig(), tmp_path, "a_run", {})
    for step, loss in told:
        tracker.log({"step": step, "loss": loss})
    tracker.close()
    assert service.kept == told


PART = """
import sys
from pathlib import Path
from forge_trainer.track.config import WandbConfig
from forge_trainer.track.wandb import Wandb
config = WandbConfig(mode="offline", name="mine", group="sweep", tags=("a", "b"), notes="why")
tracker = Wandb(config, Path(sys.argv[1]), "a_run", {})
for step in map(int, sys.argv[2].split(",")):
    tracker.log({"step": step, "loss": 1.0})
tracker.close()
"""


def logged(raw):
    """The records of a log of LevelDB behind a head of 7 bytes, each of which may be in parts."""
    at, whole = 7, b""
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:  # a head never stands across blocks
            at += 32768 - at % 32768
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        whole, at = whole + raw[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.slow
def test_parts_of_a_run_that_wandb_keeps_offline_go_on_counting(tmp_path):
    """What `wandb sync` would send, read from its own files."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for steps in ("10, 20", "20, 30"):
        subprocess.run([sys.executable, "-c", PART, tmp_path, steps], check=True)
    found, named = [], []
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        counted = []
        for raw in logged(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(raw)
            counted += [record.history.step.num] if record.HasField("history") else []
            if record.HasField("run"):
                run = record.run
                named.append((run.display_name, run.run_group, sorted(run.tags), run.notes))
        found.append(counted)
    assert found == [[10, 20], [20, 30]]
    assert named[0] == ("mine", "sweep", ["a", "b"], "why")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 0 s"), (4000, "1 h 6 min"), (200000, "2 d 7 h")]
)
def test_duration_has_two_units(seconds, text):
    assert duration(seconds) == text


def test_wandb_id_that_cannot_be_kept_is_a_warning(tmp_path, caplog):
    from forge_trainer.track.wandb import _id

    assert _id(tmp_path / "gone", "tiny").startswith("tiny-")
    assert "cannot be kept" in caplog.text
