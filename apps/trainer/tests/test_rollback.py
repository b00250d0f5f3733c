"""Trouble in a run of this process: repeated, rolled back, or the end; also when it is killed on the way."""

import json
import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from forge_ckpt.store import Store
from forge_resilience.exit_codes import ExitCode
from forge_trainer.config.job import load_job
from forge_trainer.launch import run_job
from forge_trainer.recovery import recovery
from forge_trainer.steps.text import TextStep

JOB = """
[job]
name = "{name}"
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
{skip}
[[data.sources]]
{source}
[train]
steps = 18
global_batch = 2
micro_batch = 2
log_every_steps = 1
[optimizer]
lr = 1e-2
[schedule]
[checkpoint]
every_steps = 2
keep = 2
[resilience]
check_every_steps = 1
max_bad_steps = 3
watchdog = false
"""


FILES = f"""
type = "files"
paths = ["{logging.__file__}"]
validation = ["{logging.__file__}"]
held_out = 0.0
"""

STREAM = """
type = "hf"
path = "{rows}"
streaming = true
lanes = 2
validation = "{rows}"
"""


class Killed(BaseException):
    """As a kill would end the process."""


class Fault:
    """Spoils steps of a run, by number or by their data, as long as there are attempts left."""

    def __init__(self, monkeypatch, how):
        self.how, self.steps, self.data, self.left = how, set(), set(), 10**9
        self.seen: dict[int, int] = {}
        self._train = TextStep.train
        monkeypatch.setattr(TextStep, "train", lambda step, batch, number: self.train(step, batch, number))

    def train(self, step, batch, number):
        key = hash(tuple(micro.inputs["tokens"].numpy().tobytes() for micro in batch))
        self.seen.setdefault(number, key)
        bad = (number in self.steps or key in self.data) and self.left > 0
        self.left -= bad
        return self.how(self._train, step, batch, number) if bad else self._train(step, batch, number)


def infinite_gradient(train, step, batch, number):
    hook = next(step.parts[0].parameters()).register_hook(lambda gradient: gradient * float("inf"))
    try:
        return train(step, batch, number)
    finally:
        hook.remove()


def high_loss(train, step, batch, number):
    out = train(step, batch, number)
    with torch.no_grad():
        next(step.parts[0].parameters()).mul_(1.5)
    return replace(out, loss=out.loss + 5)


def infinite_weight(train, step, batch, number):
    out = train(step, batch, number)
    with torch.no_grad():
        step.parts[0].get_parameter("embed.weight")[270] = float("inf")  # no byte: nothing computes with it
    return out


@pytest.fixture
def start(tmp_path):
    """Starts a run in this process; returns its exit code."""

    def run(*overrides, name="tiny", skip=None, source=FILES):
        path = tmp_path / f"{name}.toml"
        left_out = "" if skip is None else f"skip = [{{ start_step = {skip[0]}, end_step = {skip[1]} }}]"
        path.write_text(JOB.format(name=name, root=tmp_path, source=source, skip=left_out))
        return run_job(load_job(path, overrides), 0)

    return run


@pytest.fixture
def rows(tmp_path):
    """Eight files of lines of text."""
    (tmp_path / "rows").mkdir()
    lines = [line for line in Path(logging.__file__).read_text().splitlines() if line.strip()]
    for number in range(8):
        said = [json.dumps({"text": line}) for line in lines[100 * number : 100 * number + 100]]
        (tmp_path / "rows" / f"{number}.jsonl").write_text("\n".join(said))
    return tmp_path / "rows"


def ended(folder):
    """All tensors of the newest checkpoint as bytes, and all losses."""
    store = Store(folder / "checkpoints")
    tensors = store.tensors(store.newest().step)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    return {
        key: value.flatten().view(torch.uint8).numpy().tobytes() for key, value in tensors.items()
    }, losses


def incidents(folder, kind):
    path = folder / "incidents.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["kind"] == kind]


def test_line_of_a_rollback_that_lacks_something_is_refused_by_name(start, tmp_path, capsys):
    assert start("--train.steps=4") == 0
    (tmp_path / "tiny" / "incidents.jsonl").write_text('{"kind": "rollback", "to": 2}\n')
    assert start("--train.steps=4") == ExitCode.CONFIG
    assert "incidents.jsonl: a rollback without first, end" in capsys.readouterr().err


