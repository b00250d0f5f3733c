"""A run of this process, put together and trained: what is wired to what."""

import json
import logging

import pytest
from forge_data.sources.config import FilesConfig
from forge_model.decoder.config import DecoderConfig
from forge_resilience.deadline import SAVE, Deadline
from forge_trainer.config.job import load_job
from forge_trainer.launch import run_job
from forge_trainer.run_dir.files import read_history

JOB = """
[job]
name = "tiny"
root = "{root}"
[model]
vocab_size = 272
dim = 16
num_layers = 1
max_tokens = 16
attention = {{ num_heads = 2 }}
[data]
max_tokens = 16
cache_dir = "{root}/cache"
validation_samples = 4
[[data.sources]]
type = "files"
paths = ["{text}"]
validation = ["{text}"]
held_out = 0.0
[train]
steps = 4
global_batch = 2
micro_batch = 2
log_every_steps = 2
[optimizer]
lr = 1e-3
[schedule]
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def start(tmp_path):
    """Starts the run in this process; returns its exit code."""
    path = tmp_path / "tiny.toml"
    path.write_text(JOB.format(root=tmp_path, text=logging.__file__))
    return lambda *overrides, change=False: run_job(load_job(path, overrides), 0, change=change)


def test_deadline_hears_of_all_that_comes_between_two_verdicts_and_of_saves(start, monkeypatch):
    heard = []
    monkeypatch.setattr(Deadline, "observe", lambda self, kind, seconds: heard.append(kind))
    assert start("--eval.every_steps=2") == 0
    assert {name: heard.count(name) for name in ("data", "step", "log", "evaluate")} == {
        "data": 4,
        "step": 4,
        "log": 4 + 4 + 2,  # two guards that count, and the records
        "evaluate": 2,
    }
    assert (
        heard.count(SAVE) == 3 + 2
    )  # the spans of the loop and of the end, and what each save took beside training
    assert "build" not in heard


def test_change_of_a_run_that_is_complete_is_recorded(start, tmp_path):
    start()
    assert start("--train.steps=3", change=True) == 0
    events = [
        (event["step"], event["key"], event["old"], event["new"]) for event in read_history(tmp_path / "tiny")
    ]
    assert events == [(4, "train.steps", 4, 3)]
    assert start("--train.steps=3") == 0
    assert start("--train.steps=5", change=True) == 0
    assert json.loads((tmp_path / "tiny" / "exit.json").read_text())["step"] == 5


def test_run_without_text_for_validation_trains_and_says_so(start, tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "validation =" not in line))
    assert start() == 0
    assert "not evaluated" in capsys.readouterr().err


def test_sources_of_training_and_evaluation_get_what_the_model_makes_of_items(start, tmp_path, monkeypatch):
    reader, opened, packing = object(), [], FilesConfig.packing

    def seen(self, opening):
        opened.append((opening.split, opening.items))
        return packing(self, opening)

    monkeypatch.setattr(FilesConfig, "packing", seen)
    monkeypatch.setattr(DecoderConfig, "items", lambda self: reader)
    of_set = f"--eval.sets.own.sources=[{{type = 'files', paths = ['{logging.__file__}'], name = 'own'}}]"
    assert start("--eval.every_steps=2", of_set, "--train.steps=2") == 0
    assert [split for split, _ in opened].count("train") == 2 and ("validation", reader) in opened
    assert {items for _, items in opened} == {reader}
