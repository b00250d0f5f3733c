"""Runs on a real SLURM: preempted, killed, cancelled, failing, in chains and arrays."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm, missing
from runs import losses, state

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 400
"""Enough that a preemption comes before the end."""
CLUSTER = """
[cluster]
gpus_per_node = 0
ranks_per_node = 1
cpus_per_rank = 1
time = "{time}"
partition = "{partition}"
again = "{again}"
warning_s = 10
container = {container}
setup = ["export OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1"]
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    with PrivateSlurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs" / "tiny"


@pytest.fixture
def launch(slurm, tmp_path):
    """Submits a job."""

    def submit(
        job: Path, *flags, time="00:10:00", partition="low", again="requeue", container=(), nodes=2
    ) -> None:
        cluster = tmp_path / "cluster.toml"
        cluster.write_text(
            CLUSTER.format(time=time, partition=partition, again=again, container=json.dumps(container))
        )
        forge = (sys.executable, "-m", "forge_trainer", "launch")
        slurm(*forge, job, "--cluster", cluster, f"--nodes={nodes}", *flags)

    return submit


@pytest.fixture
def whole(forge, tiny, tmp_path):
    """A run on two ranks that nothing happens to."""
    forge("train", tiny(steps=STEPS, name="whole.toml", root=tmp_path / "whole"), ranks=2)
    return tmp_path / "whole" / "tiny"


