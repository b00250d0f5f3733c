"""A tiny run of the real command, small enough to be killed many times."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from forks import Forks
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


def places(ranks):
    """The variables by which each rank finds the others, as torchrun sets them."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return [
        {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        for rank in range(ranks)
    ]


class Cli:
    """The real command `forge`, in processes of its own."""

    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    warm = str(Path(__file__).with_name("warm.py")), "command"

    def __init__(self, forks, folder):
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

    def __call__(self, *arguments, ranks=1, check=True, cwd=None):
        """Run it and return what it printed; every rank starts warm."""
        started = [self.start(*arguments, cwd=cwd, environment=place) for place in places(ranks)]
        codes = [rank.wait()[0] for rank in started]
        out, err = ("".join(getattr(rank, name).read_text() for rank in started) for name in ("out", "err"))
        code = next((code for code in codes if code), 0)
        if check:
            assert code == 0, out + err
        return subprocess.CompletedProcess(arguments, code, out, err)

    def start(self, *arguments, cwd=None, environment=None):
        """Start it warm, beside others; gives what waits for it."""
        return Warm(self, list(map(str, arguments)), str(cwd or os.getcwd()), environment or {})

    def stop_at(self, path, step, how, ranks, *extra, torchrun=False):
        """Start a run, signal all its processes once it has logged `step`, and return its exit code."""
        metrics = path.parent / "runs" / "tiny" / "metrics.jsonl"
        if not torchrun:
            started = [self.start("train", path, *extra, environment=place) for place in places(ranks)]
            self.wait_for_step(metrics, step, started[0])
            for pid in [pid for rank in started for pid in (rank.pid, *children(rank.pid))]:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
            codes = [rank.wait()[0] for rank in started]
            return codes[0]
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
        self.pid = cli.forks.start_in(*cli.warm, arguments, cli.environment | environment, cwd, *said)

    def poll(self):
        """None as long as it runs, like `subprocess.Popen.poll`."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return 0
        return 0 if state == "Z" else None

    def wait(self):
        """The exit code, and all that it printed and said."""
        code = self._forks.wait(self.pid)
        return code, self.out.read_text() + self.err.read_text()


@pytest.fixture(scope="session")
def forge(tmp_path_factory):
    """Runs the real command; one interpreter that has imported it serves all tests of a worker."""
    forks = Forks()
    yield Cli(forks, tmp_path_factory.mktemp("forge"))
    forks.close()
