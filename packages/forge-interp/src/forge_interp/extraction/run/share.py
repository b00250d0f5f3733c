"""How does a process run the model on its share of the batches?

Each site goes straight from the forward pass to its part on disk, so that beside the model little more than
one value of one site is in memory. From the second batch on, a forward pass stops after the last site.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.extraction.folder import Parts
from forge_interp.extraction.run.alone import Alone, unpadded
from forge_interp.extraction.run.feeding import Feeder
from forge_interp.extraction.run.identity import digest, is_distributed
from forge_interp.extraction.run.parts import Column, Part, PartWriter, is_site
from forge_interp.extraction.run.processes import Processes, Written
from forge_interp.extraction.run.rows import RowMaker
from forge_interp.extraction.samples import Batch, Names, ReadyBatches, Samples
from forge_interp.hooks.capture import Activations, capture
from forge_interp.hooks.engine.sharding import is_sharded
from forge_interp.progress import progress as with_progress

Deliver = Callable[[str, Tensor], None]
"""Function that takes the key and the rows of a site."""


@dataclass(eq=False)
class Share:
    """The work of one process: its parts of the batches of `source`, with `sites` as patterns."""

    model: nn.Module
    sites: list[str]
    source: Samples | ReadyBatches
    rows: RowMaker
    feed: Feeder
    names: Names
    processes: Processes
    progress: bool
    attention_bytes: int
    check_padding: bool = True
    _parts: Parts | None = None
    _writer: PartWriter | None = None
    _columns: tuple[Column, ...] = ()
    _num_batches: int = 0  # read so far
    _num_recorded: int = 0
    _num_to_look_at: int = 0  # candidate batches for `_alone`
    _axes_checked: bool = False

    def outputs(self) -> dict[str, Any]:
        """Return `digest` by batch and site, of the first and the last batch (ready batches: the first).

        Collective if the model is shared.
        """
        found: dict[str, dict[str, Any]] = {}
        with self._capture(stops=False) as acts:
            for batch in self.source.probes():
                made = found.setdefault(f"of batch {batch.number}", {})
                self._forward(acts, batch, lambda key, rows, made=made: made.update({key: digest(rows)}))
        return found

    def in_memory(self) -> dict[str, Tensor]:
        """Extract all batches; return all columns. InterpError: several processes share the batches."""
        if self.processes.size > 1:
            raise InterpError(f"{self.processes.size} processes share an extraction; expected out, a folder")
        with closing(PartWriter((), None)) as self._writer:
            self._extract(self._batches(0, None, None, {}))
            return self._writer.tensors()

    def to_disk(self, parts: Parts, resume: bool) -> bool:
        """Write the missing parts of this share, and the index if no other part is missing.

        Returns whether all parts existed before. Collective if there is a group. InterpError: parts belong to
        another call, or the batches are not those of the parts.
        """
        processes, num_parts = self.processes, self.source.num_parts
        start, stop = processes.share(num_parts)
        if not resume:
            everything = (0, None) if processes.group is not None else (start, stop)
            processes.together(lambda: parts.remove(*everything))
        index = parts.index
        found: dict[int, Part] = {}

        def find() -> Written:
            found.update(parts.intact(start, stop) if processes.writes else {})
            return {number: (part.batches, part.inputs) for number, part in found.items()}

        written = processes.agree(find)
        self._columns = next((part.columns for part in found.values()), ())
        limit = num_parts if processes.size > 1 else None if index is None else len(index["parts"])
        self._parts = parts if processes.writes else None
        try:
            self._extract(self._batches(start, stop, limit, written))
        except BaseException as error:
            if self._writer is not None:
                self._writer.close()
            if isinstance(error, OSError):
                error.add_note(f"{parts.folder} keeps what is done: mend this, call again, and it goes on")
            with suppress(OSError):
                parts.folder.rmdir()  # if nothing is in it
            raise
        total = -(-self._num_batches // self.source.batches_per_part) if processes.size == 1 else num_parts
        assert total is not None
        processes.together(lambda: parts.finish(total))
        return index is not None and (stop is None or start < stop) and not self._num_recorded

    def _batches(self, start: int, stop: int | None, limit: int | None, written: Written) -> Iterator[Batch]:
        """Yield batches of the missing parts in [start, stop); batches of written parts must be the same."""
        seen: Written = {}
        per_part, num_batches = self.source.batches_per_part, self.source.num_batches
        last = None if stop is None or num_batches is None else min(stop * per_part, num_batches)
        batches = self.source.batches(start * per_part, last)
        total = None if num_batches is None else (num_batches if last is None else last) - start * per_part
        for batch in with_progress(batches, total, "extract", self.progress and self.processes.is_first):
            part = batch.number // per_part
            self._num_batches = batch.number + 1
            if part in written:
                count, inputs = seen.get(part, (0, 0))
                seen[part] = count + 1, batch.checksum(inputs)
                if count + 1 >= written[part][0] and seen[part] != written[part]:
                    raise InterpError(_other_batches(batch.number))
            elif limit is not None and part >= limit:
                raise InterpError(_other_batches(batch.number))
            else:
                yield batch
        if missing := [part for part in written if seen.get(part) != written[part]]:
            raise InterpError(_other_batches(min(missing) * per_part))

    def _extract(self, batches: Iterator[Batch]) -> None:
        """Extract batches. Collective if the model is shared."""
        steps = self.processes.steps(batches, lambda: next(self.source.probes()))
        stops = self.feed.is_default and not self.processes.in_step and not is_sharded(self.model)
        if not self._columns:
            self._run(islice(steps, 1), stops=False)
        self._run(steps, stops)
        if self._parts is not None and self._writer is not None:
            self._publish(self._num_batches - 1)

    def _run(self, steps: Iterator[tuple[Batch, bool]], stops: bool) -> None:
        """Run some batches inside one capture."""
        one = next(steps, None)
        if one is None:
            return
        with self._capture(stops) as acts:
            if stops and self._columns:
                acts.expect(c.name for c in self._columns if is_site(c.name))
            for batch, counts in chain([one], steps):
                alone = self._alone(acts, batch)
                if counts and (self._writer or self._parts):
                    self._record(acts, batch, alone)
                else:
                    self._forward(acts, batch)

    @contextmanager
    def _capture(self, stops: bool) -> Iterator[Activations]:
        """Open a capture that turns values of all sites into rows, in evaluation mode, without gradients."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        options: dict[str, Any] = {
            "select": {pattern: partial(self.rows.rows, pattern) for pattern in self.sites},
            "sink": lambda key, rows: self._deliver(key, rows),  # as `_forward` has it for the batch
            "device": "cpu",
            "attention_bytes": self.attention_bytes,
        }
        try:
            with torch.no_grad(), capture(self.model, self.sites, stop=stops, **options) as acts:
                yield acts
        finally:
            for module, training in modes:
                module.training = training

    def _record(self, acts: Activations, batch: Batch, alone: Alone | None) -> None:
        """Extract one batch; publish its part after the part's last batch."""
        if self._writer is None:
            assert self._parts is not None
            self._parts.folder.mkdir(parents=True, exist_ok=True)
            self._writer = PartWriter(self._columns, self._parts.folder)
        write = self._writer.write

        def deliver(key: str, rows: Tensor) -> None:
            if alone is not None:
                alone.compare(key, rows[self.rows.samples() == alone.sample.first])
            write(key, rows)

        self._forward(acts, batch, deliver)
        if not acts.fired and not self._columns:
            return  # `capture` raises and says why
        for name, values in self.rows.ids().items():
            write(name, values)
        self._check_axes(acts, batch)
        self._writer.commit(batch)
        self._columns = self._writer.columns
        self._num_recorded += 1
        if self._parts is not None and (batch.number + 1) % self.source.batches_per_part == 0:
            self._publish(batch.number)

    def _publish(self, last: int) -> None:
        """Write the part that ends with this batch."""
        assert self._parts is not None and self._writer is not None
        path = self._parts.path(last // self.source.batches_per_part)
        self._writer.publish(path, self._parts.request_text)
        self._writer = None

    def _forward(self, acts: Activations, batch: Batch, deliver: Deliver = lambda key, rows: None) -> None:
        """Run the model on a batch, and pass its rows to `deliver`."""
        acts.clear()
        self.rows.start(batch)
        self._deliver = deliver
        self.feed(batch)

    def _alone(self, acts: Activations, batch: Batch) -> Alone | None:
        """Return rows of a sample without padding, for the padded batches 1, 2, 3, 5, 9, 17, ...; else None.

        Processes in step run equally often, whichever of their batches are padded.
        """
        if not self.check_padding:
            return None
        found = unpadded(batch, self.names)
        if found is None and not self.processes.in_step:
            return None
        self._num_to_look_at += 1
        number = self._num_to_look_at
        if number > 1 and (number - 1) & (number - 2):
            return None
        rows: dict[str, Tensor] = {}
        sample = batch if found is None else found[0]
        self._forward(acts, sample, lambda key, value: rows.update({key: value.clone()}))
        return Alone(*found, rows) if found else None

    def _check_axes(self, acts: Activations, batch: Batch) -> None:
        """With as many tokens as samples, run the batch with one sample less: which axis is first?

        InterpError: samples are not first, or the batch cannot be cut.
        """
        if self._axes_checked or (self.rows.square and batch.size == 1):
            return
        if self.rows.square:
            fewer = batch.cut(0, batch.size - 1)
            if fewer is None or is_distributed(self.model):
                raise InterpError(
                    f"batch {batch.number} has as many samples as tokens or features ({batch.size}): it is "
                    "unknown which come first in a value; expected another number: give another batch_size"
                )
            self._forward(acts, Batch.of(fewer, self.names, batch.number, batch.first))
        self._axes_checked = True


def _other_batches(number: int) -> str:
    return (
        f"batch {number} is not the one that was extracted before; expected the same batches in each run: do "
        "not shuffle, or give resume=False to start anew"
    )
