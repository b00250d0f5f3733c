"""A source of somebody's own with ragged side data, against a loop over what each sequence must have."""

import contextlib
import itertools
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading import batches
from forge_data.loading.loader import MicroBatch, build_loader, build_set_loader
from forge_data.order.phases import PhaseConfig
from forge_data.sources.config import TokensConfig

T, BATCH, TEXT = 8, 16, 50_000


@pytest.fixture(params=["alone", "two", "with_text", "with_masked_documents"])
def config(request: pytest.FixtureRequest, dots: ModuleType, make_store) -> DataConfig:
    """Tokens below TEXT are of dots and tell source and sample; text has none of them."""
    text = str(make_store("s", [40] * 30, first=TEXT))
    first, second = dots.DotsConfig(size=53, held=7), dots.DotsConfig(size=31, first=1000, weight=0.5)
    mixed = [TokensConfig(path=text, validation=text, weight=2.0), first, second]
    sources = {"alone": [first], "two": [first, second], "with_text": mixed}.get(request.param, mixed)
    if request.param == "with_masked_documents":
        sources = [sources[0], dots.MaskedConfig(size=53, held=7)]
    return DataConfig(
        max_tokens=T, sources=sources, seed=5, mask_documents=request.param == "with_masked_documents"
    )


def _take(config: DataConfig, steps: int, workers: int = 0, **settings: int) -> list[list[MicroBatch]]:
    loader = build_loader(config, "train", global_batch=BATCH, **settings)  # type: ignore[arg-type]
    loader.workers = workers
    with contextlib.closing(loader):
        return list(itertools.islice(iter(loader), steps))


def _require_side(dots: ModuleType, micro: MicroBatch) -> int:
    """See that a micro-batch has exactly what its sequences must have; returns how many dots those are."""
    expected, counts, marks = [], [], []
    for token in micro.inputs["tokens"][:, 0].tolist():
        is_text = token >= TEXT
        of = -1 if is_text or micro.statistics["source"][len(counts)] < 0 else token % 1000
        expected += [] if of < 0 else dots.dots_of(token - of, of)
        counts.append(0 if of < 0 else dots.num_dots(of))
        marks.append([of] * T)
    assert micro.inputs["dots"].dtype == torch.float32 and micro.inputs["dots"].shape == (len(expected), 2)
    assert micro.inputs["dots"].tolist() == expected
    assert micro.inputs["num_dots"].tolist() == counts
    assert micro.inputs["marks"].dtype == torch.int32 and micro.inputs["marks"].tolist() == marks
    return len(expected)


