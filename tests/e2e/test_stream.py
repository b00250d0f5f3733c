"""Runs read the same, stream or packing, whatever kills them and on any number of ranks."""

import os
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from contextlib import suppress

import pytest
from local_hub import LocalHub

RECORDER = '''
"""Writes down which sequences each step is given, before it is taken."""

import os
import xxhash
from forge_trainer.steps import TextStepConfig, steps


@steps.register("recorded")
class RecordedConfig(TextStepConfig):
    def build(self, parts, loss_fn, mesh, **settings):
        built = super().build(parts, loss_fn, mesh, **settings)
        train = built.train

        def recorded(batch, step):
            rows = [row for micro in batch for row in micro.inputs["tokens"].numpy()]
            seen = [xxhash.xxh3_64_hexdigest(row.tobytes()) for row in rows]
            with open(f"{os.environ['RECORD']}-{mesh.batch.rank}", "a") as file:
                file.write(f"{step} {' '.join(seen)}\\n")
            return train(batch, step)

        built.train = recorded
        return built
'''


@pytest.fixture
def recorded(tiny, tmp_path):
    """Writes a job whose step records."""
    (tmp_path / "recorder.py").write_text(RECORDER)

    def write(**settings):
        path = tiny(extra='\n[step]\ntype = "recorded"\n', **settings)
        path.write_text('imports = ["recorder"]\n' + path.read_text())
        return path

    return write


@pytest.fixture
def streamed(recorded, rows, stream):
    """Writes a job that streams parquet files."""

    def write(name="tiny.toml", source=rows, **settings):
        return stream(recorded(name=name, **settings), source)

    return write


@pytest.fixture
def hub(rows, tmp_path, monkeypatch, forge):
    """A hub of this machine that has the parquet files as `some/set`."""
    pytest.importorskip("datasets")
    served = LocalHub()
    served.commit("some/set", rows)
    monkeypatch.setitem(forge.environment, "HF_ENDPOINT", served.endpoint)
    monkeypatch.setitem(forge.environment, "HF_HOME", str(tmp_path / "hf"))
    yield served
    served.close()


EVERY = ["--checkpoint.every_steps=1", "--checkpoint.asynchronous=false"]


def read(folder, starts):
    """What each step was given at last, by step: [sequences of the global batch]."""
    steps = {}
    for start in range(starts):
        ranks = [file.read_text().splitlines() for file in sorted(folder.glob(f"{start}-*"))]
        for lines in zip(*ranks, strict=False):
            words = [line.split() for line in lines]
            assert len({one[0] for one in words}) == 1
            given = [digest for one in words for digest in one[1:]]
            if len(given) == 8:  # else the process was killed while it wrote
                steps[int(words[0][0])] = given
    return steps


