"""`forge sae train FILE`: trains a sparse autoencoder or a transcoder, or continues its training."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from forge_config import ConfigError, load
from forge_resilience.exit_codes import ExitCode

from forge_trainer.sae.config import SAEJob, SourceConfig


def train(options: argparse.Namespace, overrides: Sequence[str]) -> ExitCode:
    """Train by a configuration file on all ranks of torchrun, and print the folder of the result.

    Raises:
        ConfigError: the file is wrong, or an input that it names is missing or does not fit.
    """
    job: Any = load(SAEJob, options.config, overrides).value
    import torch
    from forge_interp import InterpError
    from forge_interp.sae import SAEConfig, SAETraining, train_sae
    from forge_interp.sae.activations import Penalty

    has_gpu, number = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", number) if has_gpu else torch.device("cpu")
    is_group = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_group:
        torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
    try:
        rows, d_in, d_target = _rows(job.source)
        d_out = None if job.source.target is None else d_target
        given = msgspec.structs.asdict(job.sae) | {"d_in": d_in, "d_out": d_out}
        for name, value in (
            ("apply_b_dec_to_input", d_out is None),
            ("rescale_acts_by_decoder_norm", job.sae.is_topk),
        ):
            given[name] = value if given[name] is None else given[name]
        metadata = {"hook_name": job.source.site, "hook_name_out": job.source.target}
        config = SAEConfig(**given, metadata=metadata)
        settings = msgspec.structs.asdict(job.train)
        settings["penalty"] = Penalty(**msgspec.structs.asdict(job.train.penalty))
        train_sae(config, rows, SAETraining(**settings), job.out, device=device)
    except (InterpError, KeyError) as error:
        raise ConfigError(f"{options.config}: {error.args[0]}") from error
    finally:
        if is_group:
            torch.distributed.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        last = json.loads((Path(job.out) / "metrics.jsonl").read_text().splitlines()[-1])
        shown = "  ".join(f"{name} {value:.4g}" for name, value in last.items())
        sys.stdout.write(f"{job.out}: {shown}\n")
    return ExitCode.DONE


def _rows(source: SourceConfig) -> tuple[Any, int, int]:
    """Return the rows of a source, and the widths of a row of the input and of the target."""
    from forge_interp import ActivationStore
    from forge_interp.sae import ModelRows, StoreRows

    if source.store is not None:
        store = ActivationStore.open(source.store)
        sizes = {"window_rows": source.window_rows, "block_rows": source.block_rows}
        rows: Any = StoreRows(store, source.site, source.target, **sizes, seed=source.seed)
        widths = [
            store.read(site, 0, 1).flatten(1).shape[1] for site in (source.site, source.target or source.site)
        ]
        return rows, widths[0], widths[1]
    from forge_data.loading.loader import build_loader

    from forge_trainer.commands.evaluate import open_trained
    from forge_trainer.data.probe import forward

    trained = open_trained(argparse.Namespace(directory=source.run), source.step)
    job, device = trained.job, next(trained.model.parameters()).device
    loader = build_loader(
        job.data, "train", micro_batch=1, global_batch=source.samples, items=job.model.items()
    )
    samples = [{name: value[0] for name, value in micro.inputs.items()} for micro in next(iter(loader))]
    sizes = {"samples_per_window": source.samples_per_window, "batch_size": source.batch_size}
    given = {"tokens": "tokens", "forward": partial(forward, job.loss.build(), device), "seed": source.seed}
    rows = ModelRows(trained.model, samples, source.site, source.target, **sizes, **given)
    one = ModelRows(trained.model, samples[:1], source.site, source.target, batch_size=1, **given)
    x, y = one.share(0, 0, 1)
    return rows, x.shape[1], y.shape[1]
