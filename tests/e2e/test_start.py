"""Starting a run: one at a time, a failed start leaves no trace, a run goes on with what may change."""

import hashlib
import json
import os
import signal
import subprocess
from collections import Counter

import pytest
from forge_ckpt.lease import read_holder
from forge_ckpt.store import Store


def tree(folder):
    """Every file below a folder by its content; but for what shows that the holder lives."""
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("beat-")
    }


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run):
    return [(row["step"], row["loss"]) for row in rows(run) if "loss" in row]


def test_second_start_is_refused_and_touches_nothing(forge, tiny, tmp_path):
    path = tiny(steps=100000)
    run = tmp_path / "runs" / "tiny"
    first = subprocess.Popen(forge.command("train", path), env=forge.environment, stdout=subprocess.DEVNULL)
    try:
        forge.wait_for_step(run / "metrics.jsonl", 5, first)
        first.send_signal(signal.SIGSTOP)  # so that what changes, the second start changed
        (run / "checkpoints" / ".tmp-000000099-other").mkdir()
        before = tree(tmp_path / "runs")
        done = forge("train", path, "--train.log_every_steps=2", check=False)
        assert done.returncode == 75
        assert f"process {first.pid} on {os.uname().nodename} since 20" in done.stderr
        assert "Traceback" not in done.stderr
        assert tree(tmp_path / "runs") == before
        assert (run / "checkpoints" / ".tmp-000000099-other").exists()
    finally:
        first.kill()
        first.wait()
    forge("train", path, "--train.steps=20", "--change")  # at once after a kill


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_starts_at_once_one_wins_and_the_run_is_as_if_alone(forge, tiny, tmp_path, ranks):
    forge("train", tiny(steps=12, name="whole.toml", root=tmp_path / "whole"), ranks=ranks)
    path = tiny(steps=12)
    for number in range(3):
        name = f"--job.name=race{number}"
        started = [
            subprocess.Popen(
                forge.command("train", path, name, ranks=ranks),
                env=forge.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        said = [one.communicate(timeout=240)[1] for one in started]
        won = [one.returncode == 0 for one in started]
        # one that starts when another is done already finds a complete run, and does nothing
        assert any(won)
        lost = [text for text, one in zip(said, started, strict=True) if one.returncode]
        assert all("is being written by process" in text for text in lost)
        if ranks == 1:
            assert Counter(one.returncode for one in started).keys() <= {0, 75}
        run = tmp_path / "runs" / f"race{number}"
        assert curve(run) == curve(tmp_path / "whole" / "tiny")
        for step in Store(run / "checkpoints").steps():
            Store(run / "checkpoints").verify(step)


def test_failed_first_start_does_not_bind(forge, tiny, tmp_path):
    path = tiny(steps=3)
    good = path.read_text()
    path.write_text(good.replace("/*.py", "/*.nothing"))
    assert forge("train", path, check=False).returncode == 78
    assert json.loads((tmp_path / "runs" / "tiny" / "exit.json").read_text())["code"] == 78
    path.write_text(good)
    forge("train", path, "--model.dim=16")
    refused = forge("train", path, check=False)
    assert refused.returncode == 78 and "model.dim: the run has 16, now given 32" in refused.stderr


def test_run_is_extended_as_a_recorded_event(forge, tiny, tmp_path):
    path = tiny(steps=6)
    forge("train", path)
    run = tmp_path / "runs" / "tiny"
    longer = path, "--train.steps=9", "--optimizer.lr=0.005", "--data.validation_samples=4"
    refused = forge("train", *longer, check=False)
    assert refused.returncode == 78
    assert "train.steps: the run has 6, now given 9; --change allows and records this" in refused.stderr
    assert "validation_samples" not in refused.stderr
    assert not (run / "history.jsonl").exists()
    first = curve(run)
    forge("train", *longer, "--change")
    assert curve(run)[:6] == first and [step for step, _ in curve(run)] == list(range(1, 10))
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [(e["step"], e["key"], e["old"], e["new"]) for e in events] == [
        (6, "optimizer.lr", 0.01, 0.005),
        (6, "train.steps", 6, 9),
    ]
    assert all(event["when"].startswith("20") for event in events)
    assert max(row["lr"] for row in rows(run) if row["step"] > 6 and "lr" in row) <= 0.005
    never = forge("train", *longer, "--model.dim=64", "--change", check=False)
    assert never.returncode == 78 and "model.dim" in never.stderr
    forge("train", *longer)  # complete, and the same command without --change is that of the run now
    assert "begins" not in forge("status", run).stdout


def test_run_tells_how_it_ended(forge, tiny, tmp_path):
    path = tiny(steps=100000)
    run = tmp_path / "runs" / "tiny"
    assert forge.stop_at(path, 3, signal.SIGTERM, 1) == 85
    ended = json.loads((run / "exit.json").read_text())
    assert (ended["code"], ended["name"], ended["host"]) == (85, "preempted", os.uname().nodename)
    assert ended["step"] == Store(run / "checkpoints").steps()[-1]
    assert read_holder(run / "lease") is None
    assert forge.stop_at(path, ended["step"] + 3, signal.SIGKILL, 1) == -9
    assert not (run / "exit.json").exists()


def test_run_goes_on_when_nothing_can_be_told(forge, tiny, tmp_path):
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            forge.command("train", tiny(steps=3)), env=forge.environment, stdout=full, stderr=full
        )
        try:
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
            process.wait()
    assert Store(tmp_path / "runs" / "tiny" / "checkpoints").steps() == [3]
