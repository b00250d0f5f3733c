"""Norms and the noise scale from the configuration: bits of training, restarts, and what is refused."""

import signal

import pytest
from runs import losses, records, state

NORMS = '\n[hooks.layers]\ntype = "norms"\nevery_steps = 4\n'
NOISE = ("--step.noise_scale_every_steps=2",)


def measures(run):
    """What was measured, by step."""
    names = ("norms/", "noise_scale")
    return [
        {k: v for k, v in record.items() if k.startswith(names) or k == "step"}
        for record in records(run)
        if any(key.startswith(names) for key in record)
    ]


def test_measures_change_no_bit_and_go_on_after_a_kill(forge, tiny, tmp_path):
    forge("train", tiny(steps=10, name="plain.toml", root=tmp_path / "plain"))
    forge("train", tiny(steps=10, name="whole.toml", root=tmp_path / "whole", extra=NORMS), *NOISE)
    plain, whole = tmp_path / "plain" / "tiny", tmp_path / "whole" / "tiny"
    assert losses(whole) == losses(plain)
    found = measures(whole)
    assert [line["step"] for line in found if "norms/grad/layers.1" in line] == [4, 8, 10]
    assert [line["step"] for line in found if "noise_scale" in line] == list(range(2, 11))
    cut = tiny(steps=10, extra=NORMS)
    assert forge.stop_at(cut, 5, signal.SIGKILL, 1, *NOISE) != 0
    forge("train", cut, *NOISE)
    assert measures(tmp_path / "runs" / "tiny") == found
    assert state(tmp_path / "runs" / "tiny") == state(whole)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--train.micro_batch=8",), "each has one micro-batch, and two are needed"),
        (("--mesh.pp=2",), "measure without a pipeline"),
    ],
)
def test_noise_scale_that_cannot_be_measured_is_refused(forge, tiny, flags, error):
    done = forge("train", tiny(steps=3), *NOISE, *flags, check=False)
    assert done.returncode == 78 and error in done.stderr
