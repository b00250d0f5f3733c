import contextlib
import itertools
import os
import pickle
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import Loader, build_loader
from forge_data.order.phases import PhaseConfig
from forge_data.sources.config import TokensConfig

T = 8


@pytest.fixture
def config(make_store) -> DataConfig:
    """Two sources of 41 and 150 sequences; tokens tell their source and place."""
    a, b = make_store("a", [100, 228]), make_store("b", [7] * 171 + [4], first=10_000)
    held = make_store("v", [20, 33], first=50_000)
    sources = [
        TokensConfig(path=str(a), validation=str(held), weight=0.3),
        TokensConfig(path=str(b), validation=str(held), weight=0.7),
    ]
    return DataConfig(max_tokens=T, sources=sources, seed=3)


def _rows(steps: list, name: str = "tokens") -> list[list[int]]:
    return [row.tolist() for step in steps for micro in step for row in micro.inputs[name]]


def _take(config: DataConfig, count: int, workers: int = 0, **settings: int) -> list:
    loader = build_loader(config, "train", **settings)  # type: ignore[arg-type]
    loader.workers = workers
    with contextlib.closing(loader):
        return list(itertools.islice(iter(loader), count))


def _global(config: DataConfig, steps: int, world_size: int, **settings: int) -> list[list[list[int]]]:
    """The rows of each global batch, as all ranks together see them."""
    ranks = [_take(config, steps, rank=r, world_size=world_size, **settings) for r in range(world_size)]
    return [_rows([rank[step] for rank in ranks]) for step in range(steps)]


@pytest.fixture
def mixture(config: DataConfig, make_store, tmp_path: Path) -> DataConfig:
    """Three sources, two phases, packed."""
    c = make_store("c", np.random.default_rng(0).integers(1, 20, 90).tolist(), first=30_000)
    names = [
        msgspec.structs.replace(source, name=name) for source, name in zip(config.sources, "ab", strict=True)
    ]
    sources = [*names, TokensConfig(path=str(c), name="c", weight=0.5)]
    phases = [PhaseConfig(start_step=17, weights={"a": 0.2, "c": 0.8})]
    return msgspec.structs.replace(
        config, sources=sources, phases=phases, packing="bestfit", cache_dir=str(tmp_path)
    )


