"""What `forge status` says of a run directory, and `forge train` before it begins."""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from forge_ckpt.lease import Holder
from forge_config import Change, ConfigError, plain
from forge_resilience.exit_codes import ExitCode
from forge_trainer.checkpoints.init_from import origin_of
from forge_trainer.cli import main
from forge_trainer.report.announce import scaled
from forge_trainer.run_dir.files import append_history, read_job

CONFIG = """
[job]
name = "here"
[model]
vocab_size = 272
dim = 32
num_layers = 1
max_tokens = 32
attention = { num_heads = 2 }
[data]
max_tokens = 32
[[data.sources]]
type = "python-stdlib"
[train]
steps = 40
global_batch = 8
micro_batch = 8
[optimizer]
lr = 1e-3
[schedule]
"""


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / 'a "run" of mine'
    (directory / "checkpoints" / "step-000000020").mkdir(parents=True)
    (directory / "lease").mkdir()
    (directory / "config.toml").write_text(CONFIG)
    record = {
        "step": 25,
        "tokens": 1,
        "loss": 1.23456789,
        "tokens_per_s": 1234.567,
        "time": time.time() - 3 * 3600 - 310,
    }
    lines = [json.dumps(record), '{"step": 26, "lo', "[]", "\x00"]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def said(capsys, run, *arguments):
    code = main(["status", str(run), *arguments])
    return code, capsys.readouterr().out


def test_status_rounds_and_tells_the_time_and_passes_over_damaged_lines(run, capsys):
    code, text = said(capsys, run)
    assert code == 0
    assert "last logged   step 25, loss 1.2346, 1,235 tokens/s" in text
    assert "3 h 5 min ago" in text
    assert "  not complete  the next start begins at step 20" in text


def test_status_of_numbers_that_were_not_finite(run, capsys):
    record = {"step": 25, "tokens": 1, "loss": None, "tokens_per_s": None}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert "loss not finite" in said(capsys, run)[1]


def test_status_names_layers_with_experts_that_no_token_chose(run, capsys):
    assert "dead experts" not in said(capsys, run)[1]
    counts = [2.0, 0.0, 1.0, 3.0, 4.0]
    dead = {f"layers.{layer}.ffn/dead_experts": count for layer, count in enumerate(counts)}
    record = {"step": 25, "tokens": 1, "loss": 1.0, "tokens_per_s": 1.0, "x/dead_experts": "no number"} | dead
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert (
        "  dead experts  2 of layers.0.ffn, 1 of layers.2.ffn, 3 of layers.3.ffn and of 1 more layers: "
        "no token chose them in step 25"
    ) in said(capsys, run)[1]


@pytest.mark.parametrize(("code", "reason"), [(85, "stopped at step 20"), (78, "no files")])
def test_status_tells_how_the_last_start_ended(run, capsys, code, reason):
    ended = {"code": code, "reason": reason, "when": "2026-11-22T10:00:00+00:00"}
    (run / "exit.json").write_text(json.dumps(ended))
    assert f"exit code {code} at 2026-11-22T10:00:00+00:00: {reason}" in said(capsys, run)[1]
    assert said(capsys, run, "--exit-code") == (code, "")


@pytest.mark.parametrize(("code", "complete"), [(0, True), (85, False)])
def test_status_of_a_run_that_ended_with_its_data(run, capsys, code, complete):
    ended = {"code": code, "reason": "it says why", "when": "2026-11-22T10:00:00+00:00", "step": 20}
    (run / "exit.json").write_text(json.dumps(ended))
    text = said(capsys, run)[1]
    assert ("40 steps of 8 x 32 tokens, of which there were data for 20\n" in text) == complete
    assert ("  complete      starting it again does nothing" in text) == complete


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_start_that_left_no_exit_code_failed(run, capsys, text):
    if text is not None:
        (run / "exit.json").write_text(text)
    assert said(capsys, run, "--exit-code") == (1, "")


