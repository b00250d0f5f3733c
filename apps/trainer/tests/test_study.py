"""Which runs a study has, what rules make of them, how they are run, and what their table says."""

import csv
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from forge_ckpt import Snapshot, Store
from forge_config import ConfigError, to_toml
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from forge_trainer.optim import trainable
from forge_trainer.study import local
from forge_trainer.study.config import AnalysisConfig, load_study
from forge_trainer.study.findings import seeds
from forge_trainer.study.points import name_of, points_of
from forge_trainer.study.results import row_of
from forge_trainer.study.state import State, log_of, state_of

BASE = """
[job]
name = "base"
[model]
vocab_size = 272
dim = 32
num_layers = 2
max_tokens = 32
attention = { num_heads = 2 }
[data]
max_tokens = 32
tokenizer = { type = "bytes" }
[[data.sources]]
type = "python-stdlib"
[train]
steps = 100
global_batch = 8
micro_batch = 4
[optimizer]
type = "adamw"
lr = 1e-2
[schedule]
type = "constant"
"""
STUDY = """
name = "sizes"
base = "base.toml"
root = "{root}"
[axes.size.small]
model.dim = 32
[axes.size.large]
model.dim = 64
model.num_layers = 3
[grid]
optimizer.lr = [1e-3, 1e-2]
"""


@pytest.fixture
def write(tmp_path):
    """Writes a study and returns its points."""

    def make(text):
        (tmp_path / "base.toml").write_text(BASE)
        file = tmp_path / "study.toml"
        file.write_text(text.replace("{root}", str(tmp_path / "runs")))
        study, root = load_study(file)
        return points_of(study, file, root)

    return make


def test_a_study_has_all_combinations_and_then_its_points(write):
    points = write(STUDY + '[[points]]\nname = "wide"\nmodel.dim = 96\n')
    found = [(p.job.model.dim, p.job.model.num_layers, p.job.optimizer.lr) for p in points]
    product = itertools.product([(32, 2), (64, 3)], [1e-3, 1e-2])
    assert found == [*((*size, lr) for size, lr in product), (96, 2, 1e-2)]
    assert points[0].name == "size-small-lr-0.001" and points[-1].name == "wide"
    assert len({p.job.job.directory for p in points}) == 5


def test_named_points_differ_by_their_keys_and_not_by_their_names(write, tmp_path):
    named = "".join(f'[[points]]\nname = "s{n}"\njob.seed = {n}\n' for n in (1, 2))
    points = write(f'name = "x"\nbase = "base.toml"\nroot = "{{root}}"\n{named}')
    rows = [
        row_of(p, State("complete", 100, 0), tmp_path / "runs") | {"loss": 1.0 + n}
        for n, p in enumerate(points)
    ]
    assert [row["set.job.seed"] for row in rows] == [1, 2] and "set.name" not in rows[0]
    assert seeds(rows, AnalysisConfig(loss="loss")).numbers["deviation"] == pytest.approx(math.sqrt(0.5))


def test_names_stay_when_values_are_added(write):
    before = {p.name for p in write(STUDY)}
    after = {p.name for p in write(STUDY.replace("[1e-3, 1e-2]", "[3e-3, 1e-2, 1e-3]"))}
    assert before < after and len(after) == 6


def test_a_long_name_is_cut_and_stays_different():
    names = {name_of({f"model.{'x' * 90}{n}": 1, "job.seed": 2}) for n in range(9)}
    assert len(names) == 9 and all(len(name) <= 100 for name in names)


def parameters(job):
    model = job.model.build()
    outer = (model.embed.weight, model.head.weight)
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in outer)


@pytest.mark.parametrize(
    ("rules", "tokens_of"),
    [
        ("tokens = 1e5", lambda job: 1e5),
        ("tokens_per_parameter = 3.0", lambda job: 3 * parameters(job)),
        ("flops = 1e11", lambda job: 1e11 / job.model.flops_per_token(32)),
    ],
)
def test_rules_give_the_length_of_a_run(write, rules, tokens_of):
    for point in write(f"{STUDY}[rules]\n{rules}\n"):
        expected = tokens_of(point.job)
        assert abs(point.job.train.steps * 8 * 32 - expected) <= 4 * 32
        assert point.measures["tokens"] == point.job.train.steps * 8 * 32
        assert point.measures["parameters"] == parameters(point.job)