SPIKES = "--resilience.spike_deviations=20", "--resilience.spike_window=8", "--resilience.spike_steps=3"


@pytest.mark.parametrize(
    ("how", "first", "to", "more"),
    [(infinite_gradient, 5, 4, ()), (high_loss, 9, 8, SPIKES)],
    ids=["not finite", "spikes"],
)
def test_bad_window_of_data_is_left_out_and_the_run_is_one_without_it(
    start, tmp_path, monkeypatch, capsys, how, first, to, more
):
    fault = Fault(monkeypatch, how)
    assert start(*more, name="without", skip=(first, first + 3)) == 0
    fault.seen.clear()
    assert start(*more, name="clean") == 0
    fault.data = {fault.seen[step] for step in range(first, first + 3)}
    assert start(*more) == 0
    assert ended(tmp_path / "tiny") == ended(tmp_path / "without") != ended(tmp_path / "clean")
    (found,) = incidents(tmp_path / "tiny", "rollback")
    assert (found["to"], found["first"], found["end"], found["skip"]) == (to, first, first + 3, True)
    said = capsys.readouterr().err
    assert f"back to the checkpoint of step {to}, without the data of steps {first} to {first + 2}" in said
    assert start(*more, "--train.log_every_steps=2") == 0  # a start of a complete run takes the same data


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_window_of_a_stream_is_left_out_and_the_run_is_one_without_it(
    start, rows, tmp_path, monkeypatch, workers
):
    """The lanes go back to their places in the checkpoint, and read past what is left out."""
    fault, read = Fault(monkeypatch, infinite_gradient), f"--data.workers={workers}"
    stream = STREAM.format(rows=rows)
    assert start(read, name="without", skip=(5, 8), source=stream) == 0
    fault.seen.clear()
    assert start(read, name="clean", source=stream) == 0
    fault.data = {fault.seen[step] for step in range(5, 8)}
    assert start(read, source=stream) == 0
    assert ended(tmp_path / "tiny") == ended(tmp_path / "without") != ended(tmp_path / "clean")
    (found,) = incidents(tmp_path / "tiny", "rollback")
    assert (found["to"], found["first"], found["end"], found["skip"]) == (4, 5, 8, True)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["store", "stream"])
@pytest.mark.parametrize("moment", ["recorded", "removed", "loaded", "later"])
def test_run_killed_on_its_way_back_ends_the_same(start, rows, tmp_path, monkeypatch, moment, streams):
    fault = Fault(monkeypatch, infinite_gradient)
    start = partial(start, source=STREAM.format(rows=rows) if streams else FILES)
    assert start(name="without", skip=(5, 8)) == 0
    fault.seen.clear()
    assert start(name="clean") == 0
    fault.data = {fault.seen[step] for step in range(5, 8)}

    def kill(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "recorded":
            real = recovery.append_incident
            patch.setattr(recovery, "append_incident", lambda *a: (real(*a), a[1] == "rollback" and kill()))
        elif moment == "removed":
            patch.setattr("forge_trainer.run.reshard", kill)
        elif moment == "loaded":
            patch.setattr("forge_trainer.data.data.Data.open", kill)
        else:
            train = TextStep.train
            patch.setattr(TextStep, "train", lambda s, b, n: kill() if n == 11 else train(s, b, n))
        with pytest.raises(Killed):
            start()
    assert start() == 0
    assert ended(tmp_path / "tiny") == ended(tmp_path / "without")
    assert len(incidents(tmp_path / "tiny", "rollback")) == 1


@pytest.mark.slow
def test_margin_goes_further_back_and_leaves_out_more(start, tmp_path, monkeypatch):
    fault = Fault(monkeypatch, infinite_gradient)
    margin = "--resilience.rollback_margin_steps=2"
    assert start(name="without", skip=(5, 12)) == 0
    fault.seen.clear()
    assert start(name="clean") == 0
    fault.data = {fault.seen[step] for step in range(7, 10)}
    assert start(margin) == 0
    assert incidents(tmp_path / "tiny", "rollback")[0]["to"] == 4
    assert ended(tmp_path / "tiny") == ended(tmp_path / "without")


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "taken"), [(0, 0), (2, 2)])
def test_trouble_that_comes_again_ends_the_run(start, tmp_path, monkeypatch, capsys, allowed, taken):
    fault = Fault(monkeypatch, infinite_gradient)
    fault.steps = set(range(5, 100))
    for _ in range(2):
        assert start(f"--resilience.max_rollbacks={allowed}") == ExitCode.NOT_FINITE
        assert len(incidents(tmp_path / "tiny", "rollback")) == taken
    said = capsys.readouterr().err
    assert ("2 rollbacks near here have not helped" in said) == bool(taken)


