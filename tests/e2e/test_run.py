"""The real command on a tiny run: learning, killing, resuming, refusing."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forge_ckpt.store import Store
from runs import losses, records, state


def test_run_learns_and_leaves_what_it_should(forge, tiny, tmp_path):
    told = forge("train", tiny(steps=30)).stdout
    before, _, after = told.partition("step      1/30")
    assert "begins     at step 0, with seed 0" in before
    assert "30 steps of 8 x 32 tokens: 7.68 k tokens" in before
    assert f"writes to  {tmp_path / 'runs' / 'tiny'}" in before
    assert after.count(" left") == 30
    run = tmp_path / "runs" / "tiny"
    curve = losses(run)
    assert len(curve) == 30
    assert curve[0] == pytest.approx(math.log(272), abs=0.3)
    assert np.mean(curve[-5:]) < 4.0
    assert {"step", "tokens", "loss", "grad_norm", "lr", "tokens_per_s"} <= records(run)[0].keys()
    assert records(run)[-1]["eval/loss"] < 4.0
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"]
    assert Store(run / "checkpoints").steps() == [27, 30]
    status = forge("status", run).stdout.splitlines()
    assert "  complete      starting it again does nothing" in status
    assert f"loss {curve[-1]:.4f}, " in status[1]
    assert " ago" in status[2]
    assert forge("status", run, "--exit-code").stdout == ""
    assert "loss" in forge("eval", run).stdout
    assert forge("generate", run, "--prompt", "import ", "--max-new-tokens", "8").stdout.startswith("import ")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_killed_run_ends_bit_identical_to_an_uninterrupted_one(forge, tiny, tmp_path, how, ranks, workers):
    extra = (f"--data.workers={workers}",)
    whole = tiny(steps=12, name="whole.toml", root=tmp_path / "whole")
    forge("train", whole, *extra, ranks=ranks)
    cut = tiny(steps=12)
    code = forge.stop_at(cut, 5, how, ranks, *extra, torchrun=ranks > 1)
    assert code != 0
    forge("train", cut, *extra, ranks=ranks)
    assert state(tmp_path / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")
    assert losses(tmp_path / "runs" / "tiny") == losses(tmp_path / "whole" / "tiny")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_run_goes_on_with_another_number_of_ranks(forge, tiny, tmp_path, first, second):
    whole = tiny(steps=12, name="whole.toml", root=tmp_path / "whole")
    forge("train", whole, ranks=1)
    cut = tiny(steps=12)
    assert forge.stop_at(cut, 5, signal.SIGTERM, first, torchrun=first > 1) != 0
    forge("train", cut, ranks=second)
    assert losses(tmp_path / "runs" / "tiny") == pytest.approx(losses(tmp_path / "whole" / "tiny"), rel=1e-6)


@pytest.mark.dist
@pytest.mark.slow
def test_sigterm_to_one_rank_of_two_stops_both_at_the_same_step(forge, tiny, tmp_path):
    path = tiny(steps=100000)
    line = forge.command("train", path, ranks=2)
    process = subprocess.Popen(line, env=forge.environment, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "runs" / "tiny"
    forge.wait_for_step(run / "metrics.jsonl", 5, process)
    ranks = [int(p) for p in subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()]
    os.kill(ranks[-1], signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert "with a checkpoint" in said
    assert process.returncode == 1  # torchrun's, whatever the ranks return
    assert forge("status", run, "--exit-code", check=False).returncode == 85
    found = Store(run / "checkpoints").newest()
    assert found.world_size == 2
    assert found.meta["progress"]["step"] == found.step
    assert f"stopped at step {found.step} " in said


def test_lone_run_that_is_preempted_says_so(forge, tiny):
    path = tiny(steps=100000)
    assert forge.stop_at(path, 3, signal.SIGTERM, 1) == 85


def test_other_config_is_refused_with_the_difference(forge, tiny, tmp_path):
    path = tiny(steps=3)
    forge("train", path)
    done = forge("train", path, "--optimizer.lr=0.5", "--track.tensorboard=true", check=False)
    assert done.returncode == 78
    assert "optimizer.lr" in done.stderr and "0.5" in done.stderr and "0.01" in done.stderr
    assert "tensorboard" not in done.stderr


def test_missing_data_is_an_error(forge, tiny, tmp_path):
    path = tiny(steps=3)
    path.write_text(path.read_text().replace("/*.py", "/*.nothing"))
    done = forge("train", path, check=False)
    assert done.returncode == 78
    assert "no files at" in done.stderr


def test_damaged_newest_checkpoint_is_passed_over(forge, tiny, tmp_path):
    path = tiny(steps=12)
    forge("train", path)
    run = tmp_path / "runs" / "tiny"
    reference = state(run)
    file = Store(run / "checkpoints").folder(12) / "rank-00000.bin"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    older = forge("eval", run)
    assert "at step 9: loss" in older.stdout and "step 12 is passed over" in older.stderr
    moved = (tmp_path / "a moved run").resolve()
    run.rename(moved)
    assert "at step 9: loss" in forge("eval", moved).stdout
    moved.rename(run)
    forge("train", path)
    assert state(run) == reference


def test_hook_and_step_of_a_user_join_through_imports(forge, tiny, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "plugs.md").read_text()
    hook, _, step, *_ = (part.partition("```")[0] for part in page.split("```python\n")[1:])
    (tmp_path / "my_lab_hooks.py").write_text(hook)
    (tmp_path / "my_lab_steps.py").write_text(step)
    notes = tmp_path / "notes.txt"
    extra = f'\n[hooks.mine]\ntype = "note"\nevery_steps = 2\npath = "{notes}"\n'
    path = tiny(steps=5, extra=extra + '\n[step]\ntype = "text-with-length"\n')
    path.write_text('imports = ["my_lab_hooks", "my_lab_steps"]\n' + path.read_text())
    forge("train", path)
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["2", "4", "5"]
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    assert {r["targets"] for r in map(json.loads, lines) if "loss" in r} == {32.0}
    forge("train", path, cwd=tmp_path)
    assert "\n  complete " in forge("status", tmp_path / "runs" / "tiny", cwd=tmp_path).stdout


def test_exported_weights_start_another_run(forge, tiny, tmp_path):
    first = tiny(steps=4)
    forge("train", first)
    run = tmp_path / "runs" / "tiny"
    forge("export", run, tmp_path / "hf")
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("añ\n")["input_ids"] == list("añ\n".encode())
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.bos_token_id, config.eos_token_id) == (None, 256) == (None, tokenizer.eos_token_id)
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 256
    assert "logits differ by" in forge("verify-export", run, tmp_path / "hf").stdout
    weights = tmp_path / "hf" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-4096] + bytes(4096))
    refused = forge("verify-export", run, tmp_path / "hf", check=False)
    assert refused.returncode == 78 and "is it the export of this step?" in refused.stderr
    weights.write_bytes(good)
    second = tiny(steps=3, name="second.toml", root=tmp_path / "second")
    forge("train", second, f'--train.init_from="{tmp_path / "hf"}"')
    assert losses(tmp_path / "second" / "tiny")[0] < losses(run)[0] - 0.5


def test_trackers_write_their_files(forge, tiny, tmp_path):
    path = tiny(steps=3, extra='\n[track]\ntensorboard = true\n[track.wandb]\nmode = "offline"\n')
    forge("train", path)
    run = tmp_path / "runs" / "tiny"
    assert list((run / "tensorboard").glob("events.out.*"))
    assert list(run.glob("wandb/offline-run-*/*.wandb"))


def test_module_help_needs_no_torch():
    code = "import sys; import forge_trainer.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_run_with_relative_data_is_evaluated_and_goes_on_from_elsewhere(forge, tiny, tmp_path, text):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    (here / "text").symlink_to(text)
    path = tiny(steps=3)
    path.write_text(path.read_text().replace(f'"{text}/*.py"', '"text/*.py"'))
    forge("train", path, cwd=here)
    run = tmp_path / "runs" / "tiny"
    assert f'"{here}/text/*.py"' in (run / "config.toml").read_text()
    assert "loss" in forge("eval", run, cwd=elsewhere).stdout
    (elsewhere / "text").symlink_to(text)
    forge("train", path, "--train.steps=4", "--change", cwd=elsewhere)


@pytest.mark.slow
def test_branch_decays_from_a_checkpoint_of_another_run(forge, tiny, tmp_path):
    base = tiny(steps=12)
    constant = ("--schedule.type=wsd", "--schedule.decay_steps=0")
    forge("train", base, *constant)
    run, new = tmp_path / "runs" / "tiny", tmp_path / "branches" / "decayed"
    flags = ("--train.steps=13", "--schedule.decay_steps=4")
    refused = forge("branch", run, new, "--step=5", *flags, check=False)
    assert refused.returncode == 78 and "it has 9, 12" in refused.stderr and not new.exists()
    refused = forge("branch", run, new, "--step=9", "--model.dim=64", check=False)
    assert refused.returncode == 78 and "model.dim: 32 -> 64" in refused.stderr
    forge("branch", run, new, "--step=9", *flags)
    forge("train", new / "config.toml")
    decay = [1 - (i / 4) ** 0.5 for i in range(4)]
    assert [r["lr"] for r in records(new) if "loss" in r] == pytest.approx([0.01 * d for d in decay])
    assert "schedule.decay_steps: 0 -> 4 at step 9" in forge("status", new).stdout
    assert forge("branch", run, new, check=False).returncode == 78
    # the base as if it had been meant to end there
    whole = tiny(steps=13, name="whole.toml", root=tmp_path / "whole")
    forge("train", whole, "--schedule.type=wsd", "--schedule.decay_steps=4")
    assert losses(new) == losses(tmp_path / "whole" / "tiny")[9:]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["type=schedule-free-adamw", "ema_decay=0.9"])
def test_averaged_weights_are_evaluated_and_exported_alike(forge, tiny, tmp_path, key):
    path = tiny(steps=6)
    average = (f"--optimizer.{key}", "--schedule.type=none")
    forge("train", path, *average)
    forge("train", tiny(steps=3, name="part.toml", root=tmp_path / "parts"), *average)
    forge("train", tiny(steps=6, name="part.toml", root=tmp_path / "parts"), *average, "--change")
    run = tmp_path / "runs" / "tiny"
    parts = tmp_path / "parts" / "tiny"
    assert losses(parts) == losses(run) and state(parts) == state(run)
    evaluated = records(run)[-1]["eval/loss"]
    assert f"loss {evaluated:.4f}" in forge("eval", run).stdout
    forge("export", run, tmp_path / "hf")
    start = tiny(steps=1, name="start.toml", root=tmp_path / "start")
    from_average = ("--optimizer.lr=1e-30", "--schedule.type=none", f'--train.init_from="{tmp_path / "hf"}"')
    forge("train", start, *from_average)
    assert records(tmp_path / "start" / "tiny")[-1]["eval/loss"] == pytest.approx(evaluated, rel=1e-6)
