"""The inputs of batches of several sources beside tokens. n sequences, T tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from forge_data.error import DataError
from forge_data.packing.packing import Packing, Ragged, Sequences

RESERVED = frozenset(
    {"tokens", "labels", "loss_fn", "hidden", "cache", "last_logits", "ahead_tokens", "ahead_labels"}
)


class SideData:
    """The inputs beside tokens that every batch has, whatever the sources of its sequences.

    Args:
        packings: the sequences of each source, by its place in the configuration.
        names: the name of each source; without names, their places.

    Attributes:
        extra: by name, the value [...] for padding and for sequences of sources without this input.
        ragged: by name, an array [0, ...] of the dtype and shape of the rows.
        host: names of inputs that stay in host memory.
        sequence_bytes: bytes of these inputs in one sequence of the source with the most.

    Raises:
        DataError: names the source whose declaration contradicts itself, or that of another source.
    """

    def __init__(self, packings: Mapping[int, Packing], names: Sequence[str] = ()) -> None:
        self._names = {number: names[number] if names else str(number) for number in packings}
        self._packings = packings
        self.extra: dict[str, np.ndarray] = {}
        self.ragged: dict[str, np.ndarray] = {}
        for number, packing in packings.items():
            for array_of, declared in ((self.extra, packing.extra), (self.ragged, packing.ragged)):
                for name, array in declared.items():
                    self._require_known(number, name, array, array_of is self.ragged)
                    array_of.setdefault(name, array)
            if unknown := packing.host - packing.extra.keys() - packing.ragged.keys():
                raise self._error(
                    number, f"leaves {_listed(unknown)} on the host; expected names that it declares"
                )
        self.host = frozenset[str]().union(*(packing.host for packing in packings.values()))
        ragged_bytes = max(packing.sequence_bytes for packing in packings.values())
        self.sequence_bytes = ragged_bytes + sum(array.nbytes for array in self.extra.values())

    def joined(
        self, count: int, here: Mapping[int, np.ndarray], read: Mapping[int, Sequences]
    ) -> tuple[dict[str, np.ndarray], dict[str, Ragged]]:
        """Return the inputs of n sequences, in their order.

        Args:
            count: n.
            here: for each source, which of the n sequences are its own, rising.
            read: the sequences of the sources that have any.

        Returns:
            `extra` [n, ...] and `ragged` with counts [n], each with all its names.

        Raises:
            DataError: names the source that returns something else than it declared.
        """
        for number, part in read.items():
            self._require_declared(number, len(here[number]), part)
        extra = {
            name: _filled(
                count, array, [(here[n], p.extra[name]) for n, p in read.items() if name in p.extra]
            )
            for name, array in self.extra.items()
        }
        ragged = {
            name: _merged(
                count, array, [(here[n], p.ragged[name]) for n, p in read.items() if name in p.ragged]
            )
            for name, array in self.ragged.items()
        }
        return extra, ragged

    def _require_known(self, number: int, name: str, array: np.ndarray, is_ragged: bool) -> None:
        """Refuse a declared input whose name clashes, or that other sources declare differently."""
        if name in RESERVED or name in (self.extra if is_ragged else self.ragged):
            raise self._error(number, f"declares {name}, which is another input already; rename one of them")
        if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise self._error(number, f"declares {name} as {type(array).__name__}; expected a numpy array")
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8 or not array.dtype.isnative:
            raise self._error(
                number, f"declares {name} as {array.dtype}; expected numbers of at most 8 bytes"
            )
        if is_ragged and (array.ndim == 0 or len(array)):
            raise self._error(number, f"declares {name} as {list(array.shape)}; expected no rows, [0, ...]")
        first = (self.ragged if is_ragged else self.extra).get(name, array)
        alike = first.dtype == array.dtype and first.shape == array.shape
        if not alike or first.tobytes() != array.tobytes():
            others = [n for n, p in self._packings.items() if name in (p.ragged if is_ragged else p.extra)]
            raise self._error(
                number,
                f"declares {name} as {_text(array)}, source {self._names[others[0]]} as {_text(first)}; "
                "expected the same dtype, shape and values",
            )

    def _require_declared(self, number: int, count: int, part: Sequences) -> None:
        """Refuse sequences whose inputs differ from the declared ones."""
        packing = self._packings[number]
        if not isinstance(part, Sequences):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise self._error(number, f"reads {type(part).__name__}; expected forge_data's Sequences")
        shape = count, packing.max_tokens + 1
        if part.tokens.shape != shape or part.tokens.dtype.kind not in "iu":
            raise self._error(number, f"gives tokens {_text(part.tokens)}; expected integers {list(shape)}")
        extra = packing.extra
        for given, declared in ((part.extra, extra), (part.ragged, packing.ragged)):
            if given.keys() != declared.keys():
                raise self._error(
                    number,
                    f"gives {_listed(given)} beside tokens; expected what it declares: {_listed(declared)}",
                )
        for name, array in part.extra.items():
            expected = extra[name]
            if array.dtype != expected.dtype or array.shape != (count, *expected.shape):
                raise self._error(number, f"gives {name} {_text(array)}; expected {_text(expected, count)}")
        for name, ragged in part.ragged.items():
            self._require_rows(number, count, name, ragged)

    def _require_rows(self, number: int, count: int, name: str, ragged: Ragged) -> None:
        """Check that rows are as declared, and as many as their counts."""
        (values, counts), expected = ragged, self._packings[number].ragged[name]
        if values.dtype != expected.dtype or values.shape[1:] != expected.shape[1:]:
            raise self._error(number, f"gives {name} {_text(values)}; expected rows of {_text(expected)}")
        if counts.shape != (count,) or counts.dtype.kind not in "iu" or counts.min(initial=0) < 0:
            raise self._error(
                number,
                f"gives counts of {name} {_text(counts)}; expected integers from 0 on, one for each of "
                f"{count} sequences",
            )
        if int(counts.sum()) != len(values):
            raise self._error(
                number,
                f"gives {len(values)} rows of {name}; expected {counts.sum()}, the sum of its counts",
            )

    def _error(self, number: int, problem: str) -> DataError:
        return DataError(
            f"source {self._names[number]}: its {type(self._packings[number]).__name__} {problem}"
        )


def _filled(count: int, default: np.ndarray, given: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """[count, ...]: what is given at its places, the default elsewhere."""
    if len(given) == 1 and len(given[0][0]) == count:
        return np.require(given[0][1], requirements="W")
    found = np.empty((count, *default.shape), dtype=default.dtype)
    without = np.ones(count, dtype=np.bool_)
    for places, array in given:
        found[places], without[places] = array, False
    found[without] = default
    return found


def _merged(count: int, empty: np.ndarray, given: list[tuple[np.ndarray, Ragged]]) -> Ragged:
    """Put rows into the order of the sequences; sequences of other sources have none."""
    counts = np.zeros(count, dtype=np.int64)
    for places, part in given:
        counts[places] = part.counts
    if len(given) == 1:
        return Ragged(np.require(given[0][1].values, requirements=["C", "W"]), counts)
    starts = np.cumsum(counts) - counts
    values = np.empty((int(counts.sum()), *empty.shape[1:]), dtype=empty.dtype)
    for places, part in given:
        own = counts[places]
        shift = starts[places] - (np.cumsum(own) - own)
        values[np.arange(len(part.values)) + np.repeat(shift, own)] = part.values
    return Ragged(values, counts)


def _text(array: np.ndarray, *first: int) -> str:
    return f"{array.dtype} {[*first, *array.shape]}"


def _listed(names: Mapping[str, object] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
