"""The batch script of a run, and what follows the end of a job; SLURM is played by scripts."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from forge_ckpt import Snapshot, Store
from forge_ckpt.lease import Holder
from forge_config import ConfigError
from forge_trainer.cli import main
from forge_trainer.run_dir.files import RunFiles
from forge_trainer.slurm.config import ClusterConfig, load_cluster
from forge_trainer.slurm.warning import warning_of

ROOT = Path(__file__).parents[3]
RUN = str(ROOT / "configs/runs/debug.toml")
CLUSTERS = sorted(ROOT.glob("configs/clusters/*.toml"))


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A SLURM that notes its calls; the state of the job is what the file says."""
    bin_folder, calls, state = tmp_path / "bin", tmp_path / "calls", tmp_path / "state"
    bin_folder.mkdir()
    state.write_text("JobState=RUNNING BatchFlag=1\n")
    for name in ("sbatch", "scancel", "scontrol"):
        tool = bin_folder / name
        show = f'[ "$1" = show ] && cat {state} && exit 0\n' if name == "scontrol" else ""
        tool.write_text(f"#!/bin/bash\n{show}echo {name} $* >> {calls}\n[ {name} != sbatch ] || echo 17\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for name in ("RESTART_COUNT", "ARRAY_JOB_ID", "ARRAY_TASK_ID"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)

    class Slurm:
        job_state = state

        def calls(self) -> list[str]:
            return calls.read_text().splitlines() if calls.exists() else []

    return Slurm()


def launch(tmp_path, cluster, *words) -> int:
    job = ["--train.micro_batch=1", f"--job.root={tmp_path / 'runs'}"]
    return main(["launch", RUN, "--cluster", str(cluster), *job, *words])


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "sweep",
    [[], ["--sweep=optimizer.lr=1e-3,2e-3"], ["--sweep=optimizer.lr=1e-3,2e-3", "--sweep=job.seed=0,1,2"]],
    ids=["one", "sweep", "grid"],
)
def test_script_is_short_and_bash_reads_it(cluster, sweep, tmp_path, capsys):
    refused = bool(sweep) and load_cluster(cluster).again == "chain"
    assert launch(tmp_path, cluster, "--nodes=2", *sweep, "--dry-run") == (78 if refused else 0)
    script = capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    if not refused:
        assert len(script.splitlines()) < 60
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert f"--ntasks-per-node={load_cluster(cluster).ranks}" in script and "#SBATCH --nodes=2" in script


def test_sweeps_make_a_grid(slurm, tmp_path):
    words = "--sweep=optimizer.lr=1e-3,2e-3", "--sweep=job.seed=0,1,2"
    assert launch(tmp_path, cluster_file(tmp_path), *words) == 0
    (path,) = (tmp_path / "runs" / "slurm").glob("*.sh")
    script = path.read_text()
    assert "#SBATCH --array=0-5\n" in script
    assert "squeue -h -j ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID " in script, "its end, not that of each"
    chosen = script[script.index("overrides=()") : script.index("# A run stops")]
    told = [
        subprocess.check_output(
            ["bash", "-c", chosen + '\necho "${overrides[@]} $run"'],
            text=True,
            env={"SLURM_ARRAY_TASK_ID": str(index), "run": "a"},
        ).strip()
        for index in range(6)
    ]
    assert told == [
        f"--optimizer.lr={lr} --job.seed={seed} a-{index}"
        for index, (lr, seed) in enumerate((lr, seed) for lr in ("1e-3", "2e-3") for seed in range(3))
    ]


def cluster_file(tmp_path, text="") -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(f"[cluster]\ngpus_per_node = 0\nranks_per_node = 2\n{text}")
    return path