@pytest.mark.parametrize("name", ["config", "mixture"])
def test_loader_serves_the_same_stream_over_random_schedules_of_ranks_and_kills(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Any world size, accumulation and kill points: the same global batches, each exactly once."""
    monkeypatch.setattr("forge_data.loading.batches.LOOKAHEAD", 64)
    config, batch = request.getfixturevalue(name), 48
    whole = _global(config, 40, 1, micro_batch=4, global_batch=batch)
    draw, done, served = random.Random(0), 0, []
    while done < 40:
        world = draw.choice([1, 2, 3, 4, 6, 8, 12, 16])
        micro = draw.choice([m for m in (1, 2, 3, 4, 6) if batch % (m * world) == 0])
        steps = min(draw.randint(1, 7), 40 - done)
        served += _global(
            config, steps, world, micro_batch=micro, global_batch=batch, first_sample=done * batch
        )
        done += steps
    assert served == whole


@pytest.mark.slow
@pytest.mark.parametrize("batch", [48, 60, 104, 110, 126])
def test_packed_mixture_is_the_same_over_all_schedules_of_ranks_workers_and_kills(
    mixture: DataConfig, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Each number of ranks from 1 to 16 divides one of the batches; each takes 0 to 4 workers in turn."""
    monkeypatch.setattr("forge_data.loading.batches.LOOKAHEAD", 64)
    draw, done, served = random.Random(batch), 0, []
    schedule = list(itertools.product([n for n in range(1, 17) if batch % n == 0], range(5)))
    draw.shuffle(schedule)
    for world, workers in schedule:
        steps, with_workers = draw.randint(1, 2), draw.randrange(world)
        micro = draw.choice([m for m in range(1, batch + 1) if batch % (m * world) == 0])
        settings = {"micro_batch": micro, "global_batch": batch, "first_sample": done * batch}
        parts = [
            _take(mixture, steps, workers * (r == with_workers), rank=r, world_size=world, **settings)
            for r in range(world)
        ]
        served += [_rows([part[step] for part in parts]) for step in range(steps)]
        done += steps
    assert served == _global(mixture, done, 1, micro_batch=2, global_batch=batch)


def test_loader_with_workers_serves_the_packed_mixture(mixture: DataConfig) -> None:
    whole = _rows(_take(mixture, 20, micro_batch=8, global_batch=8))
    part = _take(mixture, 15, workers=3, micro_batch=2, global_batch=8, first_sample=5 * 8)
    assert _rows(part) == whole[5 * 8 :]


def test_fingerprint_names_the_packing(config: DataConfig, tmp_path: Path) -> None:
    def of(**changes: object) -> str:
        changed = msgspec.structs.replace(config, cache_dir=str(tmp_path), **changes)
        return build_loader(changed, "train", micro_batch=1, global_batch=1).fingerprint

    changes = [{}, {"mask_boundaries": True}, *({"packing": name} for name in ("bestfit", "pad", "crop"))]
    assert len({of(**change) for change in changes}) == 5


def test_loader_serves_each_sequence_once_an_epoch(config: DataConfig) -> None:
    one = DataConfig(max_tokens=T, sources=config.sources[1:], seed=0)
    rows = _rows(_take(one, 30, micro_batch=5, global_batch=5))
    assert len(rows) == 150
    assert len({tuple(row) for row in rows}) == 150


@pytest.mark.parametrize("start", [0, 7])
def test_loader_resumes_at_a_midpoint_with_workers(config: DataConfig, start: int) -> None:
    whole = _rows(_take(config, 12, micro_batch=2, global_batch=4))
    part = _take(config, 12 - start, workers=2, micro_batch=2, global_batch=4, first_sample=start * 4)
    assert _rows(part) == whole[start * 4 :]


def test_loader_continues_exactly_when_the_global_batch_changes(config: DataConfig) -> None:
    whole = _rows(_take(config, 12, micro_batch=1, global_batch=4))
    parts = _take(config, 4, micro_batch=2, global_batch=4)
    parts += _take(config, 2, micro_batch=4, global_batch=16, first_sample=16)
    assert _rows(parts) == whole


def test_loader_starts_again_where_it_started(config: DataConfig) -> None:
    loader = build_loader(config, "train", micro_batch=2, global_batch=2, first_sample=6)
    first, again = (list(itertools.islice(iter(loader), 3)) for _ in range(2))
    assert _rows(first) == _rows(again)


def test_loader_labels_are_the_tokens_that_follow(config: DataConfig) -> None:
    for step in _take(config, 50, micro_batch=4, global_batch=4):
        for micro in (m.inputs for m in step):
            assert micro["tokens"].dtype == micro["labels"].dtype == torch.int64
            assert micro["tokens"].shape == micro["labels"].shape == (4, T)
            targets = micro["labels"] != -100
            assert torch.equal(micro["labels"][targets], micro["tokens"][targets] + 1)
            assert targets[:, -1].all()


@pytest.mark.parametrize("masked", [False, True])
def test_loader_counts_the_targets_and_names_the_source_of_each_sequence(
    config: DataConfig, masked: bool
) -> None:
    both = DataConfig(max_tokens=T, sources=config.sources, mask_documents=masked)
    ignored = 0
    for step in _take(both, 60, micro_batch=4, global_batch=8):
        for micro in step:
            assert micro.statistics["source"].tolist() == [
                int(t) for t in micro.inputs["tokens"][:, 0] >= 10_000
            ]
            assert micro.statistics["targets"].shape == ()
            assert int(micro.statistics["targets"]) == int((micro.inputs["labels"] >= 0).sum())
            ignored += int((micro.inputs["labels"] < 0).sum())
    assert ignored


def test_validation_marks_padding_as_of_no_source(config: DataConfig) -> None:
    few = DataConfig(max_tokens=T, sources=config.sources, validation_samples=3)
    ((micro,),) = build_loader(few, "validation", micro_batch=5)
    assert (micro.statistics["source"] < 0).tolist() == [False, False, False, True, True]
    assert int(micro.statistics["targets"]) == int((micro.inputs["labels"] >= 0).sum())


@pytest.mark.parametrize("split", ["train", "validation"])
def test_store_that_is_cut_off_while_it_is_read_is_an_error(config: DataConfig, split) -> None:
    served = iter(build_loader(config, split, micro_batch=4, global_batch=4))
    next(served)
    source = config.sources[0]
    assert isinstance(source, TokensConfig)
    path = Path(source.path if split == "train" else str(source.validation))
    os.truncate(path / "tokens.bin", 8)
    with pytest.raises(DataError, match=r"tokens.bin has 8 bytes"):
        for _ in itertools.islice(served, 1000):
            pass


def test_loader_keeps_weights(config: DataConfig) -> None:
    rows = _rows(_take(config, 64, micro_batch=64, global_batch=64))
    assert abs(sum(row[0] < 10_000 for row in rows) - 0.3 * 4096) < 1


def test_loader_cuts_a_step_into_micro_batches(config: DataConfig) -> None:
    (step,) = _take(config, 1, micro_batch=2, global_batch=12, world_size=2)
    assert [len(micro.inputs["tokens"]) for micro in step] == [2, 2, 2]


def test_loader_masks_documents(config: DataConfig) -> None:
    """Source b has a document every seven tokens: ids, positions, ignored targets follow from the token."""
    masked = DataConfig(max_tokens=T, sources=config.sources[1:], mask_documents=True)
    for step in _take(masked, 20, micro_batch=3, global_batch=3):
        for micro in (m.inputs for m in step):
            document = (micro["tokens"] - 10_000) // 7
            assert torch.equal(micro["doc_ids"], document - document[:, :1])
            start = torch.maximum(document * 7 + 10_000, micro["tokens"][:, :1])
            assert torch.equal(micro["positions"], micro["tokens"] - start)
            crosses = (micro["tokens"] + 1 - 10_000) // 7 != document
            assert (micro["labels"][crosses] == -100).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [0, 1, 5, 9])
