"""Evaluation of a run: sets, off and on again, and `forge eval` afterwards."""

import json

import pytest
from runs import records, state

SETS = """
[eval.sets.all]
samples = 0
sources = [{{ type = "files", paths = ["{text}/json_tool.py"] }}]
[eval.sets.logging]
samples = 5
sources = [{{ type = "files", paths = ["{text}/logging_*.py"] }}]
"""


def evaluations(run):
    return [
        {name: value for name, value in record.items() if name.startswith("eval/")}
        for record in records(run)
        if "eval/loss" in record
    ]


def test_sets_are_logged_and_forge_eval_says_the_same(forge, tiny, tmp_path, text):
    said = forge("train", tiny(steps=4, extra=SETS.format(text=text)), "--eval.every_steps=2").stdout
    assert "all loss" in said and "logging loss" in said
    run, out = tmp_path / "runs" / "tiny", tmp_path / "out.json"
    found = evaluations(run)
    assert len(found) == 2 and "eval/all/bits_per_byte" in found[0]
    shown = forge("eval", run, "--json", out).stdout
    told = json.loads(out.read_text())
    assert told.pop("step") == 4 and told == pytest.approx(found[-1], rel=1e-6)
    assert "at step 4, logging: loss" in shown and "logging" in forge("status", run).stdout


def test_evaluation_can_be_switched_off_and_on_and_changes_nothing(forge, tiny, tmp_path, text):
    job, run = tiny(steps=6), tmp_path / "runs" / "tiny"
    forge("train", job, "--train.steps=3", "--eval.every_steps=0")
    assert evaluations(run) == []
    with_sets = tiny(steps=6, extra=SETS.format(text=text))
    forge("train", with_sets, "--change", "--eval.every_steps=1")
    assert len(evaluations(run)) == 3
    off = tmp_path / "off"
    forge("train", tiny(steps=6, root=off), "--eval.every_steps=0")
    assert state(run) == state(off / "tiny")


def test_run_without_text_to_evaluate_on_says_so(forge, tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    job = tiny(steps=3)
    job.write_text(job.read_text().replace("held_out = 0.3", "held_out = 0"))
    assert "not evaluated" in forge("train", job).stderr
    refused = forge("eval", run, check=False)
    assert refused.returncode == 78 and "no text to evaluate on" in refused.stderr


def test_results_that_cannot_be_written_are_an_error_with_the_name(forge, tiny, tmp_path):
    forge("train", tiny(steps=3))
    refused = forge("eval", tmp_path / "runs" / "tiny", "--json", tmp_path / "no" / "x.json", check=False)
    assert refused.returncode == 78 and "x.json" in refused.stderr


SMALL = """
[[data.sources]]
type = "hf"
path = "{path}"
messages = "messages"
"""


SLOW = pytest.mark.slow


@pytest.mark.parametrize("conversations", [pytest.param(1, marks=SLOW), 5, pytest.param(30, marks=SLOW)])
def test_a_small_chat_file_trains_and_says_why_it_is_not_evaluated(forge, tiny, tmp_path, conversations):
    path = tmp_path / f"chat{conversations}.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n} + {n}?"},
                {"role": "assistant", "content": f"{2 * n}"},
            ]
        }
        for n in range(conversations)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    job = tiny(steps=3)
    before, _, after = job.read_text().partition("[[data.sources]]")
    job.write_text(f"{before}{SMALL.format(path=path)}{after[after.index(chr(10) + '[') :]}")
    said = forge("train", job, "--eval.every_steps=1").stderr
    assert records(tmp_path / "runs" / "tiny")[-1]["step"] == 3
    assert ("this run is not evaluated" in said) == (conversations < 30)
    assert bool(evaluations(tmp_path / "runs" / "tiny")) == (conversations == 30)
    if conversations == 30:
        return
    expected = "there is a single document, and" if conversations == 1 else "chooses none of 5 documents"
    assert expected in said
    refused = forge("eval", tmp_path / "runs" / "tiny", check=False)
    assert refused.returncode == 78 and expected in refused.stderr