def test_rules_give_batch_and_learning_rate_by_powers(write):
    rules = (
        "[rules]\ntokens_per_parameter = 20.0\n"
        'batch_tokens = { value = 1024, of = "tokens", at = 1e6, power = 0.5 }\n'
        'lr = { value = 0.01, of = "width", at = 32, power = -1.0 }\n'
    )
    for point in write(STUDY.replace("optimizer.lr = [1e-3, 1e-2]", "job.seed = [0, 1]") + rules):
        tokens = 20 * parameters(point.job)
        batch = 1024 * math.sqrt(tokens / 1e6)
        assert abs(point.job.step_tokens - batch) <= 4 * 32 / 2
        assert point.job.train.global_batch % 4 == 0
        assert abs(point.measures["tokens"] - tokens) <= point.job.step_tokens / 2
        assert point.job.optimizer.lr == pytest.approx(0.01 * 32 / point.job.model.dim)


def test_an_axis_changes_one_value_of_a_rule_and_keeps_its_others(write):
    rules = '[rules]\nlr = { value = 0.01, of = "width", at = 32, power = -1.0 }\n'
    axis = STUDY.replace("optimizer.lr = [1e-3, 1e-2]", "rules.lr.value = [0.01, 0.02]")
    found = [(p.job.model.dim, p.job.optimizer.lr) for p in write(axis + rules)]
    assert found == [(32, 0.01), (32, 0.02), (64, 0.005), (64, 0.01)]


def test_an_axis_may_be_of_a_rule_that_is_absent(write):
    axis = STUDY.replace("optimizer.lr = [1e-3, 1e-2]", "rules.lr.value = [0.01, 0.02]")
    assert {p.job.optimizer.lr for p in write(axis)} == {0.01, 0.02}


def test_rules_count_the_tokens_of_a_batch_that_warms_up(write):
    warm = "train.batch_warmup = [{ steps = 10, global_batch = 4 }]\n"
    for point in write('name = "x"\nbase = "base.toml"\n[rules]\ntokens = 1e5\n[[points]]\n' + warm):
        by_hand = sum((4 if step < 10 else 8) * 32 for step in range(point.job.train.steps))
        assert abs(by_hand - 1e5) <= 8 * 32 / 2
        assert point.measures["tokens"] == by_hand


def test_width_of_a_vision_language_model_is_that_of_its_decoder(tmp_path):
    base = Path(__file__).parents[3] / "configs/runs/vlm_debug_joint.toml"
    rules = '[rules]\nlr = { value = 0.01, of = "width", at = 64, power = -1.0 }\n'
    file = tmp_path / "study.toml"
    file.write_text(f'name = "v"\nbase = "{base}"\n{rules}[[points]]\nmodel.decoder.dim = 128\n')
    study, root = load_study(file)
    [point] = points_of(study, file, root)
    assert point.measures["width"] == 128 and point.job.optimizer.lr == pytest.approx(0.005)


def test_a_rule_may_be_an_axis(write):
    points = write(STUDY + "rules.tokens = [1e5, 2e5]\n")
    assert sorted({p.job.train.steps for p in points}) == [391, 781]


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        (STUDY + "job.seed = []\n", r"grid\.job\.seed = \[\]"),
        (STUDY + "job.seed = [1, 1]\n", "has a value twice"),
        (STUDY + "model.dim = [16]\n", r"two axes set model\.dim"),
        (STUDY + "[rules]\ntokens = 1.0\nflops = 1e9\n", "say the same thing"),
        (STUDY + "[rules]\ntokens = 10.0\n", "less than half of a step"),
        (STUDY + "rules.tokens = [-1.0]\n", r"rules\.tokens = -1\.0"),
        (STUDY + "model.dimension = [16]\n", "unknown key 'dimension'"),
        (STUDY.replace("base.toml", "no.toml"), "there is no file"),
        (STUDY + '[[points]]\nname = "size-small-lr-0.01"\n', "two runs are called"),
        ('name = "x"\nbase = "base.toml"\n', "has no runs"),
        (STUDY + "[rules]\nlr = { value = 0.1 }\n", r"optimizer\.lr = 0\.001, and a rule gives 0\.1"),
        (STUDY + "train.steps = [5]\n[rules]\ntokens = 1e5\n", r"train\.steps = 5, and a rule gives"),
        (STUDY + '[[points]]\nname = "logs"\n', "a run is called logs"),
    ],
)
def test_what_cannot_be_is_refused(write, text, needle):
    with pytest.raises(ConfigError, match=needle):
        write(text)


def begun(points, root, code_of):
    """Runs that scripts play: each writes a last checkpoint, or ends with another exit code."""
    script = (
        "import sys, os, signal; tries, code = sys.argv[1], int(sys.argv[2]);"
        "open(tries, 'a').write('x'); n = len(open(tries).read());"
        "print('out of luck');"
        "code == -9 and n < 2 and os.kill(os.getpid(), 9);"
        "sys.exit(0 if code == -9 else code)"
    )

    def start(point, root, configs, threads):
        log = log_of(root, point.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        tries = root / f"{point.name}.tries"
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-c", script, tries, str(code_of[point.name])], stdout=out, stderr=out
            )

    return start


