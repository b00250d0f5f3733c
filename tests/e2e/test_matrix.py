"""Every optimizer with every schedule and every loss: cut short at a random step, a run ends as it would."""

import itertools
import random
import signal

import pytest
from runs import losses, state

OPTIMIZERS = {
    "adamw": ("type=adamw",),
    "lion": ("type=lion", "lr=1e-3"),
    "muon": ("type=muon", 'scale="match-rms-adamw"', "ema_decay=0.9"),
    "schedule-free": ("type=schedule-free-adamw",),
}
SCHEDULES = {
    "cosine": (),
    "linear": (),
    "wsd": ("decay_steps=6",),
    "constant": (),
    "rex": (),
    "inverse-sqrt": (),
    "none": (),
}
LOSSES = {
    "plain": (),
    "z-loss": ("z_loss_weight=1e-3",),
    "smoothed": ("label_smoothing=0.1", "chunk_tokens=37"),
}
STEPS = 20
CASES = [(*names, ranks) for names in itertools.product(OPTIMIZERS, SCHEDULES, LOSSES) for ranks in (1, 2)]
QUICK = random.Random(6).sample([case for case in CASES if case[-1] == 1], 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("optimizer", "schedule", "loss", "ranks"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_run_that_was_cut_short_ends_like_a_whole_one(
    forge, tiny, tmp_path, optimizer, schedule, loss, ranks
):
    flags = [f"--optimizer.{key}" for key in OPTIMIZERS[optimizer]]
    flags += [f"--schedule.{key}" for key in (f"type={schedule}", *SCHEDULES[schedule])]
    flags += [f"--loss.{key}" for key in LOSSES[loss]]
    flags += [] if schedule == "none" else ["--schedule.warmup_steps=2"]
    forge("train", tiny(steps=STEPS, root=tmp_path / "whole"), *flags, ranks=ranks)
    folder = tmp_path / "cut"
    folder.mkdir()
    cut = tiny(steps=STEPS, name="cut/tiny.toml", root=folder / "runs")
    step = random.Random(f"{optimizer}{schedule}{loss}{ranks}").randrange(1, STEPS - 3)
    assert forge.stop_at(cut, step, signal.SIGTERM, ranks, *flags) == (85 if ranks == 1 else 1)
    assert len(losses(folder / "runs" / "tiny")) < STEPS, "it was cut"
    forge("train", cut, *flags, ranks=ranks)
    assert losses(folder / "runs" / "tiny") == losses(tmp_path / "whole" / "tiny")
    assert state(folder / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")
