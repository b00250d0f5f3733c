"""A run whose console is closed, or is read by nobody, trains as any other."""

import fcntl
import os
import subprocess
from contextlib import ExitStack

import pytest
from runs import losses


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_run_ends_well_when_a_stream_is_closed(forge, tiny, tmp_path, closed):
    line = ["bash", "-c", f'exec "$@" {closed}', "bash", *forge.command("train", tiny(steps=3))]
    done = subprocess.run(line, env=forge.environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "runs" / "tiny")) == 3


@pytest.fixture
def full_pipe():
    """The writing end of a pipe that is full, and that nobody reads: a pager that stands still."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, b"." * 4096)
    yield write
    os.close(read)
    os.close(write)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_ends_well_when_nobody_reads_what_it_prints(forge, tiny, tmp_path, full_pipe, ranks):
    line = forge.command("train", tiny(steps=6))
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    several = port | {"WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    with ExitStack() as stack:
        started = []
        for rank in range(ranks):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if several else {}
            environment = forge.environment | several | numbers
            process = subprocess.Popen(line, env=environment, stdout=full_pipe, stderr=full_pipe)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        assert [process.wait(timeout=60) for process in started] == [0] * ranks
    assert len(losses(tmp_path / "runs" / "tiny")) == 6


def test_traceback_of_a_run_is_printed_and_its_exit_code_is_that_of_a_failure(forge, tiny):
    hook = '\n[hooks.fails]\ntype = "class"\npath = "failing_hook:Fails"\n'
    (tiny(extra=hook).parent / "failing_hook.py").write_text(
        "from forge_trainer.hooks.base import Hook\n\n\nclass Fails(Hook):\n"
        "    def __init__(self, run):\n        pass\n\n"
        "    def on_start(self, *_):\n        raise RuntimeError('on purpose')\n"
    )
    line = forge.command("train", tiny(extra=hook))
    done = subprocess.run(line, env=forge.environment, timeout=100, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "RuntimeError: on purpose" in done.stderr