def test_runs_that_are_killed_start_again_and_those_that_fail_say_why(write, tmp_path, monkeypatch):
    points, root = write(STUDY), tmp_path / "runs"
    codes = dict(zip([p.name for p in points], [0, -9, 78, 85], strict=True))
    monkeypatch.setattr(local, "_start", begun(points, root, codes))
    told = []
    assert local.run_here(points, root, root / "configs", 2, told.append)
    tries = [len((root / f"{p.name}.tries").read_text()) for p in points]
    assert tries == [1, 2, 1, local.TRIES]
    states = [state_of(p, root) for p in points]
    assert (states[2].kind, states[2].code, states[2].reason) == ("failed", 78, "out of luck")
    assert (states[3].kind, states[3].code) == ("stopped", 85)
    assert any("killed by signal 9" in line and "starts again" in line for line in told)


def test_no_more_than_asked_run_at_once_and_a_signal_ends_them(write, tmp_path, monkeypatch):
    points, root = write(STUDY), tmp_path / "runs"
    running = []

    def start(point, root, configs, threads):
        running.append(subprocess.Popen(["sleep", "60"]))
        (root / "logs").mkdir(parents=True, exist_ok=True)
        return running[-1]

    monkeypatch.setattr(local, "_start", start)
    asked = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    asked.start()
    began = time.monotonic()
    assert not local.run_here(points, root, root / "configs", 3, lambda line: None)
    assert time.monotonic() - began < 10 and len(running) == 3
    assert all(process.wait() == -signal.SIGTERM for process in running)


