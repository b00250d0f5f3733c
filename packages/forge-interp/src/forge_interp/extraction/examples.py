"""Where in a dataset is a unit, a head or a feature most active?

Letters: R rows (tokens), U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_interp.errors import InterpError, optional
from forge_interp.extraction.run.parts import replacing
from forge_interp.extraction.store import ActivationStore

Score = Callable[[Tensor], Tensor]
"""Function from rows of a site [R, ...] to the activity of each unit, [R, U]."""
Decode = Callable[[int], str]
"""Function from an id to its text."""


@dataclass(frozen=True)
class Example:
    """One place where a unit is active, with the tokens around it."""

    unit: int
    value: float
    row: int  # index in the store
    sample: int
    position: int  # index of the token in its sample
    tokens: tuple[str, ...]  # the context, in order
    values: tuple[float, ...]  # activity of the unit at each token
    centre: int  # index of the example in `tokens`


class Examples(list[Example]):
    """Examples of one unit after another, the largest value of a unit first."""

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame`, one row an example, with `text` and `token`; needs pandas."""
        pandas = optional("pandas", "to_dataframe", "tables")
        names = ("unit", "value", "sample", "position")
        rows = [{name: getattr(e, name) for name in names} for e in self]
        extra = [{"token": e.tokens[e.centre], "text": "".join(e.tokens)} for e in self]
        return pandas.DataFrame([row | more for row, more in zip(rows, extra, strict=True)])

    def to_html(self, path: str | Path, title: str = "Examples") -> None:
        """Write one self-contained page; the colour behind a token shows how active the unit is."""
        style = (
            "body{font:15px sans-serif}p{white-space:pre-wrap;margin:.3em}.c{outline:1px solid}b{color:#666}"
        )
        lines = [f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>']
        lines += [f"<h1>{escape(title)}</h1>"]
        most = {e.unit: max(1e-30, *(max(x.values) for x in self if x.unit == e.unit)) for e in self}
        for number, e in enumerate(self):
            lines += [f"<h2>unit {e.unit}</h2>"] if not number or self[number - 1].unit != e.unit else []
            spans = ""
            for i, (token, value) in enumerate(zip(e.tokens, e.values, strict=True)):
                ground = f"rgba(255,140,0,{min(1.0, max(0.0, value / most[e.unit])):.2f})"
                kind = " class=c" if i == e.centre else ""
                spans += f'<span{kind} title="{value:.4g}" style="background:{ground}">{escape(token)}</span>'
            lines += [f'<p><b title="sample {e.sample}, token {e.position}">{e.value:.4g}</b> {spans}</p>']
        with replacing(Path(path)) as file:
            file.write("\n".join(lines).encode())


@torch.no_grad()
def top_examples(
    store: ActivationStore,
    site: str,
    units: Iterable[int] | None = None,
    *,
    count: int = 10,
    context: tuple[int, int] = (10, 5),
    score: Score | None = None,
    decode: Decode | None = None,
    once_a_sample: bool = True,
    block_rows: int = 4096,
) -> Examples:
    """Find the tokens of a store at which units are most active, in one pass over `block_rows` at a time.

    Args:
        store: activations with a row for each token.
        site: the extracted site to read.
        units: indices of units; default all.
        count: number of examples of each unit.
        context: how many tokens of the same sample to show before and after.
        score: function from rows to activities [R, U]; default: the numbers of rows [R, U], the norms of
            heads [R, N, H]. For features of an autoencoder `sae.encode`.
        decode: function from id to text, `lambda i: tokenizer.decode([i])`; default: the number.
        once_a_sample: only the largest value of each sample counts.
        block_rows: number of rows in memory.

    InterpError where a unit does not exist, scores are NaN, or the store has one row per sample.
    """
    if count < 1 or min(context) < 0 or not store.rows or bool((store.position < 0).any()):
        raise InterpError(
            f"count={count}, context={context}, {store.rows} rows; expected an example or more, a context of "
            "0 or more, and a store with a row for each token: extract without pool="
        )
    score, chosen = score or _size, None if units is None else list(units)
    best, rows = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for start, lengths in _blocks(store.sample_id, block_rows):
        found = score(store.read(site, start, start + sum(lengths))).float().cpu()
        if bool(found.isnan().any()):
            raise InterpError(f"scores of {site!r} in rows from {start} on are NaN; expected numbers")
        if found.ndim != 2 or any(not 0 <= unit < found.shape[1] for unit in chosen or ()):
            raise InterpError(
                f"units are {chosen}, of scores {list(found.shape)}; expected some of [R, units]"
            )
        chosen = list(range(found.shape[1])) if chosen is None else chosen
        size = 1 if once_a_sample else count
        for part in found[:, chosen].split(lengths if once_a_sample else [sum(lengths)]):
            values, order = part.sort(dim=0, descending=True, stable=True)  # of equal ones the first
            pairs = (best, values[:size]), (rows, start + order[:size])
            best, rows = (torch.cat(pair) if len(rows) else pair[1] for pair in pairs)
            start += len(part)
        best, order = best.sort(dim=0, descending=True, stable=True)
        best, rows = best[:count], rows.gather(0, order[:count])
    made = Examples()
    for column, unit in enumerate(chosen or ()):
        for row in rows[:, column].tolist():
            sample, first = int(store.sample_id[row]), max(0, row - context[0])
            around = store.sample_id[first : row + 1 + context[1]]
            inside = first + (around == sample).nonzero()[:, 0]  # rows of one sample are together
            first, last = int(inside[0]), int(inside[-1]) + 1
            values = score(store.read(site, first, last))[:, unit].float().cpu().tolist()
            tokens = tuple((decode or str)(i) for i in store.token_id[first:last].tolist())
            place = row, sample, int(store.position[row])
            made.append(Example(unit, values[row - first], *place, tokens, tuple(values), row - first))
    return made


def _blocks(samples: Tensor, size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield whole samples of about `size` rows: the first row, and the number of rows of each sample."""
    start, lengths = 0, list[int]()
    for length in samples.unique_consecutive(return_counts=True)[1].tolist():
        if lengths and sum(lengths) + length > size:
            yield start, lengths
            start, lengths = start + sum(lengths), []
        lengths.append(length)
    yield start, lengths


def _size(rows: Tensor) -> Tensor:
    """Return [R, U] as they are, and the norms of heads [R, N, H]."""
    return rows if rows.ndim == 2 else rows.flatten(2).float().norm(dim=-1)
