"""What sources declare beside tokens, and what they give in its place."""

from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import build_loader
from forge_data.loading.side import SideData
from forge_data.packing.packing import Packing, Ragged, Sequences
from forge_data.sources.config import TokensConfig

T = 4


class Made(Packing):
    """A packing that gives what it is told."""

    def __init__(self, gives: Sequences | None = None, **attributes: Any) -> None:
        self.max_tokens, self.gives = T, gives
        self.__dict__ |= attributes


TOKENS = np.zeros((2, T + 1), np.int64)
DECLARED: dict[str, Any] = {
    "extra": {"sizes": np.zeros(3, np.int32)},
    "ragged": {"rows": np.empty((0, 2), np.float32)},
}


def _joined(count: int, *given: tuple[list[int], Sequences]) -> Any:
    side = SideData({number: Made(**DECLARED) for number in range(2)}, ["good", "own"])
    here = {number: np.asarray(places) for number, (places, _) in enumerate(given)}
    return side.joined(count, here, {number: part for number, (_, part) in enumerate(given)})


def _sequences(**changes: Any) -> Sequences:
    sizes, values = np.ones((2, 3), np.int32), np.ones((3, 2), np.float32)
    plain = {
        "tokens": TOKENS,
        "extra": {"sizes": sizes},
        "ragged": {"rows": Ragged(values, np.asarray([1, 2]))},
    }
    return Sequences(**plain | changes)


def test_rows_follow_the_order_of_the_sequences_when_two_sources_have_some() -> None:
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    first = _sequences(ragged={"rows": Ragged(values[:3], np.asarray([1, 2]))})
    second = _sequences(ragged={"rows": Ragged(values[3:], np.asarray([0, 3]))})
    extra, ragged = _joined(5, ([1, 4], first), ([0, 3], second))
    assert ragged["rows"].counts.tolist() == [0, 1, 0, 3, 2]
    assert ragged["rows"].values.tolist() == values[[0, 3, 4, 5, 1, 2]].tolist()
    assert extra["sizes"].tolist() == [[1] * 3, [1] * 3, [0] * 3, [1] * 3, [1] * 3]


def test_rows_that_cannot_be_written_are_copied() -> None:
    """As of a file that is mapped read-only, which torch does not take."""
    values = np.ones((3, 2), np.float32)
    values.flags.writeable = False
    _, ragged = _joined(2, ([0, 1], _sequences(ragged={"rows": Ragged(values[::-1], np.asarray([1, 2]))})))
    assert ragged["rows"].values.flags.writeable and ragged["rows"].values.flags.c_contiguous


