"""Profiles of a run on one GPU: the same bits, sums, memory, snapshots and times of the device."""

import gzip
import json
import pickle
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from forge_trainer.build import build
from forge_trainer.config.job import load_job
from gpu_device import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]
ROOT = Path(__file__).parents[2]
FLAGS = (
    "--train.steps=6",
    "--train.log_every_steps=1",
    "--eval.every_steps=0",
    "--job.deterministic=true",
    "--resilience.watchdog=false",
)
LOOK = ("--hooks.look.type=profile", "--hooks.look.first_step=3", "--hooks.look.steps=2")


@pytest.fixture
def trained(tmp_path):
    """Trains the debug run, and returns its folder and losses."""

    def train(name, *flags, before=lambda run: None):
        directory = tmp_path / name
        job = load_job(ROOT / "configs/runs/debug.toml", [*FLAGS, f"--job.root={directory}", *flags]).value
        job.job.directory.mkdir(parents=True)
        with ExitStack() as stack:
            run = build(job, stack)
            before(run)
            run.train()
        lines = [json.loads(line) for line in (job.job.directory / "metrics.jsonl").read_text().splitlines()]
        return job.job.directory, [line for line in lines if "loss" in line]

    return train


def summary_of(run):
    return json.loads((run / "profile" / "step-00000003" / "rank-0" / "summary.json").read_text())


def test_profile_of_a_gpu_changes_no_bit_and_adds_up(trained):
    _, plain = trained("plain")
    run, seen = trained("seen", *LOOK)
    assert [line["loss"] for line in seen] == [line["loss"] for line in plain]
    summary = summary_of(run)
    assert summary["on"] == "gpu" and summary["device"] == torch.cuda.get_device_name()
    assert sum(summary["classes_s"].values()) == pytest.approx(summary["step_s"], rel=1e-6)
    for kind in ("matmul", "attention", "optimizer", "memory", "idle"):
        assert summary["classes_s"][kind] > 0, kind
    with gzip.open(run / "profile" / "step-00000003" / "rank-0" / "trace.json.gz") as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])


def test_slow_matmul_on_a_gpu_is_named_first(trained):
    def slow(run):
        train, matrix = run.step.train, torch.ones(8192, 8192, device=run.mesh.device)

        def doing(batch, index):
            for _ in range(20):
                matrix @ matrix
            return train(batch, index)

        run.step.train = doing

    first = summary_of(trained("slow", *LOOK, before=slow)[0])["longest"][0]
    assert first["class"] == "matmul" and "aten::mm [8192, 8192] x [8192, 8192]" in first["what"]


def test_memory_of_a_gpu_is_logged(trained):
    _, lines = trained("memory")
    for line in lines:
        assert 0 < line["memory/allocated_gib"] <= line["memory/peak_allocated_gib"]
        assert line["memory/peak_allocated_gib"] <= line["memory/peak_reserved_gib"]
        assert 0 < line["memory/utilization"] < 1 and 0 <= line["memory/fragmentation"] < 1


def test_snapshot_after_a_step_can_be_read(trained):
    run, _ = trained("snapshot", *LOOK, "--hooks.look.snapshot_step=4")
    snapshot = pickle.loads((run / "profile" / "memory-step-00000004-rank-0.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])


def test_snapshot_and_incident_are_left_when_memory_runs_out(trained, tmp_path):
    def greedy(run):
        train = run.step.train

        def doing(batch, index):
            if index == 2:
                torch.empty(1 << 45, dtype=torch.uint8, device=run.mesh.device)
            return train(batch, index)

        run.step.train = doing

    with pytest.raises(torch.OutOfMemoryError):
        trained("out", "--hooks.look.type=profile", "--hooks.look.first_step=6",
                "--hooks.look.snapshot_on_oom=true", before=greedy)  # fmt: skip
    run = next((tmp_path / "out").iterdir())
    assert pickle.loads((run / "profile" / "memory-out-rank-0.pickle").read_bytes())["segments"]
    incident = json.loads((run / "incidents.jsonl").read_text().splitlines()[-1])
    assert incident["kind"] == "memory" and incident["step"] == 3 and "ran out of memory" in incident["why"]


def test_times_of_the_device_add_up_to_those_of_the_host(trained):
    run, lines = trained("times", "--hooks.times.type=device-time", "--hooks.times.every_steps=6")
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = next(line for line in found if "device/step_s" in line)
    assert times["device/optimizer_s"] > 0
    host = sum(
        s
        for line in lines
        for name, s in line.items()
        if name.startswith("time/") and name not in ("time/training_s", "time/build_s")
    )
    device = sum(s for name, s in times.items() if name.startswith("device/")) * 6
    assert device == pytest.approx(host, rel=0.5)
