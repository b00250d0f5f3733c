"""`forge extract`: writes activations at sites of a model, of one checkpoint or a series, to disk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from forge_config import ConfigError
from forge_interp import InterpError, extract_representations

from forge_trainer.commands.evaluate import open_trained
from forge_trainer.commands.steps import folder_of, is_series, of_each_step, require_none
from forge_trainer.data.probe import forward, probe_of

OF_A_STORE = ("part-*", "index.json*")
"""The files in the folder of a store, complete or not."""


def extract_run(options: argparse.Namespace) -> None:
    """Run `forge extract`: write a store to `out`; with several steps, a store to a folder for each step.

    The sequences are the same as in the hook `record` with as many samples, so that both compare row by row.
    After a kill, the same command continues.

    Raises:
        CheckpointError: damaged checkpoints were skipped; the other steps are extracted.
        ConfigError: a site names nothing, a file cannot be written, or `out` contains other files.
    """
    _require_own(Path(options.out), ("step-*",) if is_series(options) else OF_A_STORE)
    require_none(of_each_step(options, partial(_extract_step, options))[1])


def _extract_step(options: argparse.Namespace, asked: int | None) -> None:
    job, model, place, _ = open_trained(options, asked)
    out = Path(options.out)
    if is_series(options) and asked is not None:
        out = folder_of(out, asked)
    probe = probe_of(job, options.samples, options.text or ())
    if not len(probe):
        raise ConfigError(f"{place} has no text to extract from; name files by --text")
    try:
        store = extract_representations(
            model,
            probe,
            options.sites,
            out,
            batch_size=min(options.batch_size or job.train.micro_batch, len(probe)),
            pool=options.pool,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            tokens="tokens",
            forward=partial(forward, job.loss.build(), next(model.parameters()).device),
            keep=options.keep or (),
            check_padding=False,
        )
    except InterpError as error:
        raise ConfigError(f"forge extract: {error}") from None
    except OSError as error:
        raise ConfigError(f"forge extract: {out} cannot be written: {error}") from None
    sys.stdout.write(f"{place}: {store.rows:,} rows of {', '.join(store.sites)} in {out}\n")


def _require_own(out: Path, names: Sequence[str]) -> None:
    """Check that a folder is new or empty, or that an extraction has begun in it."""
    if not out.is_dir() or any(next(out.glob(name), None) for name in names):
        return
    if other := sorted(path.name for path in out.iterdir() if not path.name.startswith(".")):
        raise ConfigError(
            f"forge extract: {out} holds {', '.join(other[:3])} and no extraction; name a new folder, or an "
            "empty one"
        )
