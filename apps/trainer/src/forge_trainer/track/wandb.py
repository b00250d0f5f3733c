"""The tracker of Weights & Biases. Its errors are warnings and never end a run."""

import logging
import secrets
from pathlib import Path
from typing import Any

from forge_trainer.run_dir.files import write_whole
from forge_trainer.track.base import Record
from forge_trainer.track.config import WandbConfig

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 20


class Wandb:
    """A tracker that reports to a server, or to files if the server cannot be reached.

    A continued run keeps its id, which is in its directory (`wandb-id`), so that runs of one name stay
    separate. W&B counts records and drops records whose number does not rise. The number follows the step of
    the run, so that a continued run does not count from 0 again; after a rollback it rises by 1 each time.
    """

    def __init__(self, config: WandbConfig, folder: Path, name: str, job: dict[str, Any]) -> None:
        self._folder, self._id = folder, _id(folder, name)
        self._run = self._start(config, config.mode, name, job)
        if self._run is None and config.mode == "online":
            self._run = self._start(config, "offline", name, job)
        self._last = getattr(self._run, "step", 0) - 1  # more than -1 where a server knows the run

    def _start(self, config: WandbConfig, mode: Any, name: str, job: dict[str, Any]) -> Any:
        try:
            import wandb

            run = wandb.init(
                project=config.project,
                entity=config.entity,
                mode=mode,
                id=self._id,
                name=config.name or name,
                group=config.group,
                tags=config.tags or None,
                notes=config.notes,
                resume="allow",
                dir=str(self._folder),
                config=job,
                settings=wandb.Settings(init_timeout=CONNECT_TIMEOUT_S, silent=True),
            )
            # records are drawn over the step that they name, and not over W&B's own count
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:  # a tracker must not end a run
            log.warning("wandb (%s) could not start, training goes on: %s", mode, error)
            return None

    def log(self, record: Record) -> None:
        """See `Tracker.log`."""
        if self._run is None:
            return
        try:
            self._last = max(self._last + 1, int(record["step"]))
            self._run.log(dict(record), step=self._last)
        except Exception as error:  # a tracker must not end a run
            log.warning("wandb stopped taking records, training goes on: %s", error)
            self._run = None

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:  # a tracker must not end a run
            log.warning("wandb could not end its run: %s", error)


def _id(folder: Path, name: str) -> str:
    """Return the id of a run; create it at the first call."""
    path, fresh = folder / "wandb-id", f"{name}-{secrets.token_hex(4)}"
    try:
        if not path.exists():
            write_whole(path, f"{fresh}\n")
        return path.read_text().strip()
    except OSError as error:  # a tracker must not end a run
        log.warning("%s cannot be kept: %s", path, error)
        return fresh
