"""What a step of a run has read, or will read: the order is a function, so it can be asked at any time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order.mixing import Run, build_order
from forge_data.packing.build import train_packings
from forge_data.packing.packing import IGNORE


def sample_lines(
    config: DataConfig, run: Run, step: int, rank: int = 0, world_size: int = 1, limit: int | None = None
) -> Iterator[str]:
    """The text of the sequences of a step, each after a line that says where it is from.

    Args:
        config: the section `[data]`.
        run: how much of it is read.
        step: from 0.
        rank: of those that read different data.
        world_size: how many those are.
        limit: sequences at most; None for all.

    Raises:
        DataError: there is no such step or rank.
    """
    share, rest = divmod(run.global_batch, max(world_size, 1))
    if not (0 <= rank < world_size and step >= 0) or rest or (run.steps is not None and step >= run.steps):
        raise DataError(
            f"given step {step}, rank {rank} of {world_size}; expected a step from 0 below {run.steps} and a "
            f"rank from 0 below a number of ranks that divides the {run.global_batch} sequences of a step"
        )
    if streamed := config.streamed_names():
        raise DataError(
            f"{', '.join(streamed)} is streamed: what a step has read follows from all steps before it and "
            "cannot be shown; tokenize the text first (streaming = false) to be able to ask"
        )
    packings = train_packings(config, run.global_batch)
    order = build_order(config, [len(packing) for packing in packings.values()], run)
    first = step * run.global_batch + rank * share
    places = np.arange(first, first + (share if limit is None else min(share, limit)))
    decode, names = config.tokenizer.build().decode, config.source_names()
    located = zip(
        places - step * run.global_batch, order.skips.ordinals(places), *order.locate(places), strict=True
    )
    for place, ordinal, source, number in located:
        read = packings[int(source)].read(np.asarray([number]))
        labels = read.tokens[0, 1:].astype(np.int64)
        labels[read.ignored[1]] = IGNORE
        held = np.flatnonzero((labels != IGNORE) | (read.tokens[0, :-1] != 0))
        tokens = read.tokens[0, : held[-1] + 1 if len(held) else 0]
        yield (
            f"-- step {step}, sequence {place} of {run.global_batch}: sample {ordinal}, source "
            f"{names[int(source)]}, sequence {number} of {len(packings[int(source)])}, {len(tokens)} tokens, "
            f"{int((labels != IGNORE).sum())} targets"
        )
        yield decode(tokens.tolist())