def test_launch_submits_the_script_and_says_where_it_logs(slurm, tmp_path, capsys):
    assert launch(tmp_path, cluster_file(tmp_path), "--train.steps=30", "--job.name=a.b") == 0
    script = tmp_path / "runs" / "slurm" / "a.b.sh"
    assert slurm.calls() == [f"sbatch --parsable {script}"]
    told = capsys.readouterr().out
    assert "job 17: 1 nodes of 2 ranks" in told and f"{tmp_path}/runs/slurm/a.b-17.log" in told
    step = next(line for line in script.read_text().splitlines() if line.startswith("  srun"))
    assert shlex.split(step)[-4:] == [
        f"--job.root={tmp_path}/runs",
        "--train.steps=30",
        "--job.name=a.b",
        "&",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes=3"], "6 ranks: .*global_batch = 16"),
        (["--mesh.tp=4"], "mesh.tp = 4"),
        (["--sweep=optimizer.lr"], "expected section.key=value,value"),
        (["--sweep=optimizer.lr=1,-2"], "optimizer.lr"),
        (["--sweep=job.seed=1,2", "--sweep=job.seed=3"], "each key once"),
        (["--train.stepss=3"], "stepss"),
        (["--sweep=optimizer.betas=[0.9,0.95]"], "of plain values"),
    ],
)
def test_what_cannot_run_is_not_submitted(words, said, slurm, tmp_path, capsys):
    assert launch(tmp_path, cluster_file(tmp_path), *words) == 78
    assert not slurm.calls()
    assert re.search(said, capsys.readouterr().err)


def test_launch_refuses_ranks_that_no_micro_batch_divides_the_batch_for(tmp_path, capsys):
    assert launch(tmp_path, cluster_file(tmp_path), "--nodes=2", "--train.micro_batch=8", "--dry-run") == 78
    assert "16 over 4 ranks that read is no whole number of micro-batches of 8" in capsys.readouterr().err


def test_nodes_are_as_few_as_the_mesh_needs(slurm, tmp_path, capsys):
    assert launch(tmp_path, cluster_file(tmp_path), "--mesh.dp_replicate=4") == 0
    assert "2 nodes of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"), [('time = "1 day"\n', "white space"), ('options = ["exclusive"]\n', "no option")]
)
def test_cluster_file_that_breaks_the_script_is_refused(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        load_cluster(cluster_file(tmp_path, text))


def test_cluster_file_that_is_missing_is_told(tmp_path, capsys):
    assert launch(tmp_path, tmp_path / "no.toml", "--dry-run") == 78
    assert "configs/clusters/generic.toml" in capsys.readouterr().err


def after(run: Path, code: int, *words: str) -> int:
    return main(["after", str(run), f"--code={code}", *words])


def ended(run: Path, code: int, **other) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "exit.json").write_text(json.dumps({"code": code, "job": "5", "restart": "0"} | other))


@pytest.mark.parametrize(
    ("code", "returned", "calls"),
    [
        (0, 0, []),
        (78, 78, []),
        (87, 87, []),
        (85, 0, ["scontrol requeue 5"]),
        (137, 0, ["scontrol requeue 5"]),
    ],
)
def test_job_runs_again_where_that_helps(code, returned, calls, slurm, tmp_path):
    if code == 0:
        ended(tmp_path / "run", 0)
    assert after(tmp_path / "run", code) == returned
    assert slurm.calls() == calls


