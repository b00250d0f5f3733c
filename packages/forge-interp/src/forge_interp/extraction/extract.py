"""How do the activations of a whole dataset get to disk?

Batch by batch, each site straight from the forward pass into its file, so that beside the model no more than
one value of one site is in memory. From the second batch on the forward pass stops behind the last site
asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.extraction.columns import dtype_name
from forge_interp.extraction.feeding import Feeder, Forward, check_padding
from forge_interp.extraction.fingerprint import callable_name, is_distributed, model_fingerprint
from forge_interp.extraction.formats import ROW_COLUMNS, check_sites, format_of
from forge_interp.extraction.journal import Shard, check_same, read_chunks
from forge_interp.extraction.merge import merge, missing_ranks, shard_folder, working_folder
from forge_interp.extraction.processes import Processes
from forge_interp.extraction.rows import Pool, RowMaker
from forge_interp.extraction.samples import Batch, Names, ReadyBatches, Samples, open_dataset
from forge_interp.extraction.store import ActivationStore
from forge_interp.hooks.capture import Activations, Select, capture
from forge_interp.hooks.sharding import is_sharded
from forge_interp.progress import progress as with_progress

Deliver = Callable[[str, Tensor], None]


def extract_representations(
    model: nn.Module,
    dataset: Any,
    sites: str | Iterable[str],
    out: str | Path,
    *,
    batch_size: int = 8,
    select: Select | Mapping[str, Select] | None = None,
    pool: Pool | None = None,
    dtype: torch.dtype | None = None,
    tokens: str | None = "input_ids",
    mask: str | None = "attention_mask",
    pad_id: int = 0,
    forward: Forward | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: Any = None,
    writes: bool = True,
    progress: bool = True,
    attention_bytes: int = 1 << 30,
) -> ActivationStore:
    """Write what a model computes at some sites, for every sample of a dataset, to disk.

    One row for each token that is no padding, or with `pool` one for each sample; `sample_id`, `position` and
    `token_id` say where a row came from. The model runs without gradients, in evaluation mode.

    A run that was interrupted, however hard, goes on when it is called again with the same arguments, and the
    files come out byte for byte as if it had not been. Until all is done the rows are in `OUT.partial`, which
    takes as much space as the output beside it. An output that is there already is returned if it was made by
    the same call: the same weights, arguments, functions (see `fingerprint.callable_name`), and samples (all
    are compared, or 256 of a larger dataset).

    Args:
        model: any module.
        dataset: samples (a sequence of ids, of mappings as Hugging Face datasets have them, or of tensors; a
            tensor [samples, ...]; or a mapping of columns), or an iterable of ready batches, such as a
            DataLoader that does not shuffle.
        sites: `module[:part][#call]` with wildcards, see `forge_interp.hooks.sites`.
        out: a name that ends in `.npz`, `.safetensors`, `.zarr` or `.npy` (one site), or else a folder of
            `.npy` files. All but `.safetensors` hold bfloat16 as the uint16 of its bits; `ActivationStore`
            gives it back.
        batch_size: samples in a forward pass; ready batches stay as they are.
        select: applied to a value on its device first, for all sites or by the pattern as given in `sites`;
            gives [samples, tokens, ...] or [samples, ...].
        pool: "mean", "last", "first" or "max" over the valid tokens of a sample, or a callable of
            (value [B, T, ...], mask [B, T] bool) that gives [B, ...]. A value [B, D] is one row a sample
            anyway.
        dtype: of the rows; None keeps that of the values.
        tokens: entry of the samples with the ids of which the rows are; None when the rows are no tokens.
        mask: entry that is nonzero where there is a token and no padding. Made when ids differ in length.
        pad_id: stands in the padding, on the right.
        forward: called as forward(model, batch) in place of `model(**batch)` or `model(batch)`; then every
            forward pass runs to its end.
        rank: which share of the batches this process takes; with `world_size`. Default: as torch.distributed
            says, or all.
        world_size: how many processes share the batches. The output does not depend on it.
        group: processes that wait for each other at the end; default: all, when torch.distributed gave the
            rank or the model is sharded. Without a group, whoever ends last puts the output together.
        writes: False on processes that share a model and a `rank` with one that writes (tensor parallelism).
        progress: draw a bar on a terminal; of a group only the first rank does.
        attention_bytes: the largest attention matrix to hold at once.

    Returns:
        The store of all rows. It can be read once all processes are done.

    Raises:
        InterpError: a site names nothing, sites have different rows, or `out` or its working folder belongs
            to another call; the differences are listed.
        OSError: the disk is full or cannot be written; what is done so far stays.
    """
    out = Path(out)
    patterns = [sites] if isinstance(sites, str) else list(sites)
    names = Names(tokens, mask, pad_id)
    chosen = _by_pattern(select, patterns)
    processes = Processes.of(model, rank, world_size, group, writes)
    rows = RowMaker(chosen, pool, dtype)
    format_of(out)
    source = open_dataset(dataset, batch_size, names)
    request = {
        "sites": patterns,
        "select": {pattern: callable_name(function) for pattern, function in chosen.items()},
        "pool": pool if isinstance(pool, str) else callable_name(pool),
        "dtype": None if dtype is None else dtype_name(dtype),
        "names": [tokens, mask, pad_id],
        "forward": callable_name(forward),
        "batch_size": batch_size if isinstance(source, Samples) else None,
        "dataset": source.fingerprint(),
        "model": model_fingerprint(model),
        "versions": {"torch": torch.__version__},
    }
    if out.exists():
        return _made_before(out, request)
    run = _Run(model, patterns, source, rows, Feeder(model, names, forward), names, attention_bytes)
    folder = shard_folder(out, processes.rank, processes.size)
    try:
        with Shard(folder, request) if writes else nullcontext() as shard:
            if not out.exists():
                run.extract(shard, processes, out, progress and processes.shows_progress)
    except FileNotFoundError:
        if not out.exists():
            raise
    if processes.group is None and out.exists():  # another process has done the same, and removed its folder
        return _made_before(out, request)
    processes.together(lambda: merge(out))
    return ActivationStore(out)


def finish_extraction(out: str | Path) -> ActivationStore:
    """Put the output together from the shards of all processes; returns it if that is done already.

    Raises:
        InterpError: processes have not finished their share; lists them.
    """
    out = Path(out)
    if not out.exists() and not merge(out):
        raise InterpError(
            f"{working_folder(out)} waits for ranks {missing_ranks(out)}; expected all to be done: run them "
            "again, they go on"
        )
    return ActivationStore.open(out)


@dataclass
class _Run:
    """One process' share of the batches, from where it stands.

    Attributes:
        model: any module.
        sites: patterns.
        source: of the batches.
        rows: how values become rows.
        feed: how the model is called.
        names: what the entries of a batch are called.
        attention_bytes: the largest attention matrix to hold at once.
    """

    model: nn.Module
    sites: list[str]
    source: Samples | ReadyBatches
    rows: RowMaker
    feed: Feeder
    names: Names
    attention_bytes: int

    def __post_init__(self) -> None:
        self._deliver: Deliver = _ignore
        self._padding_checked = False

    def extract(self, shard: Shard | None, processes: Processes, out: Path, progress: bool) -> None:
        """Write all batches of the share that are not written yet. Collective if the model is shared."""
        start, stop = processes.share(self.source.num_batches)
        first = start + processes.done(shard.batches if shard else 0)
        mine = self._batches(start, first, stop, shard)
        steps = processes.steps(mine, lambda: next(self.source.batches(0, 1)))
        drawn = with_progress(steps, None if stop is None else stop - first, "extract", progress)
        with _evaluating(self.model), torch.no_grad():
            stops = self.feed.is_default and not processes.in_step and not is_sharded(self.model)
            if shard is None or not shard.columns:
                self._run(islice(drawn, 1), shard, out, stops=False)
            self._run(drawn, shard, out, stops)
        if shard is not None:
            shard.seal()

    def _batches(self, start: int, first: int, stop: int | None, shard: Shard | None) -> Iterator[Batch]:
        """Batches [first, stop); what was written before is compared with what an iterable gives now."""
        if shard is None or isinstance(self.source, Samples):
            yield from self.source.batches(first, stop)
            return
        written = [chunk.inputs for chunk, _ in read_chunks(shard.folder) if chunk is not None]
        number = start - 1
        for batch in self.source.batches(start, stop):
            number = batch.number
            if number >= first and not shard.sealed:
                yield batch
            elif number >= first or batch.checksum() != written[number - start]:
                raise InterpError(_other_batches(number, shard))
        if number < first - 1:
            raise InterpError(_other_batches(number + 1, shard))

    def _run(self, steps: Iterator[tuple[Batch, bool]], shard: Shard | None, out: Path, stops: bool) -> None:
        """Run some batches inside one capture."""
        one = next(steps, None)
        if one is None:
            return
        with capture(
            self.model,
            self.sites,
            select=self.rows.by_pattern(self.sites),
            stop=stops,
            device="cpu",
            sink=lambda key, rows: self._deliver(key, rows),
            attention_bytes=self.attention_bytes,
        ) as acts:
            if stops and shard is not None:
                acts.expect(c.name for c in shard.columns if c not in ROW_COLUMNS)
            for batch, counts in chain([one], steps):
                self._check_padding(acts, batch)
                if shard is not None and counts:
                    self._record(acts, batch, shard, out)
                else:
                    self._forward(acts, batch, _ignore)

    def _record(self, acts: Activations, batch: Batch, shard: Shard, out: Path) -> None:
        self._forward(acts, batch, shard.write)
        if not shard.columns:
            if not acts.fired:
                return  # `capture` raises and says why
            check_sites(out, sorted(acts.fired))
        for name, values in self.rows.ids().items():
            shard.write(name, values)
        shard.commit(batch.checksum())

    def _forward(self, acts: Activations, batch: Batch, deliver: Deliver) -> None:
        acts.clear()
        self.rows.start(batch)
        self._deliver = deliver
        self.feed(batch)
        acts.wait()

    def _check_padding(self, acts: Activations, batch: Batch) -> None:
        """Once, if this process may run the model for itself."""
        if batch.mask is None or batch.tokens is None or self._padding_checked:
            return
        if self.feed.passes_mask(batch) or is_distributed(self.model):
            return

        def rows_of(sample: Batch) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            self._forward(acts, sample, lambda key, rows: found.update({key: rows.clone()}))
            return found

        self._padding_checked = check_padding(batch, self.names, rows_of)


def _ignore(key: str, rows: Tensor) -> None:
    """Rows that do not count."""


def _other_batches(number: int, shard: Shard) -> str:
    return (
        f"batch {number} is not the one that was extracted before; expected the same batches in each run: do "
        f"not shuffle, or delete {shard.folder.parent} to start anew"
    )


def _by_pattern(select: Select | Mapping[str, Select] | None, patterns: list[str]) -> dict[str, Select]:
    if select is None:
        return {}
    if not isinstance(select, Mapping):
        return dict.fromkeys(patterns, select)
    if unknown := sorted(select.keys() - set(patterns)):
        raise InterpError(f"select is given for {unknown}; expected patterns among the sites: {patterns}")
    return dict(select)


def _made_before(out: Path, request: Mapping[str, Any]) -> ActivationStore:
    """The output of an earlier call, if that asked for the same; the version of torch may differ."""
    store = ActivationStore.open(out)
    made = dict(store.metadata["request"])
    check_same(out, made | {"versions": None}, dict(request) | {"versions": None})
    shutil.rmtree(working_folder(out), ignore_errors=True)
    return store


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
