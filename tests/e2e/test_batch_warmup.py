"""A run whose batch grows: the same stream of samples, cut into other steps, through a kill."""

import signal

import numpy as np
import pytest
from runs import losses, records, state

GROWS = "--train.batch_warmup=[{global_batch=2,steps=3},{global_batch=4,steps=3}]"
PLAIN = [2, 2, 2, 4, 4, 4, 8, 8, 8, 8]
STILL = ("--optimizer.lr=1e-30", "--optimizer.weight_decay=0.0")


@pytest.mark.slow
def test_batch_that_grows_reads_one_stream(forge, tiny, tmp_path):
    """With weights that stand still, the loss of a step is the mean over those of its sequences."""
    told = forge("train", tiny(steps=10), GROWS, *STILL).stdout
    assert "10 steps of 2 to 4 to 8 x 32 tokens: 1.6 k tokens" in told
    run = tmp_path / "runs" / "tiny"
    logged = [record for record in records(run) if "loss" in record]
    ends = np.cumsum(PLAIN)
    assert [record["tokens"] for record in logged] == (32 * ends).tolist()
    same = ("--train.global_batch=2", *STILL)
    forge("train", tiny(steps=25, name="plain.toml", root=tmp_path / "plain"), *same)
    pairs = np.array(losses(tmp_path / "plain" / "tiny"))
    starts = ends - PLAIN
    expected = [pairs[a // 2 : b // 2].mean() for a, b in zip(starts, ends, strict=True)]
    assert losses(run) == pytest.approx(expected, rel=1e-6)
    assert "10 steps of 2 to 4 to 8 x 32 tokens" in forge("status", run).stdout


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_run_with_a_growing_batch_ends_as_if_it_was_not_killed(forge, tiny, tmp_path, workers):
    flags = (GROWS, f"--data.workers={workers}")
    forge("train", tiny(steps=10, name="whole.toml", root=tmp_path / "whole"), *flags)
    cut = tiny(steps=10)
    assert forge.stop_at(cut, 5, signal.SIGKILL, 1, *flags) != 0
    forge("train", cut, *flags)
    assert losses(tmp_path / "runs" / "tiny") == losses(tmp_path / "whole" / "tiny")
    assert state(tmp_path / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")


@pytest.mark.slow
@pytest.mark.dist
def test_run_with_a_growing_batch_goes_on_with_another_number_of_ranks(forge, tiny, tmp_path):
    flags = (GROWS, "--train.micro_batch=1")
    forge("train", tiny(steps=10, name="whole.toml", root=tmp_path / "whole"), *flags)
    cut = tiny(steps=10)
    assert forge.stop_at(cut, 4, signal.SIGTERM, 2, *flags) != 0
    forge("train", cut, *flags)
    assert losses(tmp_path / "runs" / "tiny") == pytest.approx(losses(tmp_path / "whole" / "tiny"), rel=1e-6)


def test_ranks_that_cannot_share_the_first_batch_are_refused(forge, tiny):
    done = forge("train", tiny(steps=10), GROWS, "--train.micro_batch=4", check=False)
    assert done.returncode == 78
    assert "global batch of 2, which is no multiple of train.micro_batch = 4" in done.stderr