def reached(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


def starts(run: Path) -> list[dict]:
    path = run / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def log(run: Path) -> str:
    return "\n".join(path.read_text() for path in (run.parent / "slurm").glob("*.log"))


def same(run: Path, other: Path) -> bool:
    return state(run) == state(other) and losses(run) == losses(other)


@pytest.mark.parametrize("partition", ["low", "grace"])
def test_preempted_run_ends_bit_identical(slurm, tiny, run, launch, whole, partition):
    launch(tiny(steps=STEPS), partition=partition)
    slurm.wait(lambda: reached(run) >= 10, 180)
    slurm("sbatch", "-p", "high", "-N2", "--wrap", "srun sleep 2", "-o", "/dev/null")
    slurm.wait_until_empty(400)
    assert same(run, whole), log(run)
    assert starts(run)[-1]["code"] == 0 and starts(run)[-1]["restart"] == "1"


def test_run_with_a_killed_rank_goes_on_and_ends_bit_identical(slurm, tiny, run, launch, whole):
    launch(tiny(steps=STEPS))
    slurm.wait(lambda: reached(run) >= 10, 180)
    os.kill(a_rank(run), signal.SIGKILL)
    slurm.wait_until_empty(400)
    assert same(run, whole), log(run)
    assert [start["failed"] for start in starts(run)] == [True, False]


def a_rank(run: Path, word: bytes = b"train") -> int:
    """A process that trains in this directory, and has a word in its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "cmdline").exists():
            words = (folder / "cmdline").read_bytes().split(b"\0")
            job = str(run.parent.parent / "tiny.toml").encode()
            if {b"train", job, word} <= {*words} and b"python" in words[0]:
                return int(folder.name)
    raise AssertionError("no rank")


APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Each node has process ids of its own: from one it cannot be told whether a process of the other lives."""

ONE_FAILS = ["sh", "-c", '[ "$SLURM_PROCID" = 0 ] || exec sleep 60; sleep 2; exit 1']
"""Rank 0 fails, while the others go on."""


def test_lost_node_is_followed_and_its_orphan_leaves(slurm, forge, tiny, tmp_path, run, launch):
    forge("train", tiny(steps=STEPS, name="whole.toml", root=tmp_path / "whole"))
    launch(tiny(steps=STEPS), nodes=1, container=APART)
    slurm.wait(lambda: reached(run) >= 10, 180)
    orphan, node = a_rank(run), slurm("squeue", "-h", "-o", "%N").strip()
    os.kill(orphan, signal.SIGSTOP)
    slurm.lose(node)
    begin = reached(run)
    try:
        slurm.wait(lambda: reached(run) > begin + 30, 300)  # on the other node, once the lease is old
        os.kill(orphan, signal.SIGCONT)
        slurm.wait_until_empty(400)
        slurm.wait(lambda: not Path(f"/proc/{orphan}").exists(), 60)  # its words go to an srun that is gone
    finally:
        slurm.bring_back(node)
    assert same(run, tmp_path / "whole" / "tiny"), log(run)
    assert starts(run)[-1]["code"] == 0 and starts(run)[-1]["nodes"] != node
    slurm.wait(lambda: slurm("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D").strip() == "2", 60)


def test_time_limit_puts_the_run_back_and_scancel_ends_it(slurm, tiny, run, launch):
    launch(tiny(steps=100_000), time="00:02:00")
    slurm.wait(lambda: len(starts(run)) == 1, 240)
    assert starts(run)[0]["code"] == 85 and starts(run)[0]["step"] > 0
    first = starts(run)[0]["step"]
    slurm.wait(lambda: reached(run) > first, 180)
    slurm("scancel", "--name=tiny")
    slurm.wait_until_empty(120)


@pytest.mark.parametrize(("container", "nodes", "code"), [(["false"], 1, 1), (ONE_FAILS, 2, 143)])
def test_failing_again_and_again_ends(slurm, tiny, run, launch, container, nodes, code):
    """The code is the highest of all ranks: of two, the one that srun has ended because the other failed."""
    launch(tiny(), container=container, nodes=nodes)
    slurm.wait_until_empty(200)
    assert [start["code"] for start in starts(run)] == [code] * 3 and all(s["failed"] for s in starts(run))
    assert "3 starts failed without a new checkpoint; the job does not run again" in log(run)


def test_chain_goes_on_until_the_run_is_complete(slurm, tiny, run, launch):
    launch(tiny(steps=STEPS), "--resilience.max_runtime_s=25", "--resilience.save_margin_s=1", again="chain")
    slurm.wait_until_empty(600)
    codes = [start["code"] for start in starts(run)]
    assert codes[-1] == 0 and set(codes[:-1]) <= {85} and len({s["job"] for s in starts(run)}) == len(codes)


def test_cancelled_link_ends_the_chain(slurm, tiny, run, launch):
    launch(tiny(steps=100000), again="chain")
    slurm.wait(lambda: reached(run) >= 5, 180)
    slurm("scancel", slurm("squeue", "-h", "-t", "R", "-o", "%i").strip())
    slurm.wait_until_empty(200)
    jobs = {start["job"] for start in starts(run)}
    assert len(jobs) == 1, log(run)


def test_sweeps_are_an_array_of_runs(slurm, tiny, run, launch):
    launch(tiny(), "--sweep=optimizer.lr=1e-3,2e-3", "--sweep=job.seed=0,1")
    slurm.wait_until_empty(400)
    runs = [run.with_name(f"tiny-{index}") for index in range(4)]
    assert [starts(one)[-1]["code"] for one in runs] == [0] * 4
    first = [losses(one)[0] for one in runs]
    assert first[0] == first[2] != first[1] == first[3]  # the seed, which changes fastest
    assert losses(runs[0]) != losses(runs[2])


def test_run_of_a_sweep_that_is_killed_starts_no_other_again(slurm, tiny, run, launch):
    launch(tiny(steps=STEPS), "--sweep=job.seed=0,1", nodes=1)
    first, last = (run.with_name(f"tiny-{index}") for index in range(2))
    slurm.wait(lambda: reached(last) >= 10 and reached(first) >= 10, 180)
    os.kill(a_rank(run, b"--job.name=tiny-1"), signal.SIGKILL)  # its job has the number of the array
    slurm.wait_until_empty(400)
    assert [start["failed"] for start in starts(last)] == [True, False], log(run)
    assert [(start["code"], start["restart"]) for start in starts(first)] == [(0, "0")], log(run)