def test_run_of_a_sweep_puts_back_itself_and_not_all_of_the_array(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")  # the number of the array is that of one of its tasks
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert after(tmp_path / "run", 85) == 0
    assert slurm.calls() == ["scontrol requeue 5_2"]


def test_script_outside_of_slurm_heeds_no_job_of_others(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID")
    slurm.job_state.write_text("JobState=CANCELLED BatchFlag=1\n")
    assert after(tmp_path / "run", 85) == 85
    assert "this is no batch job: start it again by hand" in capsys.readouterr().out
    assert slurm.calls() == []


@pytest.mark.parametrize(
    ("told", "given", "end"),
    [
        ("2027-11-23T21:22:29", "", "1827004949"),
        ("2027-11-23T21:22:29", "7", "7"),
        ("", "", "unset"),
        ("N/A", "", "unset"),
        ("2027-11-23T21:22:29\n2028-11-23T21:22:29", "", "unset"),
    ],
)
def test_end_of_a_job_is_given_to_its_ranks_if_it_is_known(told, given, end, slurm, tmp_path):
    assert launch(tmp_path, cluster_file(tmp_path)) == 0
    (path,) = (tmp_path / "runs" / "slurm").glob("*.sh")
    lines = [line for line in path.read_text().splitlines() if line.startswith("e") or "END_TIME" in line]
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/bash\nprintf '{told}'\n")
    squeue.chmod(0o755)
    script = "\n".join([*lines, "echo ${SLURM_JOB_END_TIME-unset}"])
    known = os.environ | {"TZ": "UTC", "SLURM_JOB_END_TIME": given}
    assert subprocess.check_output(["bash", "-c", script], text=True, env=known).strip() == end


@pytest.mark.parametrize(
    ("gpus", "known", "told"),
    [
        (0, {}, "2||"),
        (0, {"SLURM_CPUS_PER_TASK": "7"}, "7||"),
        (2, {"SRUN_CPUS_PER_TASK": "9", "SLURM_CPUS_PER_TASK": "7"}, "7|expandable_segments:True|"),
        (2, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "2|max_split_size_mb:64|"),
        (2, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "2||max_split_size_mb:64"),
    ],
)
def test_ranks_get_their_cores_and_memory_of_gpus_that_grows(gpus, known, told, slurm, tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(f"[cluster]\ngpus_per_node = {gpus}\nranks_per_node = 2\ncpus_per_rank = 2\n")
    assert launch(tmp_path, cluster) == 0
    (path,) = (tmp_path / "runs" / "slurm").glob("*.sh")
    srun = tmp_path / "bin" / "srun"
    names = ("SRUN_CPUS_PER_TASK", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    said = "|".join(f"${name}" for name in names)
    srun.write_text(f'#!/bin/bash\necho "{said}" > {tmp_path}/told\n')
    srun.chmod(0o755)
    theirs = {name: value for name, value in os.environ.items() if name not in names}
    subprocess.run(["bash", str(path)], env=theirs | known, capture_output=True)
    assert (tmp_path / "told").read_text().strip() == told


def test_exit_code_of_this_start_counts_more_than_that_of_a_rank_that_was_killed(slurm, tmp_path):
    run = tmp_path / "run"
    ended(run, 87)
    assert after(run, 137) == 87
    ended(run, 87, restart="1")
    assert after(run, 137) == 0, "the one of another start does not"
    ended(run, 85, job="4")
    assert after(run, 78) == 78


def test_cancelled_job_does_not_run_again(slurm, tmp_path):
    slurm.job_state.write_text("JobState=CANCELLED BatchFlag=1\n")
    assert after(tmp_path / "run", 85, "--chained=9") == 85
    assert slurm.calls() == ["scancel 9"]
    slurm.job_state.write_text("JobState=COMPLETING BatchFlag=1\n")
    assert after(tmp_path / "run", 85) == 85
    assert slurm.calls() == ["scancel 9"]


@pytest.mark.parametrize("told", ["JobState=PENDING Restarts=1", "JobState=RUNNING Restarts=1 BatchFlag=1"])
@pytest.mark.parametrize("code", [0, 137])
def test_script_of_a_start_that_slurm_has_replaced_changes_nothing(told, code, slurm, tmp_path, capsys):
    run = tmp_path / "run"
    ended(run, 85, job="4")
    slurm.job_state.write_text(f"{told}\n")
    assert after(run, code, "--chained=9") == 1
    said = capsys.readouterr().out
    assert "this start was lost with a node or preempted; SLURM runs the job again by itself" in said
    assert "exit code" not in said
    assert slurm.calls() == [] and not (run / "starts.jsonl").exists()


def test_preempted_start_that_ended_in_order_is_noted_although_the_job_is_back(slurm, tmp_path):
    run = tmp_path / "run"
    slurm.job_state.write_text("JobState=PENDING Restarts=1\n")
    ended(run, 85)
    assert after(run, 137) == 85 and slurm.calls() == []
    assert json.loads((run / "starts.jsonl").read_text())["code"] == 85


def test_failing_without_progress_ends_after_three_starts(slurm, tmp_path, capsys):
    run = tmp_path / "run"
    assert [after(run, code) for code in (1, 137, 1)] == [0, 0, 89]
    assert "3 starts failed without a new checkpoint" in capsys.readouterr().out
    assert slurm.calls() == ["scontrol requeue 5"] * 2
    Store(RunFiles(run).checkpoints).save(10, Snapshot({"w": torch.zeros(1)}))
    assert [after(run, code) for code in (1, 85, 1, 1, 1)] == [0, 0, 0, 0, 89]


def test_job_whose_end_cannot_be_written_down_does_not_run_again(slurm, tmp_path, capsys):
    (tmp_path / "tiny").write_text("a file where the run should be")
    assert after(tmp_path / "tiny", 85) == 85
    assert "cannot be written: " in capsys.readouterr().out
    assert after(tmp_path / "tiny", 78) == 78
    assert not any("requeue" in call for call in slurm.calls())


def test_chain_goes_on_by_itself_and_is_cut_when_the_run_is_complete(slurm, tmp_path):
    assert after(tmp_path / "run", 85, "--chained=9") == 0 and slurm.calls() == []
    ended(tmp_path / "run", 0)
    assert after(tmp_path / "run", 0, "--chained=9") == 0 and slurm.calls() == ["scancel 9"]


def test_node_that_is_blamed_twice_is_left_out(slurm, tmp_path, capsys):
    run, script = tmp_path / "tiny", tmp_path / "slurm" / "tiny.sh"
    script.parent.mkdir()
    script.touch()
    for _ in range(2):
        ended(run, 86, hosts=["n7"])
        assert after(run, 137) == 0
        Store(RunFiles(run).checkpoints).save(len(slurm.calls()), Snapshot({"w": torch.zeros(1)}))
    assert slurm.calls() == ["scontrol requeue 5", f"sbatch --parsable --exclude=n7 {script}"]
    assert "job 17 takes its place, without n7" in capsys.readouterr().out
    slurm.job_state.write_text("JobState=RUNNING BatchFlag=1\n ExcNodeList=n7\n")
    assert after(run, 85) == 0
    assert slurm.calls()[-1] == "scontrol requeue 5", "it is left out already"
    assert after(run, 85, "--chained=9") == 0
    assert slurm.calls()[-1] == "scontrol update JobId=9 ExcNodeList=n7"


@pytest.mark.parametrize(
    "blamed",
    [
        {"hosts": []},
        {"hosts": ["n7", "n8"]},
        {},
    ],
)
def test_node_is_not_left_out_where_none_or_several_are_blamed(slurm, tmp_path, blamed):
    run = tmp_path / "tiny"
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "tiny.sh").touch()
    for _ in range(2):
        ended(run, 86, **blamed)
        assert after(run, 137) == 0
    assert slurm.calls() == ["scontrol requeue 5"] * 2


def test_node_whose_copies_of_weights_differed_twice_is_left_out(slurm, tmp_path):
    run = tmp_path / "tiny"
    ended(run, 85)
    line = {"kind": "rollback", "why": "rank 1 on n2 has another w than its copies", "hosts": ["n2"]}
    (run / "incidents.jsonl").write_text(2 * (json.dumps(line) + "\n"))
    assert after(run, 85, "--chained=9") == 0
    assert slurm.calls() == ["scontrol update JobId=9 ExcNodeList=n2"]


def test_never_and_interactive_allocations_do_not_requeue(slurm, tmp_path, capsys):
    assert after(tmp_path / "run", 85, "--never") == 85
    slurm.job_state.write_text("JobState=RUNNING BatchFlag=0\n")
    assert after(tmp_path / "run", 85) == 85
    assert slurm.calls() == [] and "start it again by hand" in capsys.readouterr().out


def test_ranks_of_a_node_are_its_gpus_or_what_is_said():
    assert ClusterConfig(gpus_per_node=8).ranks == 8
    assert ClusterConfig(gpus_per_node=0, ranks_per_node=3).ranks == 3


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:00:30", 3630),
        ("2-3", 183600),
        ("1-0:30", 88200),
        ("1-1:1:1", 90061),
        ("UNLIMITED", None),
        ("1:2:3:4", None),
        ("", None),
    ],
)
def test_limits_are_read_as_sbatch_does(time, expected):
    from forge_trainer.slurm.config import seconds

    assert seconds(time) == expected


def test_limit_within_which_a_run_could_not_begin_is_refused():
    from forge_trainer.slurm.config import ClusterConfig

    ClusterConfig(time="00:03:00", warning_s=120)
    with pytest.raises(ValueError, match="expected at least 180 s, or a shorter warning"):
        ClusterConfig(time="00:02:59", warning_s=120)


def stops(run: Path, *stop_s: float) -> None:
    """A ledger in which each stretch tells twice how long it would have taken to stop."""
    run.mkdir(parents=True)
    lines = [
        {
            "stretch": nth,
            "began": 0,
            "at": 1,
            "from_step": 0,
            "step": 1,
            "spans": {},
            "ended": True,
            "stop_s": s,
        }
        for nth, last in enumerate(stop_s)
        for s in (900.0, last)
    ]
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_warning_is_learned_from_what_earlier_starts_needed_to_stop(tmp_path, capsys):
    run = tmp_path / "runs" / "debug"
    stops(run, 100, 160, 140)
    (run / "starts.jsonl").write_text('{"shutdown_s": 20.0}\n{"shutdown_s": null}\n{"step": 1}\n')
    assert launch(tmp_path, cluster_file(tmp_path), "--job.name=debug", "--dry-run") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --signal=B:USR1@270\n" in script  # (160 + 20) * 1.5
    assert "# Warned 270 s before the time limit (learned from 3 earlier starts: 160 s" in script
    fixed = cluster_file(tmp_path, "warning_s = 77\n")
    assert launch(tmp_path, fixed, "--job.name=debug", "--dry-run") == 0
    script = capsys.readouterr().out
    assert (
        "@77\n" in script and "# Warned 77 s before the time limit (warning_s of the cluster file)" in script
    )


@pytest.mark.parametrize(
    ("time", "stop_s", "expected", "said"),
    [
        ("24:00:00", [], 120, "no earlier start"),
        ("00:03:00", [], 60, "no earlier start"),
        ("24:00:00", [2.0], 60, "1 earlier start:"),
        ("01:00:00", [5000.0], 1770, "bounded, 7500 s are needed"),
        ("UNLIMITED", [5000.0], 3600, "bounded"),
        ("24:00:00", [float("inf"), float("nan"), -5.0, 0.0], 120, "no earlier start"),
    ],
)
def test_learned_warning_is_bounded(time, stop_s, expected, said, tmp_path):
    stops(tmp_path / "run", *stop_s)
    found = warning_of(ClusterConfig(time=time), [tmp_path / "run", tmp_path / "never started"])
    assert found.seconds == expected and said in found.origin


def test_warning_of_a_sweep_is_that_of_its_slowest_run(tmp_path, capsys):
    stops(tmp_path / "runs" / "debug-1", 100)
    words = ["--job.name=debug", "--sweep=job.seed=0,1", "--dry-run"]
    assert launch(tmp_path, cluster_file(tmp_path), *words) == 0
    assert "#SBATCH --signal=B:USR1@150\n" in capsys.readouterr().out


def test_end_of_a_job_notes_how_long_after_the_last_word_of_the_run_it_came(slurm, tmp_path):
    run = tmp_path / "run"
    ended(run, 85, when=(datetime.now(UTC) - timedelta(seconds=30)).isoformat(timespec="seconds"))
    after(run, 137)
    ended(run, 85, when="yesterday")
    after(run, 137)
    seconds = [json.loads(line)["shutdown_s"] for line in (run / "starts.jsonl").read_text().splitlines()]
    assert 30 <= seconds[0] < 45 and seconds[1] is None


TRAIN = "[train]\nsteps = 6\nglobal_batch = 8\nmicro_batch = 8\n"


def test_start_that_leaves_with_0_is_complete_only_if_its_newest_checkpoint_is_the_last_step(slurm, tmp_path):
    run = tmp_path / "run"
    assert after(run, 0) == 0 and slurm.calls() == ["scontrol requeue 5"], "there is no run yet"
    (run / "config.toml").write_text(TRAIN)
    Store(RunFiles(run).checkpoints).save(3, Snapshot({"w": torch.zeros(1)}))
    assert after(run, 0) == 0 and slurm.calls() == ["scontrol requeue 5"] * 2
    Store(RunFiles(run).checkpoints).save(6, Snapshot({"w": torch.zeros(1)}))
    assert after(run, 0) == 0 and slurm.calls() == ["scontrol requeue 5"] * 2
    codes = [json.loads(line)["code"] for line in (run / "starts.jsonl").read_text().splitlines()]
    assert codes == [1, 1, 0]


@pytest.fixture
def at_once(monkeypatch):
    """Notes the seconds that would be waited."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


def test_starts_of_a_twin_do_not_count_against_the_job_that_has_the_run(
    slurm, at_once, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    assert [after(run, 75) for _ in range(3)] == [0, 0, 75], "the twin ends"
    assert at_once == [30.0, 30.0], "and does not ask again at once"
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert [after(run, 1) for _ in range(3)] == [0, 0, 89], "its own three starts"


def test_twin_of_a_job_that_runs_ends_with_the_next_link_of_its_chain(slurm, at_once, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "lease").mkdir(parents=True)
    holder = asdict(Holder.me()) | {"job": "4", "machine": "another"}
    (run / "lease" / "epoch-000000001").write_text(json.dumps(holder))
    assert after(run, 75, "--chained=9") == 75
    assert slurm.calls() == ["scancel 9"] and at_once == []
    assert "job 4 has this run" in capsys.readouterr().out


COMPLETING = "JobState=COMPLETING BatchFlag=1\n RunTime={run} TimeLimit={limit}\n PreemptTime={preempted}\n"


@pytest.mark.parametrize(
    ("run", "limit", "preempted", "cancelled"),
    [
        ("00:00:09", "1-00:00:00", "None", True),
        ("00:00:09", "UNLIMITED", "None", True),
        ("00:01:20", "00:01:00", "None", False),
        ("00:00:09", "1-00:00:00", "2026-11-24T19:06:05", False),
    ],
)
def test_link_of_a_chain_that_is_cancelled_takes_the_next_one_with_it(
    slurm, tmp_path, run, limit, preempted, cancelled
):
    slurm.job_state.write_text(COMPLETING.format(run=run, limit=limit, preempted=preempted))
    assert after(tmp_path / "run", 85, "--chained=9") == 85
    assert slurm.calls() == (["scancel 9"] if cancelled else [])


def script_of(tmp_path, capsys, text="", *words) -> str:
    assert launch(tmp_path, cluster_file(tmp_path, text), *words, "--dry-run") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("state", ["JobState=CANCELLED", "JobState=FAILED", ""])
def test_link_after_a_cancelled_one_ends_and_submits_nothing(slurm, tmp_path, capsys, state):
    script = script_of(tmp_path, capsys, 'again = "chain"\nsetup = ["srun() { echo began; }"]\n')
    slurm.job_state.write_text(f"{state} BatchFlag=1\n")
    line = ["bash", "-c", script, "bash", "4"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    ends = "CANCELLED" in state
    assert ("job 4 was cancelled: the chain ends" in done.stdout) == ends
    assert any("sbatch" in call for call in slurm.calls()) != ends
    assert ("began" in done.stdout) != ends


def test_script_of_a_chain_that_is_run_by_hand_submits_nothing(slurm, tmp_path, capsys, monkeypatch):
    script = script_of(tmp_path, capsys, 'again = "chain"\nsetup = ["srun() { echo began; }"]\n')
    slurm.job_state.write_text("JobState=RUNNING BatchFlag=0\n")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert "began" in done.stdout and not any("sbatch" in call for call in slurm.calls())


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_signal_before_the_run_begins_puts_the_job_back(slurm, tmp_path, capsys, number):
    setup = f'setup = ["kill -{number} $$", "srun() {{ echo began; }}"]\n'
    done = subprocess.run(["bash", "-c", script_of(tmp_path, capsys, setup)], capture_output=True, text=True)
    assert "began" not in done.stdout and "exit code 85" in done.stdout, done
    assert "scontrol requeue 5" in slurm.calls()


@pytest.mark.parametrize("root", ["a\ntouch injected\n", "a\rb", "a\x1b[2J", "a\\b"])
def test_root_that_would_leave_its_comment_or_hide_its_log_is_refused(slurm, tmp_path, capsys, root):
    words = ["launch", RUN, "--cluster", str(cluster_file(tmp_path)), "--train.micro_batch=1"]
    assert main([*words, f"--job.root={tmp_path}/{root}"]) == 78
    assert "expected no" in capsys.readouterr().err and slurm.calls() == []


def test_log_is_where_it_is_said_to_be_when_the_root_has_a_percent_sign(slurm, tmp_path, capsys):
    words = ["launch", RUN, "--cluster", str(cluster_file(tmp_path)), "--train.micro_batch=1", "--dry-run"]
    assert main([*words, f"--job.root={tmp_path}/100%j"]) == 0
    script = capsys.readouterr().out
    (line,) = (line for line in script.splitlines() if "--output=" in line)
    assert shlex.split(line)[1] == f"--output={tmp_path}/100%%j/slurm/debug-%j.log"
