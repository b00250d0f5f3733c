"""`forge dynamics`: how layers and heads change over the checkpoints of a run, as tables and pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_config import ConfigError
from forge_interp import InterpError, TrainingDynamics, training_dynamics
from torch import Tensor, nn

from forge_trainer.commands.evaluate import open_trained
from forge_trainer.commands.steps import csv_of, each_step, require_none, write_table
from forge_trainer.data.probe import forward, probe_of
from forge_trainer.run_dir.files import read_job, write_whole
from forge_trainer.study.picture import Series, picture

_MOST_LINES = 8
"""The most lines of a picture: as many as it has colours."""


def follow_run(options: argparse.Namespace) -> None:
    """Run `forge dynamics`: write a store of each checkpoint, and `layers` and `heads` as CSV and SVG.

    The sequences are the same as in `forge extract` with as many samples. After a kill, the same command
    continues.

    Raises:
        CheckpointError: damaged checkpoints were skipped; the results contain the other steps.
        ConfigError: there are fewer than two steps, a site names nothing, or a file cannot be written.
    """
    job, out, damaged = read_job(Path(options.directory)), Path(options.out), list[str]()
    probe = probe_of(job, options.samples, options.text or ())
    if not len(probe):
        raise ConfigError(f"{options.directory} has no text to look at; name files by --text")

    loss_fn = job.loss.build()

    def opened(step: int | None) -> tuple[int, nn.Module]:
        model = open_trained(options, step).model
        return int(step or 0), model

    def run(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return forward(loss_fn, next(model.parameters()).device, model, batch)

    try:
        found = training_dynamics(
            each_step(options, opened, damaged),
            probe,
            options.sites,
            out,
            vocabulary=job.model.vocab_size,
            period=options.period or min(32, job.data.max_tokens // 2),
            batch_size=min(job.train.micro_batch, len(probe)),
            tokens="tokens",
            forward=run,
        )
        _write(found, out)
    except InterpError as error:
        raise ConfigError(f"forge dynamics: {error}") from None
    except OSError as error:
        raise ConfigError(f"forge dynamics: {out} cannot be written: {error}") from None
    write_table(found.table(), None)
    sys.stdout.write(f"layers.csv, heads.csv and their pictures are in {out}\n")
    require_none(damaged)


def _write(found: TrainingDynamics, out: Path) -> None:
    """Write tables of all layers and heads, and pictures of at most `_MOST_LINES` layers and best heads."""
    layers = dict(zip(found.layers, found.cka.T.tolist(), strict=True))
    heads = {
        f"{kind}/{head}": curve
        for kind in ("induction", "previous")
        for head, curve in zip(found.heads, getattr(found, kind).T.tolist(), strict=True)
    }
    best = [f"induction/{found.heads[head]}" for head in found.induction[-1].argsort()[::-1][:_MOST_LINES]]
    spread = found.layers[:: -(-len(layers) // _MOST_LINES)]
    for name, curves, shown, unit in (
        ("layers", layers, spread, "CKA with the last step"),
        ("heads", heads, best, "induction score"),
    ):
        columns = {"step": found.steps} | curves
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        write_whole(out / f"{name}.csv", csv_of(rows))
        write_whole(out / f"{name}.svg", _picture(found.steps, {line: curves[line] for line in shown}, unit))


def _picture(steps: Sequence[int], lines: dict[str, list[float]], unit: str) -> str:
    """Draw curves over 1 + step, so that step 0 has a place on a logarithmic axis."""
    series = []
    for name, values in lines.items():
        points = [(1.0 + step, value) for step, value in zip(steps, values, strict=True)]
        series.append(Series(name, points, points))
    return picture(unit, "1 + step", unit, series)