def test_status_tells_the_last_incidents(run, capsys):
    found = [
        {"kind": "repeated", "step": 3, "finite": True},
        {"kind": "rollback", "to": 4, "first": 5, "end": 8, "why": "bad luck", "skip": True},
        {"kind": "copies", "why": "they differ"},
    ]
    (run / "incidents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found) + "{")
    text = said(capsys, run)[1]
    assert "step 3 was not finite, and was finite then: suspect the hardware" in text
    assert "rollback      steps 5 to 7: bad luck; back to step 4 without their data" in text
    assert "copies        they differ" in text


def test_status_draws_the_loss(run, capsys):
    records = [{"step": step, "loss": 9.0 - step} for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    text = said(capsys, run)[1]
    assert "loss curve    █▇▆▅▄▃▂▁\n" in text and "steps 1 to 8, 1.0000 to 8.0000" in text


def test_status_of_a_folder_lists_its_runs(run, tmp_path, capsys):
    other = tmp_path / "broken"
    other.mkdir()
    (other / "config.toml").write_text("nonsense")
    (tmp_path / "no run").mkdir()
    (run / "exit.json").write_text(json.dumps({"code": 85, "reason": "stopped at step 20"}))
    code, text = said(capsys, tmp_path)
    lines = text.splitlines()
    assert code == 0 and len(lines) == 3
    assert lines[1].split()[:4] == ["a", '"run"', "of", "mine"]
    assert "25/40  1.2346           -  exit code 85: stopped at step 20" in lines[1]
    assert lines[2].startswith("broken") and "cannot be used" in lines[2]


@pytest.mark.parametrize("since", [0, 10, 2000])
def test_list_of_runs_tells_the_last_validation_loss_however_long_ago(run, tmp_path, capsys, since):
    records = [{"step": 3, "eval/loss": 9.0}, {"step": 5, "eval/loss": 3.21098, "eval/news/loss": 1.0}]
    records += [{"step": 6 + n, "loss": 2.5, "tokens_per_s": 1.0, "long": "x" * 50} for n in range(since)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + '{"step": 99')
    lines = said(capsys, tmp_path)[1].splitlines()
    assert lines[0].split() == ["run", "step", "loss", "validation", "state"]
    assert f"  {'2.5000' if since else '-'}      3.2110  " in lines[1]


@pytest.mark.parametrize(("code", "same"), [(85, False), (87, True), (88, True), (78, True)])
def test_status_says_whether_a_new_start_ends_the_same_way(run, capsys, code, same):
    (run / "exit.json").write_text(json.dumps({"code": code, "reason": "so", "when": "now"}))
    assert ("ends the same way unless something is changed" in said(capsys, run)[1]) == same


def test_status_tells_who_runs_and_who_was_killed(run, capsys):
    holder = run / "lease" / "epoch-000000001"
    holder.write_text(json.dumps(asdict(Holder.me())))
    assert f"  running       {Holder.me()}".rpartition(" since")[0] in said(capsys, run)[1]
    holder.write_text(json.dumps(asdict(replace(Holder.me(), started="1"))))
    assert "without a word (killed?)" in said(capsys, run)[1]


def test_job_of_a_directory_with_spaces_and_quotes_can_be_read(run):
    job = read_job(run)
    assert job.job.directory == run.resolve()
    assert job.train.steps == 40


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999 "), (1_048_576, "1.05 M"), (6.9e15, "6.9 P"), (12, "12 ")]
)
def test_scaled_has_three_digits(number, text):
    assert scaled(number) == text


def test_run_is_looked_at_from_anywhere_as_from_the_folder_it_was_started_in(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    home = tmp_path / "home"
    home.mkdir()
    (home / "hooks_of_mine_at_home.py").touch()
    (run / "config.toml").write_text('imports = ["hooks_of_mine_at_home"]\n' + CONFIG)
    (run / "environment.json").write_text(json.dumps({"folder": str(home)}))
    monkeypatch.chdir(tmp_path)
    code, text = said(capsys, run.relative_to(tmp_path))
    assert code == 0 and "step 25" in text
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "hooks_of_mine_beside_the_job.py").touch()
    place = json.dumps({"folder": str(tmp_path), "config_folder": str(beside)})
    (run / "environment.json").write_text(place)
    (run / "config.toml").write_text('imports = ["hooks_of_mine_beside_the_job"]\n' + CONFIG)
    assert said(capsys, run.relative_to(tmp_path))[0] == 0
    (run / "environment.json").write_text("[")
    (run / "config.toml").write_text(CONFIG)
    assert said(capsys, run.relative_to(tmp_path))[0] == 0


def test_status_tells_how_each_parameter_is_trained(run, capsys):
    assert main(["status", str(run), "--parameters"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("  AdamW  lr 0.001  decay 0.1") and "    embed.weight" in said


def test_docs_tell_every_exit_code():
    docs = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    rows = [f"| {code.value} | {code.name.lower()} |" for code in ExitCode]
    assert [row for row in rows if row not in docs] == []


FILES = ("config.toml", "metrics.jsonl", "exit.json", "ledger.jsonl", "incidents.jsonl", "history.jsonl",
         "environment.json", "starts.jsonl", "wandb-id", "lease/epoch-000000001", "lease/beat-000000001",
         "checkpoints/PROGRESS", "checkpoints/step-000000020/manifest.json", "hang/verdict.txt")  # fmt: skip
DAMAGE = {
    "empty": b"",
    "half": b'{"step": 25, "code": 8',
    "bytes": bytes(range(256)),
    "list": b"[]\n",
    "number": b"7\n",
    "null": b"null\n",
    "strings": json.dumps(
        dict.fromkeys(("step", "loss", "code", "kind", "key", "why", "stretch", "tokens", "when"), "x")
    ).encode()
    + b"\n",
    "nulls": json.dumps(
        dict.fromkeys(("step", "loss", "code", "kind", "key", "why", "stretch", "tokens", "when"))
    ).encode()
    + b"\n",
    "ledger": json.dumps(
        {"stretch": 0, "began": "x", "at": None, "from_step": [], "step": {}, "spans": 3, "ended": "no"}
    ).encode()
    + b"\n",
    "kinds": b'{"kind": "rollback", "first": null, "end": "x"}\n{"kind": "repeated"}\n{"kind": "other"}\n',
    "crash": b'{"failed": true, "step": 20, "code": 1}\n' * 3,
}


@pytest.mark.parametrize("name", FILES)
def test_status_has_no_traceback_whatever_a_file_holds(run, capsys, name):
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind, data in DAMAGE.items():
        path.write_bytes(data)
        for arguments in ([run], [run, "--exit-code"], [run.parent]):
            assert main(["status", *map(str, arguments)]) in range(90), kind
    for make in (path.mkdir, lambda: path.symlink_to(path), lambda: path.symlink_to("/nowhere/at/all")):
        path.unlink(missing_ok=True) if not path.is_dir() or path.is_symlink() else path.rmdir()
        make()
        for arguments in ([run], [run, "--exit-code"], [run.parent]):
            assert main(["status", *map(str, arguments)]) in range(90), make


@pytest.mark.parametrize("kind", ["nothing", "file", "empty", "links", "hidden"])
def test_status_and_doctor_have_no_traceback_on_any_folder(tmp_path, capsys, kind):
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("x")
    elif kind != "nothing":
        place.mkdir()
        if kind == "links":
            (place / "self").symlink_to(place)
            (place / "config.toml").symlink_to(place / "config.toml")
        if kind == "hidden":
            (place / "a" / "config.toml").mkdir(parents=True)
    for command in ("status", "doctor"):
        assert main([command, str(place)]) in (0, 1, 78)


def test_status_tells_a_crash_loop(run, capsys):
    line = {
        "failed": True,
        "step": 20,
        "code": 1,
        "job": "7",
        "nodes": "n[1-2]",
        "when": "2026-11-23T10:00:00",
    }
    (run / "starts.jsonl").write_text((json.dumps(line) + "\n") * 3)
    text = said(capsys, run)[1]
    assert "3 starts in a row failed at step 20 without a new checkpoint, the last with exit code 1" in text


FOREIGN = """
from pathlib import Path

Path(__file__).with_name("executed").touch()
"""


@pytest.fixture
def foreign(run, tmp_path):
    """A run whose configuration names modules that say when they are executed."""
    home = tmp_path / "of others"
    home.mkdir()
    for name in ("module_of_others", "hook_of_others"):
        (home / f"{name}.py").write_text(FOREIGN)
    hook = '[hooks.theirs]\ntype = "class"\npath = "hook_of_others:Theirs"\n'
    (run / "config.toml").write_text('imports = ["module_of_others"]\n' + CONFIG + hook)
    (run / "environment.json").write_text(json.dumps({"folder": str(home), "config_folder": str(home)}))
    return home / "executed"


def test_looking_at_a_run_executes_nothing_of_it_and_says_so(run, foreign, capsys):
    assert "not decoded   what needs module_of_others, hook_of_others:Theirs" in said(capsys, run)[1]
    assert "25/40" in said(capsys, run.parent)[1]
    assert said(capsys, run, "--exit-code")[0] == 1
    assert not foreign.exists()


def test_taking_weights_of_a_run_executes_nothing_of_it(run, foreign):
    manifest = run / "checkpoints" / "step-000000020" / "manifest.json"
    manifest.write_text("{}")
    model = origin_of(f"{run}@20").model()
    assert model is not None and plain(model)["dim"] == 32
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace("[model]", '[model]\ntype = "theirs"')
    )
    with pytest.raises(ConfigError, match=r"theirs(.|\n)*imports module_of_others, which is not done here"):
        origin_of(f"{run}@20").model()
    assert not foreign.exists()


def test_key_of_a_change_that_is_no_text_is_passed_over(run, capsys):
    (run / "history.jsonl").write_text(
        '{"key": [1]}\n{"key": "train.steps", "old": 1, "new": 2, "step": 3}\n'
    )
    assert "train.steps: 1 -> 2 at step 3" in said(capsys, run)[1]
    append_history(run, 4, [Change("train.steps", 2, 3)])


def test_status_of_a_running_job_tells_that_its_next_failure_is_the_last(run, capsys):
    holder = replace(Holder.me(), job="7")
    (run / "lease" / "epoch-000000001").write_text(json.dumps(asdict(holder)))
    (run / "starts.jsonl").write_text('{"failed": true, "step": 0, "code": 1}\n')
    (run / "checkpoints" / "step-000000020").rmdir()
    assert "last chance" not in said(capsys, run)[1]
    (run / "starts.jsonl").write_text('{"failed": true, "step": 0, "code": 1}\n' * 2)
    assert "last chance   2 starts failed at step 0; a third is the last" in said(capsys, run)[1]
