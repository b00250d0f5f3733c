"""A start is planned beside itself where its GPUs are known: here some machine pretends to have them."""

import json
import sys
import time
from argparse import Namespace

import pytest
from forge_config import ConfigError
from forge_parallel.testing import run_ranks
from forge_trainer.cli import main
from forge_trainer.plan import at_start
from forge_trainer.plan.at_start import StartPlan, gpu_here, plan_start

DEBUG = "configs/runs/debug.toml"
SMALL = [
    "--data.max_tokens=32",
    "--model.max_tokens=32",
    "--model.dim=32",
    "--model.attention.num_heads=2",
    "--model.num_layers=1",
    "--train.steps=2",
    "--schedule.warmup_steps=0",
    "--train.micro_batch=2",
    "--train.global_batch=2",
]


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """A machine with one H100 of so many GiB, whose plans are waited for."""

    def have(gib):
        table = tmp_path / "devices.toml"
        table.write_text(f"[devices.h100]\nmemory_gib = {gib}\n")
        monkeypatch.setenv("FORGE_DEVICE_TABLE", str(table))
        gpu = tmp_path / "gpus" / "0000:01:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 18\n")
        monkeypatch.setattr(at_start, "GPUS", tmp_path / "gpus")
        monkeypatch.setattr(at_start, "PATIENCE_S", 100.0)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return have


def start(tmp_path, *flags):
    return main(["train", DEBUG, *SMALL, f"--job.root={tmp_path}", "--job.name=run", *flags])


def test_start_that_does_not_fit_warns_first_and_keeps_its_plan(pretend, tmp_path, capsys):
    pretend(0.0001)
    assert start(tmp_path) == 0
    said = capsys.readouterr()
    assert said.err.count("WARNING the job needs") == 1 and "h100 has 105 KiB" in said.err
    assert "of 105 KiB a rank of h100" in said.out and "s a step" in said.out and "WARNING" in said.out
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert kept["fits"] is False and kept["ranks"] == 1 and kept["memory_gib"] > 0.0001
    assert sum(kept["memory_gib_of"].values()) == pytest.approx(kept["memory_gib"])
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "memory_gib_of.weights" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_strict_start_that_does_not_fit_is_refused_before_anything_is_built(pretend, tmp_path, capsys):
    pretend(0.0001)
    assert start(tmp_path, "--strict") == 78
    assert "the job needs" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists() and not (tmp_path / "run" / "plan.json").exists()


def test_start_without_a_known_gpu_says_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(at_start, "GPUS", tmp_path / "none")
    assert start(tmp_path, "--strict") == 0
    said = capsys.readouterr()
    assert "plan" not in said.out + said.err
    assert not (tmp_path / "run" / "plan.json").exists()


def test_plan_that_fails_is_one_line(capfd):
    start_plan = StartPlan(
        [sys.executable, "-c", "print('{'); raise SystemExit('a\\nno such thing')"], strict=True
    )
    start_plan.require_room(None)
    assert capfd.readouterr().err == "plan: this start is not planned: no such thing\n"
    assert start_plan.lines() == []
    start_plan = StartPlan([sys.executable, "-c", "print('{}')"], strict=True)
    start_plan.require_room(None)
    assert capfd.readouterr().err.startswith("plan: this start is not planned: KeyError")


def test_plan_that_prints_no_text_keeps_no_start_waiting(capfd):
    code = "import sys; sys.stderr.buffer.write(b'\\xff no such thing'); raise SystemExit(1)"
    begun = time.monotonic()
    StartPlan([sys.executable, "-c", code], strict=True).require_room(None)
    assert time.monotonic() - begun < 60
    assert "not planned: \ufffd no such thing" in capfd.readouterr().err


def test_plan_that_cannot_be_started_is_one_line(capfd):
    StartPlan(["/nowhere/python"], strict=True).require_room(None)
    assert capfd.readouterr().err.startswith("plan: this start is not planned: ")


def test_slow_plan_holds_up_no_start_and_is_ended_with_it(monkeypatch, tmp_path):
    monkeypatch.setattr(at_start, "PATIENCE_S", 0.2)
    start_plan = StartPlan([sys.executable, "-c", "import time; time.sleep(100)"])
    begun = time.monotonic()
    start_plan.require_room(None)
    start_plan.keep(tmp_path / "plan.json")
    start_plan.close()
    assert start_plan._process.wait(10) < 0 and time.monotonic() - begun < 10
    assert not (tmp_path / "plan.json").exists()


def strict_on_ranks():
    import torch.distributed as dist

    start_plan = StartPlan(strict=True)
    if dist.get_rank() == 0:
        start_plan._record = {"fits": False, "memory_gib": 9.0, "device_gib": 8.0, "device": "h100"}
    try:
        start_plan.require_room(dist.group.WORLD)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_every_rank_of_a_strict_start_is_refused():
    first, second = run_ranks(strict_on_ranks, 2)
    assert first == second and "needs 9.00 GiB" in first


def test_only_the_first_rank_plans_and_it_plans_all(pretend, monkeypatch):
    pretend(80)
    told = []
    monkeypatch.setattr(at_start, "_started", lambda command: told.append(command))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    options = Namespace(config="x.toml", strict=False)
    plan_start(options, ["--train.steps=3"], 1, 8)
    assert told == []
    plan_start(options, ["--train.steps=3"], 0, 8)
    assert told[0][-6:] == [
        "x.toml",
        "--train.steps=3",
        "--ranks=8",
        "--device=h100",
        "--json",
        "--gpus-per-node=4",
    ]


def test_variables_of_ranks_and_gpus_do_not_reach_a_plan(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID"):
        monkeypatch.setenv(name, "3")
    code = "import os; print(os.environ); raise SystemExit(str(sorted(os.environ)))"
    process = at_start._started([sys.executable, "-c", code])
    _, said = process.communicate()
    assert "RANK" not in said and "WORLD_SIZE" not in said and "SLURM" not in said and "MASTER" not in said
    assert "CUDA_VISIBLE_DEVICES" in said and "PATH" in said


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["NVIDIA H200"] * 2, "h200"),
        (["NVIDIA A100-SXM4-40GB"], "a100-40gb"),
        (["NVIDIA H200", "NVIDIA H100 80GB HBM3"], None),  # which of them a rank has is not known
        (["NVIDIA H100 NVL"], None),  # 94 GB
        (["NVIDIA GH200 480GB"], None),
        (["NVIDIA L40S"], None),
        ([], None),
    ],
)
def test_gpu_is_known_by_what_the_driver_says(models, expected, tmp_path, monkeypatch):
    for number, model in enumerate(models):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(f"Model: \t {model}\n")
    monkeypatch.setattr(at_start, "GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_here() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_here() is None
