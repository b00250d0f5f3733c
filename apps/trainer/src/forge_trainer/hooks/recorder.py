"""The hook of `[hooks.<name>] type = "record"`: an extraction on a fixed probe during training."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from forge_config import ConfigError
from forge_interp import (
    ActivationStore,
    InterpError,
    extract_representations,
)
from forge_interp.extraction.folder import INDEX
from torch import Tensor

from forge_trainer.data.probe import Alone, Probe, forward, probe_of
from forge_trainer.hooks.base import Hook, RunView
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput
from forge_trainer.steps.evaluation import evaluating

if TYPE_CHECKING:
    from forge_trainer.hooks.record import RecordConfig

SUMMARY_ROWS = 512
"""The number of rows of a summary, evenly spaced, so that its cost does not grow with the probe."""


class Recorder(Hook):
    """A hook that writes the activations of a probe. Collective.

    When it is built, it records and removes one batch, so that errors in recording or writing show before
    the first step, also of a run that is continued.

    Raises:
        ConfigError: a site names nothing in the model, or cannot be recorded; or a file cannot be written.
    """

    span = "record"

    def __init__(self, config: RecordConfig, run: RunView) -> None:
        self.every = config.every_steps
        self._config = config
        self._run = run
        self._forward = partial(forward, run.job.loss.build(), run.mesh.device)
        self._folder = run.directory / config.folder
        self._probe = probe_of(run.job, config.samples)
        unfinished = [path for path in self._folder.glob("step-*") if not (path / INDEX).exists()]
        self._remove(*unfinished)
        trial = self._folder / "trial"
        few = run.job.train.micro_batch
        self._extract(trial, self._probe.first(few) if isinstance(self._probe, Alone) else self._probe[:few])
        self._remove(trial)
        if run.progress.step == 0:
            self._extract(self._path(0), self._probe)

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Collective."""
        path = self._path(progress.step)
        self._extract(path, self._probe)
        trackers = self._run.trackers if self._config.summaries else []
        found = summaries(ActivationStore.open(path)) if trackers else {}
        for tracker in trackers:
            tracker.log({"step": progress.step, "tokens": progress.tokens} | found)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _extract(self, path: Path, probe: Probe) -> None:
        """Write one recording, replacing leftovers of an earlier attempt."""
        (model,), mesh = self._run.parts, self._run.mesh
        self._remove(path)
        if mesh.control_group is not None:
            torch.distributed.barrier(mesh.control_group)
        dtype = self._config.dtype
        with _explained(path), evaluating(model):
            extract_representations(
                model,
                probe,
                self._config.sites,
                path,
                batch_size=min(self._run.job.train.micro_batch, len(probe)),
                pool=self._config.pool,
                dtype=None if dtype is None else getattr(torch, dtype),
                tokens="tokens",
                forward=self._forward,
                rank=mesh.batch.rank,
                world_size=mesh.batch.size,
                group=mesh.control_group,
                identity="recording",
                resume=False,
                progress=False,
                keep=self._config.keep,
                check_padding=False,
            )

    def _remove(self, *paths: Path) -> None:
        """Remove leftovers of a killed run, on the first rank."""
        if self._run.env.rank != 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in filter(Path.exists, paths):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Explain errors in terms of the job, and remove half-written files, which may fill the disk."""
    try:
        yield
    except InterpError as error:
        raise ConfigError(f"hooks of type record: {error}") from None
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise ConfigError(
            f"hooks of type record: {path} cannot be written ({error}); expected room on that disk: make "
            "some, record less, or take the hook out; the same command continues from the last checkpoint"
        ) from error


def summaries(store: ActivationStore) -> dict[str, float]:
    """Return the `summary` of each site as `interp/<site>/<name>`, from about SUMMARY_ROWS rows at most."""
    step = max(1, -(-store.rows // SUMMARY_ROWS))
    return {
        f"interp/{site}/{what}": value
        for site in store.sites
        for what, value in summary(store[site][::step]).items()
    }


def summary(rows: Tensor) -> dict[str, float]:
    """Compute summary statistics of rows [n, ...].

    Returns:
        `rms` and `max_abs`, in the units of the activations; `effective_rank`, from 0 (nothing varies) to
        min(n - 1, number of features). Only finite rows count; NaN if there are none.
    """
    x = rows.reshape(len(rows), -1).double()
    x = x[torch.isfinite(x).all(1)]
    if not len(x):
        return dict.fromkeys(("rms", "max_abs", "effective_rank"), math.nan)
    rms, max_abs = x.square().mean().sqrt().item(), x.abs().max().item()
    return {"rms": rms, "max_abs": max_abs, "effective_rank": _effective_rank(x)}


def _effective_rank(x: Tensor) -> float:
    """Compute the exp of the entropy of the normalized singular values of [n, d] (Roy and Vetterli 2007)."""
    singular = torch.linalg.svdvals(x - x.mean(0))
    share = singular.where(singular > 1e-12 * x.norm(), 0.0)  # smaller values are rounding errors
    share = share / share.sum().clamp_min(1e-300)
    return torch.special.entr(share).sum().exp().item() if share.any() else 0.0