def test_table_says_what_runs_reached_and_why_others_did_not(write, tmp_path, capsys, monkeypatch):
    points, root = write(STUDY), tmp_path / "runs"
    done, failed = points[0], points[1]
    run = root / done.name
    run.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 5 - step / 50, "tokens": step * 256, "time/training_s": 0.5}
        for step in range(10, 101, 10)
    ] + [{"step": 100, "eval/loss": 3.25}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Store(run / "checkpoints").save(100, Snapshot({"w": torch.zeros(1)}))
    monkeypatch.setattr(local, "_start", begun(points, root, dict.fromkeys([p.name for p in points], 1)))
    assert main(["study", str(tmp_path / "study.toml"), "--jobs", "2"]) == 1
    said = capsys.readouterr()
    assert f"{failed.name}: failed at step 0, exit code 1: out of luck" in said.err
    assert "1 complete, 3 failed" in said.out
    rows = list(csv.DictReader((root / "results.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["complete", "failed", "failed", "failed"]
    assert float(rows[0]["eval/loss"]) == 3.25 and float(rows[0]["seconds"]) == 50
    assert rows[1]["eval/loss"] == ""
    assert float(rows[0]["train_loss"]) == 3.0 and rows[0]["set.size"] == "small"
    table = pyarrow.parquet.read_table(root / "results.parquet").to_pylist()
    assert [row["run"] for row in table] == [row["run"] for row in rows]
    assert table[0]["eval/loss"] == 3.25 and table[1]["eval/loss"] is None


def test_dry_run_lists_runs_and_writes_nothing(write, tmp_path, capsys):
    write(STUDY)
    assert main(["study", str(tmp_path / "study.toml"), "--dry-run"]) == 0
    assert "4 runs, 4 waiting" in capsys.readouterr().out and not (tmp_path / "runs").exists()


def test_array_has_a_task_for_each_run_that_is_left(write, tmp_path, capsys):
    points, root = write(STUDY), tmp_path / "runs"
    (root / points[0].name).mkdir(parents=True)
    Store(root / points[0].name / "checkpoints").save(100, Snapshot({"w": torch.zeros(1)}))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[cluster]\ngpus_per_node = 0\nranks_per_node = 1\ntime = "1:00:00"\n')
    options = ["study", str(tmp_path / "study.toml"), "--cluster", str(cluster), "--dry-run"]
    assert main(options) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-2\n" in script
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("srun", "squeue"):
        (tools / name).write_text(f'#!/bin/bash\necho "{name} $@"\n')
        (tools / name).chmod(0o755)
    for task, point in enumerate(points[1:]):
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": str(task)}
        said = subprocess.run(
            ["bash"], input=script, env=environment, capture_output=True, text=True, check=False
        )
        assert f"train {root}/configs/{point.name}.toml\n" in said.stdout


WIDTHS = """
name = "widths"
base = "base.toml"
[axes.width.a]
model.dim = 16
[axes.width.b]
model.dim = 32
[axes.width.c]
model.dim = 128
"""


def test_coordinates_change_alike_with_scaling_and_grow_without(write, tmp_path, capsys):
    file = str(tmp_path / "study.toml")
    write(WIDTHS)
    assert main(["study", file, "--coordinates", "3"]) == 1
    assert "grows with the width" in capsys.readouterr().out
    write(WIDTHS + "[grid]\nmodel.scaling.base_dim = [16]\n")
    assert main(["study", file, "--coordinates", "3"]) == 0
    assert "with the width" not in capsys.readouterr().out
    write(WIDTHS + "[grid]\nmodel.scaling.base_dim = [16]\nmodel.ffn.dim = [32]\n")
    assert main(["study", file, "--coordinates", "3"]) == 1, "feed-forwards that do not grow"
    assert "falls with the width" in capsys.readouterr().out
    write(WIDTHS + "[grid]\noptimizer.lr = [1e30]\n")
    assert main(["study", file, "--coordinates", "3"]) == 1
    assert "is not finite" in capsys.readouterr().out
    write(STUDY)
    assert main(["study", file, "--coordinates", "3"]) == 78
    assert "a check needs three" in capsys.readouterr().err


def test_learning_rates_of_the_model_reach_the_optimizer(write):
    (point,) = write(
        'name = "w"\nbase = "base.toml"\n[[points]]\nmodel.dim = 128\nmodel.scaling.base_dim = 32\n'
    )
    groups = point.job.optimizer.build(trainable([point.job.model.build()])).param_groups
    found = {(group["lr"], group["weight_decay"]) for group in groups}
    assert found == {(1e-2, 0.1), (1e-2, 0.0), (2.5e-3, 0.4)}


def test_scaling_with_an_optimizer_of_another_kind_is_refused(write):
    text = 'name = "w"\nbase = "base.toml"\n[[points]]\nmodel.scaling.base_dim = 32\n'
    with pytest.raises(ConfigError, match=r"muon.* with model\.scaling"):
        write(f'{text}optimizer.type = "muon"\noptimizer.scale = "original"\n')


def test_a_study_trains_its_runs_with_the_real_command(write, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 50)
    write('name = "one"\nbase = "base.toml"\nroot = "{root}"\n[[points]]\nname = "a"\ntrain.steps = 2\n')
    base = (tmp_path / "base.toml").read_text()
    text = f'type = "files"\npaths = ["{tmp_path / "text.txt"}"]'
    (tmp_path / "base.toml").write_text(base.replace('type = "python-stdlib"', text))
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    assert main(["study", str(tmp_path / "study.toml")]) == 0, (tmp_path / "runs/logs/a.log").read_text()
    assert "a: complete after" in capsys.readouterr().out
    (row,) = csv.DictReader((tmp_path / "runs" / "results.csv").read_text().splitlines())
    assert row["state"] == "complete" and 3 < float(row["train_loss"]) < 8
    assert main(["study", str(tmp_path / "study.toml")]) == 0, "nothing is left"
    assert "0 to run" in capsys.readouterr().out


ODD = """
name = "odd"
base = "base.toml"
root = "{root}"
[axes.data.a]
data.sources = [{ type = "python-stdlib", name = "x y" }]
[axes.data.b]
data.sources = [{ type = "installed-docs", weight = 2.0 }, { type = "python-stdlib" }]
[grid]
optimizer.betas = [[0.9, 0.95], [0.8, 0.9]]
job.deterministic = [true]
"""


def test_any_key_may_differ_and_a_run_is_the_same_from_its_own_file(write, tmp_path):
    points = write(ODD)
    assert points[0].name == "data-a-betas-0.9_0.95-deterministic-true"
    assert [len(p.job.data.sources) for p in points] == [1, 1, 2, 2]
    assert [p.job.optimizer.betas[0] for p in points] == [0.9, 0.8, 0.9, 0.8]
    for point in points:
        (tmp_path / "own.toml").write_text(point.toml(tmp_path / "base.toml"))
        assert load_job(tmp_path / "own.toml").value == point.job


def test_a_run_that_was_trained_otherwise_is_not_taken_for_one_of_the_study(write, tmp_path, capsys):
    point, root = write(STUDY)[0], tmp_path / "runs"
    run = root / point.name
    run.mkdir(parents=True)
    Store(run / "checkpoints").save(100, Snapshot({"w": torch.zeros(1)}))
    (run / "config.toml").write_text(to_toml(point.job))
    assert state_of(point, root).kind == "complete"
    other = write(STUDY.replace("model.dim = 32", "model.dim = 48"))[0]
    assert other.name == point.name
    found = state_of(other, root)
    assert found.kind == "failed" and "model.dim: the run has 32, now given 48" in found.reason
    shorter = write(STUDY + "[rules]\ntokens = 12800.0\n")[0]
    assert shorter.name == point.name and state_of(shorter, root).kind == "failed"
