"""A tiny run of the real command, small enough to be killed many times."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TINY = """
[job]
name = "tiny"
root = "{root}"

[model]
vocab_size = 272
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
max_tokens = 32

[data]
max_tokens = 32
workers = 0
cache_dir = "{cache}"
validation_samples = 8
tokenizer = {{ type = "bytes" }}

[[data.sources]]
type = "files"
paths = ["{text}/*.py"]

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
    """Some 60 kB of real Python to learn from."""
    import json.decoder
    import textwrap as textwrap_module

    folder = tmp_path_factory.mktemp("text")
    for module in (json.decoder, textwrap_module, subprocess):
        source = Path(module.__file__)
        (folder / source.name).write_text(source.read_text())
    return folder


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


def command(*arguments, ranks=1):
    """The command line of `forge` for this interpreter, under torchrun when there are several ranks."""
    if ranks == 1:
        return [sys.executable, "-m", "forge_trainer", *map(str, arguments)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "-m", "forge_trainer", *map(str, arguments)]


def forge(*arguments, ranks=1, cwd=None, check=True, timeout=240):
    """Run the real command and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(
        command(*arguments, ranks=ranks),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=timeout,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done