@pytest.mark.parametrize(("world", "micro"), [(1, 4), (2, 8), (4, 1)])
def test_ranks_get_the_rows_of_their_own_sequences(
    config: DataConfig, dots: ModuleType, world: int, micro: int
) -> None:
    order = build_loader(config, "train", micro_batch=1, global_batch=BATCH).order
    assert order is not None
    found = 0
    for rank in range(world):
        steps = _take(config, 12, micro_batch=micro, rank=rank, world_size=world)
        served = [micro for step in steps for micro in step]
        found += sum(_require_side(dots, micro) for micro in served)
        at = [s * BATCH + rank * BATCH // world + n for s in range(12) for n in range(BATCH // world)]
        sources = [int(s) for micro in served for s in micro.statistics["source"]]
        assert sources == order.locate(np.asarray(at))[0].tolist()
    expected = 0
    for source, sample in zip(*order.locate(np.arange(12 * BATCH)), strict=True):
        expected += dots.num_dots(int(sample)) * isinstance(config.sources[source], dots.DotsConfig)
    assert found == expected > 50


@pytest.mark.parametrize(("done", "workers"), [(1, 0), (4, 2), (7, 0), (11, 0)])
def test_resumed_stream_goes_on_with_the_same_rows(config: DataConfig, done: int, workers: int) -> None:
    whole = _take(config, 12, micro_batch=4)
    part = _take(config, 12 - done, workers, micro_batch=4, first_sample=done * BATCH)
    for micro, again in zip(*map(itertools.chain.from_iterable, (whole[done:], part)), strict=True):
        assert micro.inputs.keys() == again.inputs.keys() and micro.host == again.host
        assert all(torch.equal(value, again.inputs[name]) for name, value in micro.inputs.items())


def test_all_micro_batches_have_the_same_inputs_when_none_of_their_sequences_has_rows(
    config: DataConfig, dots: ModuleType
) -> None:
    """Phases that read text alone, and groups that read a source alone which others do not name."""
    names = [str(number) for number in range(len(config.sources))]
    phases = [PhaseConfig(start_step=n + 1, weights={name: 1.0}) for n, name in enumerate(names)]
    steps = _take(msgspec.structs.replace(config, phases=phases), 2 + len(names), micro_batch=4)
    kinds = {
        tuple((name, value.dtype, value.shape[1:]) for name, value in sorted(micro.inputs.items()))
        for step in steps
        for micro in step
    }
    assert len(kinds) == 1
    served = {source for step in steps for micro in step for source in micro.statistics["source"].tolist()}
    assert served == set(range(len(names)))
    for step in steps:
        for micro in step:
            _require_side(dots, micro)


@pytest.mark.parametrize("world", [1, 3])
def test_validation_serves_each_row_once_and_padding_has_none(
    config: DataConfig, dots: ModuleType, world: int
) -> None:
    ranks = [
        [step[0] for step in build_loader(config, "validation", rank=r, world_size=world, micro_batch=5)]
        for r in range(world)
    ]
    found = sum(_require_side(dots, micro) for rank in ranks for micro in rank)
    assert found == sum(dots.num_dots(sample) for sample in range(7))
    padding = [micro for rank in ranks for micro in rank if (micro.statistics["source"] < 0).any()]
    assert padding and len({len(rank) for rank in ranks}) == 1
    assert len({tuple(sorted(micro.inputs)) for rank in ranks for micro in rank}) == 1


def test_micro_batch_of_nothing_but_padding_has_the_inputs_of_the_others(make_store) -> None:
    text = str(make_store("s", [5] * 30))
    source = TokensConfig(path=text, validation=text)
    config = DataConfig(max_tokens=T, sources=[source], mask_documents=True, validation_samples=2)
    ranks = [build_loader(config, "validation", micro_batch=2, rank=r, world_size=2) for r in range(2)]
    ((full,),), ((padding,),) = map(list, ranks)
    assert (padding.statistics["source"] < 0).all()
    assert {n: (v.shape, v.dtype) for n, v in padding.inputs.items()} == {
        n: (v.shape, v.dtype) for n, v in full.inputs.items()
    }
    assert (padding.inputs["doc_ids"] == -1).all() and (full.inputs["doc_ids"] >= 0).all()


def test_end_of_the_sources_is_padded_without_rows(dots: ModuleType) -> None:
    config = DataConfig(
        max_tokens=T, sources=[dots.DotsConfig(size=21, max_epochs=1.0)], when_exhausted="stop"
    )
    (step, *_) = _take(config, 1, micro_batch=4)
    loader = build_loader(config, "train", micro_batch=4, global_batch=BATCH)
    group = loader.batches.group(0)
    assert (group.source < 0).any() and group.ragged["dots"].counts[group.source < 0].sum() == 0
    assert group.ragged["dots"].counts.sum() == sum(dots.num_dots(sample) for sample in range(21))
    assert sum(_require_side(dots, micro) for micro in step) > 0


def test_set_of_an_evaluation_is_opened_with_items(dots: ModuleType, config: DataConfig) -> None:
    items: Any = SimpleNamespace(digest="a reader")
    config = msgspec.structs.replace(config, mask_documents=False)
    loader = build_set_loader(config, [dots.DotsConfig(size=9)], 0, micro_batch=4, items=items)
    assert sum(_require_side(dots, micro) for (micro,) in loader) == sum(map(dots.num_dots, range(9)))
    assert loader.packings[0].digest == "train 9 0 a reader"


def test_fingerprint_names_the_digest_of_both_splits(dots: ModuleType) -> None:
    def of(items: Any = None, **changes: int) -> str:
        source = dots.DotsConfig(**{"size": 53, "held": 7} | changes)
        config = DataConfig(max_tokens=T, sources=[source])
        return build_loader(config, "train", micro_batch=1, global_batch=1, items=items).fingerprint

    reader = SimpleNamespace(digest="a reader")
    assert len({of(), of(size=54), of(held=8), of(held=0), of(first=1), of(reader)}) == 6


def test_fingerprint_names_the_reader_of_items_also_where_a_source_forgets_it(
    dots: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dots.DotsConfig, "packing", lambda self, opening: dots.Dots(9, 0, opening.data.max_tokens, "the same")
    )
    config = DataConfig(max_tokens=T, sources=[dots.DotsConfig(size=9)])
    readers: list[Any] = [None, SimpleNamespace(digest="a reader"), SimpleNamespace(digest="another")]
    found = {
        build_loader(config, "train", micro_batch=1, global_batch=1, items=items).fingerprint
        for items in readers
    }
    assert len(found) == 3


def test_items_are_nothing_to_text(make_store) -> None:
    config = DataConfig(max_tokens=T, sources=[TokensConfig(path=str(make_store("s", [5] * 30)))])
    reader: Any = SimpleNamespace(digest="a reader")
    plain, told = (
        build_loader(config, "train", micro_batch=1, global_batch=1, items=items) for items in (None, reader)
    )
    assert plain.fingerprint == told.fingerprint


def test_inputs_that_stay_on_the_host_are_not_copied(config: DataConfig) -> None:
    micro = _take(config, 1, micro_batch=4)[0][0]
    moved = micro.to("meta")
    assert {name for name, value in moved.inputs.items() if value.device.type == "cpu"} == {"num_dots"}
    assert all(value.device.type == "meta" for value in moved.statistics.values())
    assert moved.host == {"num_dots"} and micro.to("cpu").sources == micro.sources


@pytest.mark.parametrize(("row_bytes", "together"), [(0, 256), (1 << 15, 256), (1 << 16, 128), (1 << 30, 1)])
def test_group_holds_at_most_its_bytes_or_one_item(
    dots: ModuleType, monkeypatch: pytest.MonkeyPatch, row_bytes: int, together: int
) -> None:
    """A sequence has 8 + 4 * T bytes of dense inputs too; those bytes are no part of the round numbers."""
    monkeypatch.setattr(batches, "GROUP_BYTES", (8 << 20) + 256 * (8 + 4 * T))
    packing = dots.Dots(1000, 0, T, "d")
    packing.sequence_bytes = row_bytes
    order = build_loader(
        DataConfig(max_tokens=T, sources=[dots.DotsConfig(size=1000)]), "train", micro_batch=1, global_batch=1
    ).order
    assert order is not None
    one = batches.TrainBatches({0: packing}, 1, order, 0, 1, 0, 1)
    assert one.together == together and len(one.group(3).rows) == together
    assert one.group(3).rows[0, 0, 0] == one._order.locate(np.asarray([3 * together]))[1][0]
    whole = batches.TrainBatches({0: packing}, 2, order, 0, 64, 0, 1)
    assert whole.together == max(1, together // 64) and whole.micro_batches == 32


def test_text_is_read_together_as_without_side_data(make_store) -> None:
    """With masked documents a sequence has 16 bytes a token beside it: the limit of tokens comes first."""
    sources = [TokensConfig(path=str(make_store("s", [40_000])))]
    for tokens, together in ((8, 256), (256, 256), (512, 128), (16_384, 4)):
        for masked in (False, True):
            config = DataConfig(max_tokens=tokens, sources=sources, mask_documents=masked)
            loader = build_loader(config, "train", micro_batch=1, global_batch=1)
            assert loader.batches.together == together


def test_batches_with_side_data_travel_to_workers_small(config: DataConfig) -> None:
    data = pickle.dumps(build_loader(config, "train", micro_batch=2, global_batch=BATCH).batches)
    assert len(data) < 5000


def test_source_without_samples_for_validation_says_nothing(dots: ModuleType) -> None:
    config = DataConfig(max_tokens=T, sources=[dots.DotsConfig(size=9)])
    assert not config.has_validation()
    with pytest.raises(DataError, match="no source has text for validation"):
        build_loader(config, "validation", micro_batch=1)