rows = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ragged": {"rows": Ragged(rows, np.asarray([1, 1]))}}, "gives 3 rows of rows; expected 2"),
        ({"ragged": {"rows": Ragged(rows, np.asarray([4, -1]))}}, "expected integers from 0 on"),
        ({"ragged": {"rows": Ragged(rows, np.asarray([1.0, 2.0]))}}, "expected integers from 0 on"),
        ({"ragged": {"rows": Ragged(rows, np.asarray([3]))}}, "one for each of 2 sequences"),
        ({"ragged": {"rows": Ragged(rows[:, :1], np.asarray([1, 2]))}}, r"rows float32 \[3, 1\]"),
        ({"ragged": {"rows": Ragged(rows.astype(int), np.asarray([1, 2]))}}, r"rows int64 \[3, 2\]"),
        ({"ragged": {}}, "gives nothing beside tokens; expected what it declares: rows"),
        ({"ragged": {"rwos": Ragged(rows, np.asarray([1, 2]))}}, "gives rwos beside tokens"),
        ({"extra": {}}, "gives nothing beside tokens; expected what it declares: sizes"),
        ({"extra": {"sizes": np.ones((2, 2), np.int32)}}, r"sizes int32 \[2, 2\]; expected int32 \[2, 3\]"),
        ({"extra": {"sizes": np.ones((2, 3))}}, "sizes float64"),
        ({"tokens": TOKENS[:, 1:]}, r"gives tokens int64 \[2, 4\]; expected integers \[2, 5\]"),
        ({"tokens": TOKENS * 1.0}, "gives tokens float64"),
    ],
)
def test_sequences_that_are_not_as_declared_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^source own: its Made .*{said}"):
        _joined(4, ([0, 1], _sequences()), ([2, 3], _sequences(**changes)))


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"extra": {"labels": np.zeros(T, np.int64)}}, "labels, which is another input already"),
        ({"extra": {"rows": np.zeros(T, np.int64)}}, "rows, which is another input already"),
        ({"ragged": {"sizes": np.empty((0, 1), np.int64)}}, "sizes, which is another input already"),
        ({"ragged": {"text": np.empty(0, "U3")}}, "text as <U3"),
        ({"ragged": {"wide": np.empty(0, ">f4")}}, "wide as >f4"),
        ({"ragged": {"one": np.zeros((1, 2))}}, r"one as \[1, 2\]; expected no rows"),
        ({"ragged": {"one": np.zeros(())}}, r"one as \[\]; expected no rows"),
        (
            {"ragged": {"rows": np.empty((0, 3), np.float32)}},
            r"float32 \[0, 3\], source good as float32 \[0, 2\]",
        ),
        ({"extra": {"sizes": np.zeros(3, np.int64)}}, "expected the same dtype"),
        ({"extra": {"sizes": np.ones(3, np.int32)}}, "expected the same dtype, shape and values"),
        ({"host": frozenset({"size"})}, "leaves size on the host"),
    ],
)
def test_declarations_that_contradict_each_other_are_refused(attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^source own: its Made .*{said}"):
        SideData({0: Made(**DECLARED), 1: Made(**attributes)}, ["good", "own"])


def test_declared_values_may_be_no_numbers() -> None:
    nan = {"extra": {"score": np.full(1, np.nan, np.float32)}, "ragged": {}}
    assert np.isnan(SideData({0: Made(**nan), 1: Made(**nan)}, ["one", "two"]).extra["score"]).all()


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        ({}, {"digest": ""}, "source 0: its Dots has no digest"),
        ({}, {"max_tokens": 9}, "source 0: its Dots has sequences of 9 tokens"),
        ({}, {"sequence_bytes": 0}, "source 0: its Dots gives dots, of which each .* no sequence_bytes"),
        (
            {"mask_documents": True},
            {},
            "source 0: its Dots gives num_dots, marks beside tokens; data.mask_doc",
        ),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_packing_without_what_all_have_is_refused(
    dots: ModuleType, monkeypatch: pytest.MonkeyPatch, settings: Any, changes: Any, said: str, split: Any
) -> None:
    config = DataConfig(max_tokens=T, sources=[dots.DotsConfig(size=9, held=9)], **settings)
    made = dots.DotsConfig.packing

    def packing(self: Any, opening: Any) -> Packing:
        found = made(self, opening)
        found.__dict__ |= changes if opening.split == split else {}
        return found

    monkeypatch.setattr(dots.DotsConfig, "packing", packing)
    with pytest.raises(DataError, match=said):
        build_loader(config, "train", micro_batch=1, global_batch=1)


def test_worker_says_which_source_gave_what_it_did_not_declare(dots: ModuleType) -> None:
    config = DataConfig(max_tokens=T, sources=[dots.DotsConfig(size=9, name="mine")], workers=1)
    loader = build_loader(config, "train", micro_batch=1, global_batch=1)
    loader.packings[0].ragged = {"dots": np.empty((0, 3), np.float32)}
    with pytest.raises(DataError, match="source mine: its Dots gives dots"):
        next(iter(loader))
    loader.close()


def test_own_source_shares_batches_with_text_of_masked_documents(dots: ModuleType, make_store) -> None:
    """What both give is that of each; a source of one's own without documents is refused, see above."""
    text = TokensConfig(path=str(make_store("s", [3] * 40, first=500)))
    config = DataConfig(max_tokens=T, sources=[text, dots.MaskedConfig(size=9)], mask_documents=True)
    plain = msgspec.structs.replace(config, sources=[text, text])
    ours, both = (build_loader(c, "train", micro_batch=8, global_batch=8) for c in (config, plain))
    (micro,), (reference,) = next(iter(ours)), next(iter(both))
    of_text = micro.statistics["source"] == 0
    for name in ("tokens", "doc_ids", "positions"):
        assert (micro.inputs[name][of_text] == reference.inputs[name][of_text]).all()
        if name == "positions":
            assert (micro.inputs[name][~of_text] == np.arange(T)).all()
