"""A tiny run of the real command, small enough to be killed many times."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import load
from seeing import write_job

TINY = """
[job]
name = "tiny"
root = "{root}"

[model]
vocab_size = 272
dim = 32
num_layers = 2
max_tokens = 32
attention = {{ num_heads = 2, num_kv_heads = 1 }}

[data]
max_tokens = 32
workers = 0
cache_dir = "{cache}"
validation_samples = 8
tokenizer = {{ type = "bytes" }}

[[data.sources]]
type = "files"
paths = ["{text}/*.py"]
held_out = 0.3

[train]
steps = {steps}
global_batch = 8
micro_batch = 2
log_every_steps = 1

[optimizer]
type = "adamw"
lr = 1e-2

[schedule]
type = "cosine"
warmup_steps = 2

[eval]
every_steps = 1000

[checkpoint]
every_steps = 3
keep = 2
"""


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Some 200 kB of real Python to learn from."""
    folder = tmp_path_factory.mktemp("text")
    for source in sorted(Path(json.__file__).parent.glob("*.py")) + sorted(
        Path(logging.__file__).parent.glob("*.py")
    ):
        (folder / f"{source.parent.name}_{source.name}").write_text(source.read_text())
    return folder


@pytest.fixture
def seeing(tmp_path):
    """Writes a tiny vision-language job below `tmp_path` and returns its path."""

    def write(steps=8, name="job.toml", root="runs", fusion="joint"):
        return write_job(tmp_path / name, tmp_path / root, tmp_path / "cache", steps, fusion)

    return write


@pytest.fixture
def tiny(tmp_path, text, tmp_path_factory):
    """Writes a tiny job below `tmp_path` and returns its path."""

    def write(steps=12, name="tiny.toml", root=None, extra=""):
        path = tmp_path / name
        cache = tmp_path_factory.getbasetemp() / "cache"
        path.write_text(
            TINY.format(root=root or tmp_path / "runs", cache=cache, text=text, steps=steps) + extra
        )
        return path

    return write


@pytest.fixture
def rows(tmp_path, text):
    """A folder with parquet files of two thousand documents."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "rows"
    folder.mkdir()
    lines = [
        line for file in sorted(text.iterdir()) for line in file.read_text().splitlines() if line.strip()
    ]
    for number in range(8):
        part = [{"text": f"{number}.{n}: {line}"} for n, line in enumerate(lines[number::8][:250])]
        parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{number}.parquet", row_group_size=25)
    return folder


def stream_from(job, source):
    """Have the job of a file stream a source: a folder, or a data set of the hub."""
    said = job.read_text()
    before = said[said.index("[[data.sources]]") : said.index("[train]")]
    stream = f'[[data.sources]]\ntype = "hf"\npath = "{source}"\nstreaming = true\nlanes = 8\n\n'
    job.write_text(said.replace(before, stream))
    return job


def children(pid):
    """The processes that a process has started."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


@pytest.fixture
def stream():
    """Rewrites a job such that it streams a source."""
    return stream_from


class Cli:
    """The real command `forge`, in processes of its own."""

    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}

    def __init__(self, forks, folder):
        self.warm = load(str(Path(__file__).with_name("warm.py"))).command
        self.forks = forks
        self.folder = folder
        self.count = 0

    def command(self, *arguments, ranks=1):
        """The command line for this interpreter, under torchrun when there are several ranks."""
        if ranks == 1:
            return [sys.executable, "-m", "forge_trainer", *map(str, arguments)]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        return [*torchrun, "-m", "forge_trainer", *map(str, arguments)]

    def __call__(self, *arguments, ranks=1, check=True, timeout=240, cwd=None):
        """Run it and return what it printed; one rank starts warm."""
        if ranks == 1:
            done = self._start_warm(list(map(str, arguments)), str(cwd or os.getcwd()))
        else:
            line = self.command(*arguments, ranks=ranks)
            done = subprocess.run(
                line, capture_output=True, text=True, env=self.environment, timeout=timeout, cwd=cwd
            )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *arguments, cwd=None, environment=None):
        """Start it warm, beside others; gives what waits for it."""
        return Warm(self, list(map(str, arguments)), str(cwd or os.getcwd()), environment or {})

    def _start_warm(self, arguments, cwd):
        warm = Warm(self, arguments, cwd, {})
        code, _ = warm.wait()
        return subprocess.CompletedProcess(arguments, code, warm.out.read_text(), warm.err.read_text())

    def stop_at(self, path, step, how, ranks, *extra):
        """Start a run, signal all its processes once it has logged `step`, and return its exit code."""
        metrics = path.parent / "runs" / "tiny" / "metrics.jsonl"
        process = subprocess.Popen(
            self.command("train", path, *extra, ranks=ranks),
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.wait_for_step(metrics, step, process)
        # ranks have sessions of their own: a launcher that is killed leaves them behind, others it tells
        left = children(process.pid) if how == signal.SIGKILL else []
        os.killpg(process.pid, how)
        for rank in left:
            os.kill(rank, how)
        return process.wait(timeout=120)

    @staticmethod
    def wait_for_step(metrics, step, process):
        """Until a step is logged or the process ends; two minutes at most."""
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            if metrics.exists() and any(
                f'"step": {n},' in metrics.read_text() for n in range(step, step + 3)
            ):
                return
            time.sleep(0.01)
        assert process.poll() is not None, f"step {step} was not reached in two minutes"


class Warm:
    """A command in a process that was forked from an interpreter which has imported everything.

    Attributes:
        pid: of the process.
        out: what it prints.
        err: what it says.
    """

    def __init__(self, cli, arguments, cwd, environment):
        cli.count += 1
        self._forks = cli.forks
        self.out, self.err = cli.folder / f"out-{cli.count}", cli.folder / f"err-{cli.count}"
        said = str(self.out), str(self.err)
        self.pid = cli.forks.start(cli.warm, arguments, cli.environment | environment, cwd, *said)

    def wait(self):
        """The exit code, and all that it printed and said."""
        code = self._forks.wait(self.pid)
        return code, self.out.read_text() + self.err.read_text()


@pytest.fixture(scope="module")
def forge(forks, tmp_path_factory):
    """Runs the real command."""
    return Cli(forks, tmp_path_factory.mktemp("forge"))
