"""Text that is tokenized at the start of a run: by several processes, killed, and gone on with."""

import json
import os
import random
import signal
import subprocess
import time

import pytest


@pytest.fixture
def corpus(tmp_path, text):
    """Some 60 MB of rows in four files."""
    said = [file.read_text() for file in sorted(text.iterdir())]
    (tmp_path / "corpus").mkdir()
    for number in range(4):
        with (tmp_path / "corpus" / f"{number}.jsonl").open("w") as file:
            for copy in range(70):
                file.writelines(json.dumps({"text": f"{number}.{copy} {one}"}) + "\n" for one in said)
    return tmp_path / "corpus"


@pytest.fixture
def job(tiny, corpus, text):
    def write(name, cache):
        path = tiny(steps=4, name=name, root=cache / "runs")
        lines = path.read_text().replace(f'"{text}/*.py"', f'"{corpus}/*.jsonl"').splitlines()
        lines = [f'cache_dir = "{cache}"' if line.startswith("cache_dir") else line for line in lines]
        path.write_text("\n".join(lines).replace("held_out = 0.3", "held_out = 0.01"))
        return path

    return write


def stores(cache):
    """The bytes of all files of the stores of a cache, by store and name."""
    folders = [folder for folder in (cache / "tokens").iterdir() if folder.is_dir()]
    assert not [folder.name for folder in folders if folder.name.startswith(".")]
    return {(folder.name, file.name): file.read_bytes() for folder in folders for file in folder.iterdir()}


def processes_with(word):
    """Processes whose environment holds a word."""
    found = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found += [int(pid)] * (word.encode() in file.read())
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)  # five starts of two ranks: 160 s at a load of 26, twice that beside other tests
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_run_killed_while_it_tokenizes_goes_on_to_the_same_stores(forge, job, tmp_path, how):
    whole, cache, draw = tmp_path / "whole", tmp_path / "cache", random.Random(1)
    forge("train", job("whole.toml", whole), "--data.tokenize_workers=1")
    path, word = job("tiny.toml", cache), f"FORGE_MARK={tmp_path}"
    environment = forge.environment | dict([word.split("=", 1)])
    line = [*forge.command("train", path, ranks=2), "--data.tokenize_workers=2"]
    said = ""
    for _ in range(3):
        process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 60
        while not list(cache.glob("tokens/.*.partial")) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.5))
        assert process.poll() is None
        ours = processes_with(word)
        for pid in ours if how == signal.SIGKILL else [process.pid]:
            os.kill(pid, how)
        said += process.communicate(timeout=60)[1]
        end = time.monotonic() + 20
        while (left := processes_with(word)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left and process.returncode != 0
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "waiting: the text of a source is tokenized by another process" in said + done.stderr
    assert stores(cache) == stores(whole)
    assert "perhaps for want of memory" not in said
