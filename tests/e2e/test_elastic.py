"""torchrun restarts the ranks of a run, with as many or with another number of nodes: the stream goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from runs import losses, records, state

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(900)]


@contextmanager
def torchrun(forge, path, *options, environment=None):
    """An agent with its ranks; none outlives the test."""
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        "forge_trainer",
        "train",
        str(path),
    ]
    process = subprocess.Popen(line, env=forge.environment | (environment or {}), start_new_session=True)
    try:
        yield process
    finally:
        for pid in [*ranks_of(process), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def ranks_of(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def wait_for(holds, seconds=240):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def reached(run, step):
    path = run / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def test_killed_ranks_are_restarted_in_place_and_the_run_ends_bit_identical(forge, tiny, tmp_path):
    """With one store for all restarts, some found addresses of ranks that were gone."""
    forge("train", tiny(steps=260, name="whole.toml", root=tmp_path / "whole"), ranks=2)
    path, run = tiny(steps=260), tmp_path / "runs" / "tiny"
    with torchrun(forge, path, "--standalone", "--nproc-per-node=2", "--max-restarts=3") as process:
        for nth, step in enumerate((40, 120, 200)):
            wait_for(lambda step=step: reached(run, step) or process.poll() is not None)
            assert process.poll() is None, "the agent gave up"
            os.kill(ranks_of(process)[nth % 2], signal.SIGKILL)
        assert process.wait(timeout=400) == 0
    assert state(run) == state(tmp_path / "whole" / "tiny")
    assert losses(run) == losses(tmp_path / "whole" / "tiny")
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert len({line["stretch"] for line in lines}) == 4


def test_nodes_that_come_and_go_continue_the_stream(forge, tiny, tmp_path):
    forge("train", tiny(steps=400, name="whole.toml", root=tmp_path / "whole"))
    path, run = tiny(steps=400), tmp_path / "runs" / "tiny"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = (
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic",
        "--rdzv-conf=last_call_timeout=3",
    )
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def ranks_used():
        return {len(list(step.glob("rank-*.bin"))) for step in (run / "checkpoints").glob("step-*")}

    with ExitStack() as stack:
        first = stack.enter_context(torchrun(forge, path, *options, environment=apart))
        wait_for(lambda: reached(run, 40))
        second = stack.enter_context(torchrun(forge, path, *options, environment=apart))
        wait_for(lambda: 2 in ranks_used() or first.poll() is not None)
        for pid in [second.pid, *ranks_of(second)]:
            os.kill(pid, signal.SIGKILL)
        assert first.wait(timeout=400) == 0
    whole = tmp_path / "whole" / "tiny"
    assert [r["step"] for r in records(run) if "loss" in r] == list(range(1, 401))
    assert losses(run) == pytest.approx(losses(whole), rel=2e-3)
    assert [r["tokens"] for r in records(run) if "loss" in r] == [
        r["tokens"] for r in records(whole) if "loss" in r
    ]