def test_validation_counts_every_target_once_over_any_number_of_ranks(
    config: DataConfig, world_size: int, samples: int
) -> None:
    settings = {"max_tokens": T, "sources": config.sources[:1], "validation_samples": samples}
    reference = _targets(DataConfig(**settings), 1)
    assert _targets(DataConfig(**settings), world_size) == reference
    assert len(set(reference)) == len(reference)
    if samples == 0:
        assert reference == list(range(50_001, 50_053))


def _targets(config: DataConfig, world_size: int) -> list[int]:
    found: list[int] = []
    lengths = set()
    for rank in range(world_size):
        loader = build_loader(config, "validation", rank=rank, world_size=world_size, micro_batch=2)
        steps = list(loader)
        lengths.add(len(steps))
        found += [t for row in _rows(steps, "labels") for t in row if t != -100]
    assert len(lengths) == 1
    return sorted(found)


@pytest.mark.parametrize(
    ("batch", "micro", "world", "advice"),
    [
        (10, 4, 1, "8 or 12, or a micro-batch of 2"),
        (3, 4, 2, "global batch of 8"),
        (0, 4, 2, "global batch of 8"),
    ],
)
def test_loader_refuses_a_batch_that_does_not_divide(
    config: DataConfig, batch: int, micro: int, world: int, advice: str
) -> None:
    with pytest.raises(DataError, match=advice):
        build_loader(config, "train", micro_batch=micro, global_batch=batch, world_size=world)


@pytest.mark.parametrize(
    "wrong", [{"rank": 2, "world_size": 2}, {"rank": -1}, {"micro_batch": 0}, {"first_sample": -1}]
)
def test_loader_refuses_impossible_places(config: DataConfig, wrong: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"-1|2|0"):
        build_loader(config, "train", **{"micro_batch": 1, "global_batch": 2, **wrong})  # type: ignore[arg-type]


