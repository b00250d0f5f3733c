"""Runs that begin with weights of another run or keep dense windows of checkpoints, killed on the way."""

import shutil
import signal

import pytest
import torch
from forge_ckpt import cli
from forge_ckpt.store import Store
from runs import losses, state

PARTS = (
    "--model.num_layers=3",
    "--train.init_include=['layers', 'embed']",
    "--train.init_exclude=['layers.1', 'layers.2']",
)
STILL = ("--optimizer.lr=1e-30", "--optimizer.weight_decay=0", "--schedule.type=none")
DENSE = (
    "\n[[checkpoint.dense]]\nto_step = 8\n\n[[checkpoint.dense]]\nfrom_step = 10\nto_step = 10\nevery = 1\n"
)


@pytest.fixture
def donor(forge, tiny, tmp_path):
    """A run of six steps."""
    forge("train", tiny(steps=6, name="donor.toml", root=tmp_path / "donors"))
    return tmp_path / "donors" / "tiny"


def weights(run, step):
    return {name: value for name, value in Store(run / "checkpoints").tensors(step).under("model.").items()}


def test_run_begins_with_the_parts_that_were_asked_for(forge, tiny, tmp_path, donor):
    origin = f"--train.init_from={donor}@6"
    said = forge("train", tiny(steps=1), origin, *PARTS, *STILL).stdout
    fresh = tiny(steps=1, name="fresh.toml", root=tmp_path / "fresh")
    forge("train", fresh, "--model.num_layers=3", *STILL)
    here, there = weights(tmp_path / "runs" / "tiny", 1), weights(donor, 6)
    random = weights(tmp_path / "fresh" / "tiny", 1)
    taken = {name for name in here if name.startswith(("layers.0.", "embed"))}
    assert taken and all(torch.equal(here[name], there[name]) for name in taken)
    assert all(torch.equal(here[name], random[name]) for name in here.keys() - taken)
    assert not all(torch.equal(here[name], random[name]) for name in taken)
    assert said.startswith(f"10 of 30 tensors are those of {donor}@6\n"), said


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_from_another_is_killed_and_goes_on_without_it(forge, tiny, tmp_path, donor, ranks):
    extra = (f"--train.init_from={donor}@6", *PARTS)
    forge("train", tiny(name="whole.toml", root=tmp_path / "whole"), *extra, ranks=ranks)
    cut = tiny()
    assert forge.stop_at(cut, 5, signal.SIGKILL, ranks, *extra) != 0
    shutil.rmtree(donor)
    forge("train", cut, *extra, ranks=ranks)
    assert state(tmp_path / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")
    assert losses(tmp_path / "runs" / "tiny") == losses(tmp_path / "whole" / "tiny")


@pytest.mark.parametrize(("extra", "expected"), [
    (["--train.init_from={donor}@5"], "has steps 3, 6"),
    (["--train.init_from={donor}@6", "--model.dim=48"], "dim"),
    (["--train.init_from={donor}@6", "--model.vocab_size=300"], "vocab_size"),
    (["--train.init_from={runs}@3"], "tiny"),
])  # fmt: skip
def test_weights_that_are_not_there_or_do_not_fit_are_refused_before_the_start(
    forge, tiny, tmp_path, donor, extra, expected
):
    runs = tmp_path / "runs" / "tiny"
    keys = [key.format(donor=donor, runs=runs) for key in extra]
    done = forge("train", tiny(), *keys, check=False)
    assert done.returncode == 78 and expected in done.stderr and "Traceback" not in done.stderr
    assert not (runs / "checkpoints").exists()


@pytest.mark.slow
def test_dense_windows_stay_through_a_kill_and_pruning(forge, tiny, tmp_path):
    forge("train", tiny(name="whole.toml", root=tmp_path / "whole"))
    cut = tiny(extra=DENSE)
    assert forge.stop_at(cut, 5, signal.SIGKILL, 1, "--checkpoint.keep=3") != 0
    forge("train", cut, "--checkpoint.keep=3")
    run = tmp_path / "runs" / "tiny"
    assert losses(run) == losses(tmp_path / "whole" / "tiny")
    assert Store(run / "checkpoints").steps() == [1, 2, 4, 6, 8, 9, 10, 12]
    assert cli.main(["prune", str(run), "--keep=1"]) == 0
    assert Store(run / "checkpoints").steps() == [1, 2, 4, 8, 10, 12]


def test_lower_number_of_checkpoints_to_keep_holds_before_the_next_save(forge, tiny, tmp_path):
    """On a full disk there is no next save."""
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    forge.stop_at(tiny(steps=40), 8, signal.SIGTERM, 1, "--checkpoint.keep=6", "--checkpoint.every_steps=1")
    before = Store(folder).steps()
    assert len(before) == 6
    forge("train", tiny(steps=before[-1]), "--change", "--checkpoint.keep=2", "--checkpoint.every_steps=1")
    assert Store(folder).steps() == before[-2:]
