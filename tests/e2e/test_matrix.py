"""Every optimizer with every schedule and every loss: cut short at a random step, a run ends as it would.

All combinations are trained by ranks that stay warm, each start a build of its own; two by the command.
"""

import itertools
import os
import random
import signal
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import pytest
from forge_parallel.testing import run_ranks
from forge_trainer.build import build
from forge_trainer.config.job import load_job
from forge_trainer.guards.guards import Guard
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
CASES = [
    (*names, ranks)
    for names in itertools.product(OPTIMIZERS, SCHEDULES, LOSSES)
    for ranks in (1, 2)
    if names[0] != "schedule-free" or names[1] in ("constant", "none")  # a decay is refused
]
QUICK = [*random.Random(6).sample(CASES, 4), ("muon", "wsd", "z-loss", 2)]
BY_COMMAND = random.Random(6).sample([case for case in CASES if case[-1] == 1], 2)


def flags_of(optimizer: str, schedule: str, loss: str) -> list[str]:
    flags = [f"--optimizer.{key}" for key in OPTIMIZERS[optimizer]]
    flags += [f"--schedule.{key}" for key in (f"type={schedule}", *SCHEDULES[schedule])]
    flags += [f"--loss.{key}" for key in LOSSES[loss]]
    return flags + ([] if schedule == "none" else ["--schedule.warmup_steps=2"])


def step_of(*case: object) -> int:
    """The step at which a case is cut short."""
    return random.Random("".join(map(str, case))).randrange(1, STEPS - 3)


def started(path: str, flags: list[str], stop: int = 0) -> tuple[str, int]:
    """One start of a run: how it ended, and where. The last rank is signalled as it reaches step `stop`."""
    # `run_ranks` has made the process group already
    with ExitStack() as stack, patch("forge_trainer.build.process_group", lambda *_, **__: nullcontext()):
        run = build(load_job(path, flags).value, stack)

        class Signalled(Guard):
            def observe(self, progress, out):
                if progress.step == stop and run.env.rank == run.env.world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)

        run.guards.insert(0, Signalled())
        return run.train().name, run.progress.step


def three_starts(whole: str, cut: str, flags: list[str], stop: int) -> list[tuple[str, int]]:
    return [started(whole, flags), started(cut, flags, stop), started(cut, flags)]


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("optimizer", "schedule", "loss", "ranks"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_run_that_was_cut_short_ends_like_a_whole_one(tiny, tmp_path, optimizer, schedule, loss, ranks):
    whole = str(tiny(steps=STEPS, name="whole.toml", root=tmp_path / "whole"))
    cut = str(tiny(steps=STEPS, name="cut.toml", root=tmp_path / "cut"))
    for root in ("whole", "cut"):
        (tmp_path / root / "tiny").mkdir(parents=True)  # the command claims it
    stop = step_of(optimizer, schedule, loss, ranks)
    flags = flags_of(optimizer, schedule, loss)
    for first, second, third in run_ranks(three_starts, ranks, whole, cut, flags, stop, timeout_s=240):
        assert first[1] == third[1] == STEPS
        assert second[0] == "STOP" and second[1] in (stop, stop + 1)
    assert len(losses(tmp_path / "whole" / "tiny")) == STEPS
    assert losses(tmp_path / "cut" / "tiny") == losses(tmp_path / "whole" / "tiny")
    assert state(tmp_path / "cut" / "tiny") == state(tmp_path / "whole" / "tiny")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("optimizer", "schedule", "loss", "ranks"), BY_COMMAND)
def test_command_that_was_cut_short_ends_like_a_whole_one(
    forge, tiny, tmp_path, optimizer, schedule, loss, ranks
):
    flags = flags_of(optimizer, schedule, loss)
    forge("train", tiny(steps=STEPS, root=tmp_path / "whole"), *flags, ranks=ranks)
    folder = tmp_path / "cut"
    folder.mkdir()
    cut = tiny(steps=STEPS, name="cut/tiny.toml", root=folder / "runs")
    step = step_of(optimizer, schedule, loss, ranks)
    assert forge.stop_at(cut, step, signal.SIGTERM, ranks, *flags) == 85
    assert len(losses(folder / "runs" / "tiny")) < STEPS, "it was cut"
    forge("train", cut, *flags, ranks=ranks)
    assert losses(folder / "runs" / "tiny") == losses(tmp_path / "whole" / "tiny")
    assert state(folder / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")