def test_fingerprint_names_the_stream_and_nothing_else(config: DataConfig) -> None:
    def of(**changes: object) -> str:
        changed = DataConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | changes)
        return build_loader(changed, "train", micro_batch=1, global_batch=1).fingerprint

    assert of(workers=2, validation_samples=3) == of()
    assert len({of(), of(seed=4), of(max_tokens=4), of(sources=config.sources[::-1])}) == 4
    heavier = [config.sources[0], msgspec.structs.replace(config.sources[1], weight=0.8)]
    assert of(sources=heavier) != of()


def test_loader_refuses_a_checkpoint_made_on_other_data(config: DataConfig) -> None:
    loader = build_loader(config, "train", micro_batch=1, global_batch=1)
    loader.require(None)
    loader.require(loader.fingerprint)
    with pytest.raises(DataError, match="new run"):
        loader.require("other")


def test_loader_state_is_plain_numbers(config: DataConfig) -> None:
    """Ten billion samples on, the first batch is as near as the first of all."""
    loader: Loader = build_loader(config, "train", micro_batch=2, global_batch=2, first_sample=10**10)
    assert np.isin(_rows([next(iter(loader))]), [*range(328), *range(10_000, 11_201)]).all()


def test_batches_travel_to_workers_as_places(config: DataConfig) -> None:
    """Where workers are not forked, the data set is pickled: it must be small, and the same."""
    batches = build_loader(config, "train", micro_batch=2, global_batch=2).batches
    data = pickle.dumps(batches)
    assert len(data) < 5000
    assert pickle.loads(data).group(5).rows.tolist() == batches.group(5).rows.tolist()


def test_validation_reads_the_sources_that_have_text_for_it(config: DataConfig) -> None:
    """The first source has none; sources keep their number."""
    bare = TokensConfig(path=config.sources[0].path)  # type: ignore[attr-defined]
    mixed = DataConfig(max_tokens=T, sources=[bare, config.sources[1]])
    for (micro,) in build_loader(mixed, "validation", micro_batch=2):
        assert set(micro.statistics["source"].tolist()) <= {1, -1}
        assert (micro.inputs["tokens"][micro.statistics["source"] == 1] >= 50_000).all()


def test_training_needs_no_text_for_validation(config: DataConfig) -> None:
    bare = DataConfig(max_tokens=T, sources=[TokensConfig(path=config.sources[0].path)])  # type: ignore[attr-defined]
    assert not bare.has_validation() and config.has_validation()
    assert _take(bare, 2, micro_batch=1, global_batch=1)
    with pytest.raises(DataError, match="held_out"):
        build_loader(bare, "validation", micro_batch=1)


def test_fingerprint_names_weights_and_the_text_for_validation(config: DataConfig, make_store) -> None:
    other = make_store("v2", [20, 33], first=50_001)

    def of(**changes: object) -> str:
        kept = {name: getattr(config.sources[0], name) for name in ("path", "validation", "weight")}
        first = TokensConfig(**kept | changes)  # type: ignore[arg-type]
        changed = DataConfig(max_tokens=T, sources=[first, config.sources[1]], seed=3)
        return build_loader(changed, "train", micro_batch=1, global_batch=1).fingerprint

    assert len({of(), of(weight=0.4), of(validation=str(other)), of(validation=None)}) == 4


def test_tokens_read_are_those_of_the_samples_served(config: DataConfig) -> None:
    config = msgspec.structs.replace(
        config,
        sources=[msgspec.structs.replace(s, name=n) for s, n in zip(config.sources, "ab", strict=True)],
    )
    loader = build_loader(config, "train", micro_batch=4, global_batch=4)
    steps = list(itertools.islice(iter(loader), 25))
    served = torch.cat([micro.statistics["source"] for step in steps for micro in step])
    counts = torch.bincount(served, minlength=2) * T
    assert loader.tokens_read(100) == {"a": counts[0], "b": counts[1]}
    assert steps[0][0].sources == ("a", "b") and steps[0][0].to("cpu").sources == ("a", "b")
