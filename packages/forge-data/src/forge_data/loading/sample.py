"""Shows the text that a step of a run has read or will read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import structs

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order.batch_sizes import BatchSizes
from forge_data.order.mixing import Run, build_order
from forge_data.order.skips import left_out
from forge_data.packing.build import train_packings
from forge_data.packing.packing import IGNORE, Packing
from forge_data.sources.items import ItemReader
from forge_data.tokenizer.tokenizer import Tokenizer

OPEN, CLOSE = "\u27ea", "\u27eb"
"""Stand around targets, where a sequence or document has tokens that are none."""


def with_rollbacks(config: DataConfig, run: Path) -> DataConfig:
    """The data section of a run without the steps its rollbacks skip, from its `incidents.jsonl`.

    Raises:
        DataError: a line of a rollback cannot be read.
    """
    file, skips = run / "incidents.jsonl", list(config.skip)
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            found = json.loads(line)
            if found["kind"] == "rollback" and found["skip"]:
                skips.append(left_out(found["to"], found["first"], found["end"], found["margin"]))
        except (ValueError, KeyError, TypeError) as error:
            if '"rollback"' in line:  # another line may be torn: what it tells is no matter of the data
                raise DataError(f"{file}: a rollback that cannot be read: {error!r}: {line}") from None
    return structs.replace(config, skip=skips)


def sample_lines(
    config: DataConfig,
    run: Run,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    limit: int | None = None,
    sizes: BatchSizes | None = None,
    items: ItemReader | None = None,
) -> Iterator[str]:
    """Yield the text of the sequences of a step, each after a line with its origin.

    For a stream, this reads all earlier steps first.

    Args:
        config: the section `[data]`.
        run: how much of it the run reads.
        step: the step, from 0.
        rank: a rank among the ranks that read different data.
        world_size: number of these ranks.
        limit: number of sequences at most; None for all.
        sizes: sizes of the batches, if they grow; the last one is that of `run`.
        items: the reader of items such as images.

    Raises:
        DataError: there is no such step or rank.
    """
    sizes = sizes or BatchSizes([], run.global_batch)
    share, rest = divmod(sizes.unit, max(world_size, 1))
    if not (0 <= rank < world_size and step >= 0) or rest or (run.steps is not None and step >= run.steps):
        raise DataError(
            f"given step {step}, rank {rank} of {world_size}; expected a step from 0 below {run.steps} and a "
            f"rank from 0 below a number of ranks that divides the {sizes.unit} sequences of a step"
        )
    config = sizes.counted_in_items(config)
    numbers = range(sizes.items(step), sizes.items(step + 1))
    of_run = Run(sizes.unit, None if run.steps is None else sizes.items(run.steps))
    read = _streamed if config.streamed_names() else _numbered
    tokenizer, batch = config.tokenizer.build(), sizes.at(step)
    for place, (where, tokens, labels) in enumerate(
        itertools.islice(read(config, of_run, numbers, rank, share, items), limit)
    ):
        within = place // share * sizes.unit + rank * share + place % share
        positions = np.flatnonzero((labels != IGNORE) | (tokens != 0))
        tokens = tokens[: positions[-1] + 1 if len(positions) else 0]
        targets = labels != IGNORE
        yield (
            f"-- step {step}, sequence {within} of {batch}: {where}, {len(tokens)} tokens, "
            f"{int(targets.sum())} targets"
        )
        # the first token of a sequence is no target of it
        are = np.concatenate([targets[:1], targets])[: len(tokens)]
        yield marked(tokenizer, tokens, are)


Read = tuple[str, np.ndarray, np.ndarray]
"""Where a sequence is from; [T] int64 tokens; [T] int64 labels, which are those of the next tokens."""


def _numbered(
    config: DataConfig, run: Run, numbers: range, rank: int, share: int, items: ItemReader | None
) -> Iterator[Read]:
    """Yield sequences of sources with random access."""
    packings: dict[int, Packing] = train_packings(config, run.global_batch, items)
    order, names = (
        build_order(config, [len(packing) for packing in packings.values()], run),
        config.source_names(),
    )
    for item in numbers:
        first = item * run.global_batch + rank * share
        places = np.arange(first, first + share)
        for ordinal, source, number in zip(order.skips.ordinals(places), *order.locate(places), strict=True):
            packing = packings[int(source)]
            read = packing.read(np.asarray([number]))
            labels = read.tokens[0, 1:].astype(np.int64)
            labels[read.ignored[1]] = IGNORE
            where = f"sample {ordinal}, source {names[int(source)]}, sequence {number} of {len(packing)}"
            yield where, read.tokens[0, :-1].astype(np.int64), labels


def _streamed(
    config: DataConfig, run: Run, numbers: range, rank: int, share: int, items: ItemReader | None
) -> Iterator[Read]:
    """Yield sequences of a mixture with streams, where a step depends on all steps before it."""
    from forge_data.loading.loader import build_loader  # brings torch, which other commands do not need

    world_size = run.global_batch // share
    loader = build_loader(
        structs.replace(config, workers=0),
        "train",
        rank=rank,
        world_size=world_size,
        micro_batch=share,
        global_batch=run.global_batch,
        steps=run.steps,
        items=items,
    )
    for item in itertools.islice(loader, numbers.start, numbers.stop):
        for micro in item:
            for number, source in enumerate(micro.statistics["source"].tolist()):
                tokens, labels = (micro.inputs[name][number].numpy() for name in ("tokens", "labels"))
                yield f"source {micro.sources[source]}, streamed", tokens, labels


def marked(tokenizer: Tokenizer, tokens: np.ndarray, targets: np.ndarray | None = None) -> str:
    """The text of tokens, special tokens too, with marks around targets where not all are.

    Args:
        tokenizer: of the tokens.
        tokens: [n] ids.
        targets: [n] bool; None means all.
    """
    spell = getattr(tokenizer, "spell", tokenizer.decode)
    ids = tokens.tolist()
    if targets is None or targets.all():
        return spell(ids)
    text, before = "", ""
    cuts = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(ids)]
    for start, stop in itertools.pairwise(cuts):
        # Some tokens are written otherwise at the beginning of a text, so that it is decoded up to each cut.
        after = spell(ids[:stop])
        piece = after[len(before) :] if after.startswith(before) else spell(ids[start:stop])
        text, before = text + (f"{OPEN}{piece}{CLOSE}" if targets[start] else piece), after
    return text
