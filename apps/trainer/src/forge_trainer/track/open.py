"""Opens the trackers a job asks for."""

from contextlib import ExitStack

from forge_config import plain

from forge_trainer.job import Job
from forge_trainer.track.base import Tracker
from forge_trainer.track.console import Console
from forge_trainer.track.jsonl import Jsonl


def open_trackers(job: Job, first_step: int, stack: ExitStack) -> list[Tracker]:
    """Console and `metrics.jsonl`, and what `[track]` adds; `stack` closes them."""
    directory = job.job.directory
    trackers: list[Tracker] = [
        Console(job.job.name, first_step, job.train.steps),
        Jsonl(directory / "metrics.jsonl", first_step),
    ]
    if job.track.tensorboard:
        from forge_trainer.track.tensorboard import TensorBoard

        trackers.append(TensorBoard(directory / "tensorboard", first_step))
    if job.track.wandb is not None:
        from forge_trainer.track.wandb import Wandb

        trackers.append(Wandb(job.track.wandb, directory, job.job.name, plain(job)))
    for tracker in trackers:
        stack.callback(tracker.close)
    return trackers