@pytest.mark.slow
def test_trouble_before_the_first_checkpoint_ends_the_run(start, monkeypatch, capsys):
    fault = Fault(monkeypatch, infinite_gradient)
    fault.steps = set(range(1, 100))
    assert start() == ExitCode.NOT_FINITE
    assert "there is no checkpoint from before it" in capsys.readouterr().err


@pytest.mark.slow
def test_spikes_that_come_again_end_the_run_with_a_code_of_their_own(start, monkeypatch):
    fault = Fault(monkeypatch, high_loss)
    fault.steps = set(range(9, 100))
    assert start(*SPIKES, "--resilience.max_rollbacks=1") == ExitCode.DIVERGED


@pytest.mark.parametrize(("attempts", "finite"), [(1, True), (2, False)])
def test_step_that_was_not_finite_is_repeated_once(start, tmp_path, monkeypatch, capsys, attempts, finite):
    fault = Fault(monkeypatch, infinite_gradient)
    assert start(name="clean") == 0
    fault.steps, fault.left = {7}, attempts
    assert start() == 0
    assert (ended(tmp_path / "tiny") == ended(tmp_path / "clean")) == finite
    (found,) = incidents(tmp_path / "tiny", "repeated")
    assert (found["step"], found["finite"]) == (7, finite)
    assert ("suspect the hardware" in capsys.readouterr().err) == finite


def test_run_goes_on_where_a_repeated_step_cannot_be_written_down(start, tmp_path, monkeypatch):
    fault = Fault(monkeypatch, infinite_gradient)
    fault.steps, fault.left = {7}, 1
    (tmp_path / "tiny" / "incidents.jsonl").mkdir(parents=True)
    assert start() == 0


def test_weights_that_are_not_finite_are_never_saved(start, tmp_path, monkeypatch):
    fault = Fault(monkeypatch, infinite_weight)
    assert start(name="without", skip=(7, 8)) == 0
    fault.seen.clear()
    assert start(name="clean") == 0
    fault.data = {fault.seen[7]}
    saved = []
    real = Store.save

    def looked_at(store, step, snapshot):
        weights = [box.values for key, box in snapshot.tensors.items() if key.startswith("model.")]
        saved.append(all(torch.isfinite(values).all() for values in weights))
        return real(store, step, snapshot)

    monkeypatch.setattr(Store, "save", looked_at)
    assert start() == 0
    assert all(saved) and len(saved) > 5
    assert ended(tmp_path / "tiny") == ended(tmp_path / "without")


@pytest.mark.slow
def test_checkpoint_from_before_trouble_outlives_newer_ones(start, tmp_path, monkeypatch):
    fault = Fault(monkeypatch, infinite_gradient)
    assert start(name="clean") == 0
    fault.data = {fault.seen[step] for step in range(5, 13)}
    assert start("--resilience.max_bad_steps=8") == 0
    assert incidents(tmp_path / "tiny", "rollback")[0]["to"] == 4


def test_forge_data_sample_leaves_out_what_a_rollback_has_left_out(tmp_path):
    from forge_data.loading.sample import with_rollbacks
    from forge_data.order.skips import SkipConfig
    from forge_trainer.recovery.incidents import ROLLBACK, Rollback, append_incident, read_rollbacks

    config = load_job("configs/runs/debug.toml", ["--data.skip=[{start_step=1,end_step=2}]"]).value.data
    for made in (
        Rollback(4, 9, 12, "why", True, 2),
        Rollback(4, 9, 12, "why", False),
        Rollback(20, 21, 22, "x", True),
    ):
        append_incident(tmp_path, ROLLBACK, asdict(made))
    skips = [skip for one in read_rollbacks(tmp_path) for skip in one.skipped()]
    assert skips[0] == SkipConfig(start_step=7, end_step=14)
    assert with_rollbacks(config, tmp_path).skip == [*config.skip, *skips]
