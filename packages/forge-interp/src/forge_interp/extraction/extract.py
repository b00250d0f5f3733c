"""How are the activations of a whole dataset extracted?"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge_interp.errors import InterpError
from forge_interp.extraction.export import ENDINGS
from forge_interp.extraction.feeding import Feeder, Forward
from forge_interp.extraction.folder import Parts
from forge_interp.extraction.identity import identity_of
from forge_interp.extraction.parts import dtype_name
from forge_interp.extraction.processes import Processes
from forge_interp.extraction.rows import Pool, RowMaker
from forge_interp.extraction.samples import Names, Samples, open_dataset
from forge_interp.extraction.share import Share
from forge_interp.extraction.store import ActivationStore
from forge_interp.hooks.capture import Select


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
) -> ActivationStore:
    """Write what a model computes at some sites, for every sample of a dataset, to disk.

    One row for each token that is no padding, or with `pool` one for each sample; `sample_id`, `position` and
    `token_id` say where a row came from. The model runs without gradients, in evaluation mode.

    A run that was interrupted, however hard, goes on when it is called again with the same arguments, and the
    files come out byte for byte as if it had not been. What is there already is kept if it was made by the
    same call: the same inputs, arguments, weights, buffers, code and settings of the model, hooks and edits
    of it, functions with all that they read, and settings of torch; see `identity.identity_of`. If all is
    there, a warning says so, and the model does not run.

    Args:
        model: any module.
        dataset: samples (a sequence of ids, of mappings as Hugging Face datasets have them, or of tensors; a
            tensor [samples, ...]; or a mapping of columns), or an iterable of ready batches, such as a
            DataLoader that does not shuffle.
        sites: `module[:part][#call]` with wildcards, see `forge_interp.hooks.sites`.
        out: a folder, for at most 1024 files `part-NNNNN.safetensors` (an iterable without a length: one a
            batch) and an index; `ActivationStore.export` makes other formats of it. None keeps all rows in
            memory.
        batch_size: samples in a forward pass; ready batches stay as they are.
        select: applied to a value on its device first, for all sites or by the pattern as given in `sites`;
            gives [samples, tokens, ...] or [samples, ...].
        pool: "mean", "last", "first" or "max" over the valid tokens of a sample, or a callable of
            (value [B, T, ...], mask [B, T] bool) that gives [B, ...]. A value [B, D] is one row a sample
            anyway.
        dtype: of the rows; None keeps that of the values.
        tokens: entry of the samples with the ids of which the rows are (of the decoder,
            `decoder_input_ids`); None when the rows are no tokens.
        mask: entry that is nonzero where there is a token and no padding. Made when ids differ in length.
        pad_id: stands in the padding, on the right.
        forward: called as forward(model, batch) in place of `model(**batch)` or `model(batch)`; then every
            forward pass runs to its end.
        rank: which share of the parts this process takes; with `world_size`. Default: as torch.distributed
            says, or all.
        world_size: how many processes share the parts. The output does not depend on it.
        group: processes that wait for each other at the end; default: all, when torch.distributed gave the
            rank or the model is sharded. Without a group, whoever ends last writes the index.
        writes: False on processes that share a model and a `rank` with one that writes (tensor parallelism).
        identity: a name for what cannot be compared with another call, such as an open file that `select`
            reads; give another one when that has changed.
        resume: False writes the share of this process anew, whatever is there.
        progress: draw a bar on a terminal; of a group only the first rank does.
        attention_bytes: the largest attention matrix to hold at once.

    Returns:
        The store of all rows. It can be read once all processes are done.

    Raises:
        InterpError: a site names nothing, sites have different rows, something cannot be compared with
            another call, or `out` belongs to another one; the differences are listed.
        OSError: the disk is full or cannot be written; what is done so far stays.
    """
    patterns = [sites] if isinstance(sites, str) else list(sites)
    names = Names(tokens, mask, pad_id)
    chosen = _by_pattern(select, patterns)
    processes = Processes.of(model, rank, world_size, group, writes)
    folder = None if out is None else _folder(out)
    source = open_dataset(dataset, batch_size, names)
    rows, feed = RowMaker(chosen, pool, dtype), Feeder(model, names, forward)
    share = Share(model, patterns, source, rows, feed, names, processes, progress, attention_bytes)
    if folder is None:
        return ActivationStore.of(share.in_memory())
    functions = {"select": chosen or None, "pool": pool, "forward": forward}
    request = {
        "sites": patterns,
        "dtype": None if dtype is None else dtype_name(dtype),
        "names": [tokens, mask, pad_id],
        "batch_size": batch_size if isinstance(source, Samples) else None,
        "dataset": source.fingerprint(),
        "parts": source.num_parts,
        "versions": {"torch": torch.__version__},
        **identity_of(model, functions, identity, strict=resume),
    }
    parts = Parts(folder, request)
    was_whole, ran = share.to_disk(parts, resume)
    if was_whole and not ran:
        warnings.warn(
            f"{folder} was there, made by the same call: it is returned, the model did not run; "
            "resume=False makes it anew",
            stacklevel=2,
        )
    return ActivationStore(folder)


def finish_extraction(out: str | Path) -> ActivationStore:
    """Write the index once all processes have written their parts; returns what is whole already.

    Raises:
        InterpError: parts are missing; lists them.
    """
    parts = Parts(Path(out), {})
    if parts.missing() == []:
        parts.finish(len(parts.numbers()))
    return ActivationStore.open(out)


def _folder(out: str | Path) -> Path:
    folder = Path(out)
    if folder.suffix in ENDINGS or folder.is_file():
        raise InterpError(
            f"out is {str(out)!r}; expected a folder: extract to {folder.stem!r}, and call "
            f".export({str(out)!r}) on what is returned if you need such a file"
        )
    return folder


def _by_pattern(select: Select | Mapping[str, Select] | None, patterns: list[str]) -> dict[str, Select]:
    if select is None:
        return {}
    if not isinstance(select, Mapping):
        return dict.fromkeys(patterns, select)
    if unknown := sorted(select.keys() - set(patterns)):
        raise InterpError(f"select is given for {unknown}; expected patterns among the sites: {patterns}")
    return dict(select)
