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
def streamed(recorded, tmp_path, text):
    """Writes a job that streams parquet files of two thousand documents."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = tmp_path / "rows"
    rows.mkdir()
    lines = [
        line for file in sorted(text.iterdir()) for line in file.read_text().splitlines() if line.strip()
    ]
    for number in range(8):
        part = [{"text": f"{number}.{n}: {line}"} for n, line in enumerate(lines[number::8][:250])]
        parquet.write_table(pyarrow.Table.from_pylist(part), rows / f"{number}.parquet", row_group_size=25)

    def write(name="tiny.toml", **settings):
        path = recorded(name=name, **settings)
        job = path.read_text()
        source = job[job.index("[[data.sources]]") : job.index("[train]")]
        stream = f'[[data.sources]]\ntype = "hf"\npath = "{rows}"\nstreaming = true\nlanes = 8\n\n'
        path.write_text(job.replace(source, stream))
        return path

    return write


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


def wait_for(path, process, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stream_killed_twenty_times_reads_what_an_uninterrupted_run_reads(forge, streamed, tmp_path):
    folder, draw = tmp_path / "seen", random.Random(7)
    folder.mkdir()
    path = streamed(steps=1000000)
    for number in range(20):
        process = start(forge, path, folder / str(number), *EVERY, f"--data.workers={number % 2}")
        if number % 5 == 4:
            time.sleep(draw.uniform(0.2, 5))  # while it starts
        else:
            wait_for(folder / f"{number}-0", process)
            time.sleep(draw.uniform(0, 2.5))
        assert process.poll() is None, process.stderr.read().decode()
        kill(process)
    last = max(read(folder, 20)) + 20
    finish(forge, path, folder / "20", f"--train.steps={last}", "--change")
    killed = read(folder, 21)
    begins = {int(file.read_text().split()[0]) for file in folder.iterdir() if file.stat().st_size}
    assert len(begins) > 7, "kills came before any checkpoint"
    whole = tmp_path / "whole"
    whole.mkdir()
    finish(forge, streamed("whole.toml", steps=last, root=tmp_path / "other"), whole / "0")
    expected = read(whole, 1)
    assert len(expected) == last
    count = Counter(digest for step in range(last) for digest in killed[step])
    assert count == Counter(digest for given in expected.values() for digest in given)
    assert killed == expected


@pytest.mark.slow
@pytest.mark.dist
def test_stream_of_two_ranks_goes_on_with_one_and_four(forge, streamed, tmp_path):
    folder, whole = tmp_path / "seen", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    path = streamed(steps=1000000)
    for number, ranks in enumerate([2, 1, 4]):
        processes = start_ranks(forge, path, folder / str(number), ranks)
        forge.wait_for_step(tmp_path / "runs" / "tiny" / "metrics.jsonl", 8 * number + 8, processes[0])
        ended = [process.stderr.read().decode() for process in processes if process.poll() is not None]
        for process in processes:
            kill(process)
        assert not ended, ended
    last = max(read(folder, 3)) + 5
    finish(forge, path, folder / "3", f"--train.steps={last}", "--change")
    finish(forge, streamed("whole.toml", steps=last, root=tmp_path / "other"), whole / "0")
    assert len(list(folder.glob("0-*"))) == 2 and len(list(folder.glob("2-*"))) == 4
    assert read(folder, 4) == read(whole, 1)


@pytest.mark.slow
@pytest.mark.dist
def test_bestfit_run_killed_on_one_two_and_four_ranks_reads_what_one_rank_reads(forge, recorded, tmp_path):
    folder, whole = tmp_path / "seen", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    path = recorded(steps=1000000)
    path.write_text(path.read_text().replace("[data]", '[data]\npacking = "bestfit"\nmask_documents = true'))
    for number, ranks in enumerate([1, 4, 2]):
        processes = start_ranks(forge, path, folder / str(number), ranks)
        forge.wait_for_step(tmp_path / "runs" / "tiny" / "metrics.jsonl", 8 * number + 8, processes[0])
        ended = [process.stderr.read().decode() for process in processes if process.poll() is not None]
        for process in processes:
            kill(process)
        assert not ended, ended
    last = max(read(folder, 3)) + 5
    finish(forge, path, folder / "3", f"--train.steps={last}", "--change")
    finish(forge, path, whole / "0", f"--train.steps={last}", f"--job.root={tmp_path / 'other'}")
    assert len(list(folder.glob("1-*"))) == 4 and len(list(folder.glob("2-*"))) == 2
    assert read(folder, 4) == read(whole, 1)
