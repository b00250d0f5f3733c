"""How are the activations of a whole dataset extracted?"""

import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_interp.errors import InterpError, check_kind
from forge_interp.extraction.folder import Parts
from forge_interp.extraction.run.feeding import Feeder, Forward, rows_of_others
from forge_interp.extraction.run.identity import model_identity, names_of, numerics
from forge_interp.extraction.run.parts import dtype_name
from forge_interp.extraction.run.processes import Processes
from forge_interp.extraction.run.rows import Pool, RowMaker
from forge_interp.extraction.run.share import Share
from forge_interp.extraction.samples import Names, Samples, open_dataset
from forge_interp.extraction.store import ENDINGS, ActivationStore
from forge_interp.hooks.capture import Select, by_pattern

_KINDS: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "an nn.Module"),
    "sites": (Iterable, "texts such as 'layers.*:out'"),
    "batch_size": (Integral, "a whole number"),
    "dtype": ((torch.dtype, type(None)), "a torch.dtype such as torch.float16"),
    "identity": ((str, type(None)), "a text"),
    "where": ((str, type(None)), "the name of an entry of the batches"),
    "rank": ((Integral, type(None)), "a whole number"),
    "world_size": ((Integral, type(None)), "a whole number"),
}


# above 60 lines, because each option has a line of the signature
def extract_representations(
    model: nn.Module,
    dataset: Any,
    sites: str | Iterable[str],
    out: str | Path | None = None,
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
    identity: str | None = None,
    resume: bool = True,
    progress: bool = True,
    attention_bytes: int = 1 << 30,
    keep: Iterable[str] = (),
    check_padding: bool = True,
    where: str | None = None,
) -> ActivationStore:
    """Write a model's activations at some sites, for every sample of a dataset, to disk.

    Makes one row for each token that is no padding, or with `pool` for each sample. Called again with the
    same arguments, an interrupted run continues and keeps the parts on disk. Checksums of weights, buffers,
    and rows of the first and last batch show whether model and functions still compute the same.

    Args:
        model: any module; it runs without gradients, in evaluation mode.
        dataset: samples, in any form that `Samples` takes, or an iterable of ready batches, not shuffled.
        sites: `module[:part][#call]` with wildcards, see `forge_interp.hooks.sites`.
        out: a folder, for at most 1024 parts (an iterable without a length: one a batch) and an index; None
            keeps all rows in memory.
        batch_size: samples in a forward pass; ready batches stay as they are.
        select: as for `capture`, on the value's device; gives [samples, tokens, ...] or [samples, ...].
        pool: "mean", "last", "first" or "max" over the valid tokens of a sample, or a callable of (value
            [B, T, ...], mask [B, T] bool) that gives [B, ...]. Values [B, D] are a row a sample anyway.
        dtype: dtype of the rows; None keeps that of the values.
        tokens: entry of the samples with the ids of the rows; None when the rows are no tokens.
        mask: entry that is nonzero at tokens and 0 at padding. It is made when ids differ in length.
        pad_id: id that fills the padding, on the right.
        forward: called as forward(model, batch) in place of the model; passes then run to their end.
        rank: index of this process's share of the parts. Default: rank of torch.distributed, or all parts.
        world_size: number of processes that share the parts. The output does not depend on it.
        group: processes that wait for each other at the end; default: all, when torch.distributed gave the
            rank or the model is sharded. Without a group, the process that ends last writes the index.
        writes: False on processes that share a model and a `rank` with one that writes (tensor parallelism).
        identity: a name to compare in place of rows, for a model whose rows differ in each call.
        resume: False writes the share of this process again, whatever is on disk.
        progress: draw a bar on a terminal; in a group only the first rank does.
        attention_bytes: size limit of an attention matrix in memory.
        keep: entries [samples, tokens] or [samples] of the batches, such as `image_index`, whose value the
            store keeps for each row; see `ActivationStore.kept`.
        check_padding: also run some samples alone, and raise InterpError where their rows differ without
            padding. False for experts of limited capacity, in which padding takes places.
        where: entry [samples, tokens] of the batches: tokens where it is 0 are neither rows nor pooled.

    InterpError where sites have different rows, or `out` belongs to another call, with the differences;
    OSError on a full disk; the finished parts stay.
    """
    given = {"model": model, "sites": sites, "batch_size": batch_size, "dtype": dtype, "identity": identity}
    for name, value in (given | {"where": where, "rank": rank, "world_size": world_size}).items():
        check_kind(name, value, *_KINDS[name])
    folder = None if out is None else _folder(Path(out))
    names, patterns = Names(tokens, mask, pad_id), [sites] if isinstance(sites, str) else list(sites)
    batch_size, (rank, world_size) = int(batch_size), (n if n is None else int(n) for n in (rank, world_size))
    chosen, processes = by_pattern(select, patterns), Processes.of(model, rank, world_size, group, writes)
    kept = [keep] if isinstance(keep, str) else list(keep)
    source = open_dataset(dataset, batch_size, names)
    foreign = rows_of_others(model, patterns, tokens)
    rows, feed = RowMaker(chosen, pool, dtype, kept, foreign, where), Feeder(model, names, forward)
    share = Share(
        model, patterns, source, rows, feed, names, processes, progress, attention_bytes, check_padding
    )
    if folder is None:
        return ActivationStore.of(share.in_memory())
    request = {
        "sites": patterns,
        "dtype": None if dtype is None else dtype_name(dtype),
        "names": [tokens, mask, pad_id],
        "batch_size": batch_size if isinstance(source, Samples) else None,
        "dataset": source.fingerprint(),
        "parts": source.num_parts,
        "versions": {"torch": torch.__version__},
        "numerics": numerics(),
        "select": names_of(chosen) or None,
        "pool": names_of(pool),
        "forward": names_of(forward),
        "model": model_identity(model),
        "identity": identity,
        "keep": kept,
        "where": where,
    }
    request |= {"outputs": share.outputs()} if identity is None else {}
    if share.to_disk(Parts(folder, request), resume):
        warnings.warn(
            f"{folder} was there, made by the same call: it is returned, of the batches nothing ran again "
            "but the first and the last, to compare; resume=False makes it anew",
            stacklevel=2,
        )
    return ActivationStore(folder)


def finish_extraction(out: str | Path) -> ActivationStore:
    """Write the index after all processes have written their parts; InterpError lists missing parts."""
    parts = Parts(Path(out), {})
    if parts.missing() == []:
        parts.finish(len(parts.numbers()))
    return ActivationStore.open(out)


def _folder(out: Path) -> Path:
    """Return `out`; InterpError where it names a file."""
    if out.suffix in ENDINGS or out.is_file():
        raise InterpError(
            f"out is {str(out)!r}; expected a folder: extract to {out.stem!r}, and call "
            f".export({str(out)!r}) on what is returned if you need such a file"
        )
    return out