def start(forge, path, record, *extra, **environment):
    return subprocess.Popen(
        forge.command("train", path, *extra),
        env=forge.environment | {"RECORD": str(record)} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def start_ranks(forge, path, record, ranks):
    """Ranks without a launcher around them, so that a kill reaches all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    named = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
    return [start(forge, path, record, *EVERY, WORLD_SIZE=str(ranks), **place, **one) for one in named]


def finish(forge, path, record, *extra):
    process = start(forge, path, record, *extra)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said.decode()


def kill(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


def wait_for(path, process, steps=1, limit_s=120.0):
    """Until so many steps were begun: with one more than one, there is a checkpoint of this start."""
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end:
        if path.exists() and path.read_text().count("\n") >= steps:
            return
        time.sleep(0.01)


def kill_at_random(forge, path, folder, times, draw):
    """Start a run and kill it, so many times: sometimes while it starts, mostly while it trains."""
    for number in range(times):
        process = start(forge, path, folder / str(number), *EVERY, f"--data.workers={number % 2}")
        if number % 5 == 4:
            time.sleep(draw.uniform(0.2, 5))  # while it starts
        else:
            wait_for(folder / f"{number}-0", process, steps=draw.randint(1, 4))
            time.sleep(draw.uniform(0, 2.5))
        assert process.poll() is None, process.stderr.read().decode()
        kill(process)


def kill_on(forge, path, folder, ranks_of_starts):
    """Start a run on some ranks, then on others, each killed after some steps."""
    metrics = path.parent / "runs" / "tiny" / "metrics.jsonl"
    for number, ranks in enumerate(ranks_of_starts):
        processes = start_ranks(forge, path, folder / str(number), ranks)
        forge.wait_for_step(metrics, 8 * number + 8, processes[0])
        ended = [process.stderr.read().decode() for process in processes if process.poll() is not None]
        for process in processes:
            kill(process)
        assert not ended, ended
        assert len(list(folder.glob(f"{number}-*"))) == ranks


def finished(forge, path, folder, starts, whole):
    """What a run that was started so often has read, finished; and what one in one piece has read."""
    last = max(read(folder, starts)) + 20
    finish(forge, path, folder / str(starts), f"--train.steps={last}", "--change")
    finish(forge, path, whole / "0", f"--train.steps={last}", f"--job.root={whole / 'runs'}")
    killed, expected = read(folder, starts + 1), read(whole, 1)
    assert len(expected) == last
    return killed, expected


@pytest.fixture
def folders(tmp_path):
    """Two, for what a run that is killed and one that is not have read."""
    for name in ("seen", "whole"):
        (tmp_path / name).mkdir()
    return tmp_path / "seen", tmp_path / "whole"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stream_killed_twenty_times_reads_what_an_uninterrupted_run_reads(forge, streamed, folders):
    folder, whole = folders
    path = streamed(steps=1000000)
    kill_at_random(forge, path, folder, 20, random.Random(7))
    killed, expected = finished(forge, path, folder, 20, whole)
    begins = {int(file.read_text().split()[0]) for file in folder.iterdir() if file.stat().st_size}
    assert len(begins) > 7, "kills came before any checkpoint"
    count = Counter(digest for step in expected for digest in killed[step])
    assert count == Counter(digest for given in expected.values() for digest in given)
    assert killed == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stream_of_a_hub_that_fails_and_moves_on_reads_what_its_files_read(
    forge, streamed, hub, rows, folders
):
    """Killed seven times, while connections break and another commit becomes the main branch."""
    folder, whole = folders
    draw = random.Random(3)
    hub.drop = lambda *_: draw.random() < 0.05
    path = streamed(steps=1000000, source="some/set")
    first = start(forge, path, folder / "0", *EVERY)
    wait_for(folder / "0-0", first, steps=3)
    kill(first)
    (rows / "9.parquet").write_bytes((rows / "0.parquet").read_bytes())
    hub.commit("some/set", rows)
    (rows / "9.parquet").unlink()
    for number in range(1, 7):
        process = start(forge, path, folder / str(number), *EVERY, f"--data.workers={number % 2}")
        wait_for(folder / f"{number}-0", process)
        time.sleep(draw.uniform(0, 1.5))
        assert process.poll() is None, process.stderr.read().decode()
        kill(process)
    last = max(read(folder, 7)) + 5
    finish(forge, path, folder / "7", f"--train.steps={last}", "--change")
    local = streamed("whole.toml", source=rows, steps=last, root=whole / "runs")
    finish(forge, local, whole / "0")
    assert read(folder, 8) == read(whole, 1)


@pytest.mark.slow
@pytest.mark.dist
def test_stream_of_two_ranks_goes_on_with_one_and_four(forge, streamed, folders):
    folder, whole = folders
    path = streamed(steps=1000000)
    kill_on(forge, path, folder, [2, 1, 4])
    killed, expected = finished(forge, path, folder, 3, whole)
    assert killed == expected


@pytest.mark.slow
@pytest.mark.dist
def test_bestfit_run_killed_on_one_two_and_four_ranks_reads_what_one_rank_reads(forge, recorded, folders):
    folder, whole = folders
    path = recorded(steps=1000000)
    path.write_text(path.read_text().replace("[data]", '[data]\npacking = "bestfit"\nmask_documents = true'))
    kill_on(forge, path, folder, [1, 4, 2])
    killed, expected = finished(forge, path, folder, 3, whole)
    assert killed == expected
