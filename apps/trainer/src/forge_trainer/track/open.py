"""Opens the trackers of a job."""

from collections.abc import Callable
from contextlib import ExitStack

from forge_config import plain

from forge_trainer.config.job import Job
from forge_trainer.progress import Progress
from forge_trainer.run_dir.files import RunFiles
from forge_trainer.track.base import Tracker
from forge_trainer.track.console import Console
from forge_trainer.track.jsonl import Jsonl
from forge_trainer.track.steadfast import Steadfast


def open_trackers(job: Job, progress: Progress, stack: ExitStack) -> list[Tracker]:
    """Open console, `metrics.jsonl` and the trackers of `[track]`; `stack` closes them. None ever raises."""
    directory, first_step = job.job.directory, progress.step

    def tensorboard() -> Tracker:
        from forge_trainer.track.tensorboard import TensorBoard

        return TensorBoard(directory / "tensorboard", first_step)

    def wandb() -> Tracker:
        from forge_trainer.track.wandb import Wandb

        assert job.track.wandb is not None
        return Wandb(job.track.wandb, directory, job.job.name, plain(job))

    made: dict[str, Callable[[], Tracker]] = {
        "the console": lambda: Console(job.job.name, first_step, progress.until),
        "metrics.jsonl": lambda: Jsonl(RunFiles(directory).metrics, first_step),
    }
    if job.track.tensorboard:
        made["tensorboard"] = tensorboard
    if job.track.wandb is not None:
        made["wandb"] = wandb
    trackers: list[Tracker] = [Steadfast(name, make) for name, make in made.items()]
    for tracker in trackers:
        stack.callback(tracker.close)
    return trackers
