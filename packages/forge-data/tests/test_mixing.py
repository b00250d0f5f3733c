import random
from pathlib import Path

import numpy as np
import pytest
from forge_data.cli import main
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import build_loader
from forge_data.order.mixing import Run, build_order, plan
from forge_data.order.order import MIX_BLOCK, Order
from forge_data.order.phases import PhaseConfig
from forge_data.sources.config import TokensConfig

SIZES = [5000, 900, 30_000]


def _walk(order: Order, count: int) -> tuple[np.ndarray, np.ndarray]:
    return order.locate(np.arange(count, dtype=np.int64))


def test_order_keeps_weights_across_phases_and_repeats_nothing_within_an_epoch() -> None:
    weights = [[0.5, 0.1, 0.4], [0.1, 0.0, 0.9], [0.2, 0.7, 0.1]]
    starts, draws = [0, 3 * MIX_BLOCK + 17, 500_001], 10**6
    order = Order(3, SIZES, weights[0], list(zip(starts[1:], weights[1:], strict=True)))
    source, sample = _walk(order, draws)
    taken = np.cumsum(np.eye(3)[source], axis=0)
    due = np.zeros(3)
    for weight, start, end in zip(weights, starts, [*starts[1:], draws], strict=True):
        expected = due + np.outer(np.arange(1, end - start + 1), weight)
        due = taken[end - 1]
        assert np.abs(taken[start:end] - expected).max() < 200
    for s, size in enumerate(SIZES):
        mine = sample[source == s]
        for epoch in range(-(-len(mine) // size)):
            part = mine[epoch * size : (epoch + 1) * size]
            assert len(np.unique(part)) == len(part)
    assert order.counts(77_777).tolist() == np.bincount(source[:77_777], minlength=3).tolist()


def test_order_is_the_same_wherever_it_starts_across_phases_and_exhaustion() -> None:
    caps = [None, 1800, 12_345]
    order = Order(1, SIZES, [1, 1, 1], [(6000, [1, 2, 0]), (9001, [1, 1, 1])], caps)
    source, sample = _walk(order, 60_000)
    draw = random.Random(0)
    for _ in range(60):
        start, count = draw.randrange(59_000), draw.randrange(1, 900)
        part = order.locate(np.arange(start, start + count))
        assert part[0].tolist() == source[start : start + count].tolist()
        assert part[1].tolist() == sample[start : start + count].tolist()


def test_order_serves_each_source_exactly_as_often_as_it_may_and_the_others_in_proportion() -> None:
    order = Order(0, SIZES, [0.4, 0.3, 0.3], caps=[None, 1350, 12_000])
    source, _ = _walk(order, 100_000)
    assert np.bincount(source)[1:].tolist() == [1350, 12_000]
    gone = int(np.flatnonzero(source == 1)[-1]) + 1
    after = source[gone : gone + 2 * MIX_BLOCK]
    assert abs(np.mean(after == 0) - 0.4 / 0.7) < 1e-3


def test_order_ends_where_all_sources_are_exhausted() -> None:
    order = Order(0, [10, 20], [1, 1], caps=[20, 30])
    source, _ = _walk(order, 50)
    assert np.bincount(source).tolist() == [20, 30] and order.end == 50
    with pytest.raises(DataError, match="after 50 sequences"):
        order.locate(np.asarray([50]))


@pytest.fixture
def config(make_store) -> DataConfig:
    a, b = make_store("a", [800]), make_store("b", [400], first=10_000)
    return DataConfig(
        max_tokens=8,
        sources=[TokensConfig(path=str(a), name="a"), TokensConfig(path=str(b), name="b", weight=0.25)],
        phases=[
            PhaseConfig(start_fraction=0.5, weights={"b": 1.0}, lr_scale=0.5),
            PhaseConfig(start_tokens=8 * 8 * 15 - 3, weights={"a": 1.0}, lr_scale=0.1),
        ],
    )


def _tokens(config: DataConfig, world: int, first: int, steps: int) -> list[list[int]]:
    ranks = []
    for rank in range(world):
        loader = build_loader(
            config,
            "train",
            rank=rank,
            world_size=world,
            micro_batch=1,
            global_batch=8,
            first_sample=first,
            steps=20,
        )
        ranks.append(
            [
                [m.inputs["tokens"][0].tolist() for m in step]
                for step, _ in zip(loader, range(steps), strict=False)
            ]
        )
    return [row for step in range(steps) for rank in ranks for row in rank[step]]


def test_phases_begin_at_their_steps_for_any_ranks_and_kills(config: DataConfig) -> None:
    whole = _tokens(config, 1, 0, 20)
    starts = np.asarray([row[0] >= 10_000 for row in whole])
    assert starts[80:120].all() and not starts[120:].any() and 8 <= starts[:80].sum() <= 24
    for world, cut in ((2, 9), (4, 13), (8, 16)):
        assert _tokens(config, 1, 0, cut) + _tokens(config, world, 8 * cut, 20 - cut) == whole


def test_lr_scale_is_that_of_the_phase(config: DataConfig) -> None:
    assert [config.lr_scale(step, 20, 8) for step in (0, 9, 10, 14, 15, 19)] == [1, 1, 0.5, 0.5, 0.1, 0.1]


def test_plan_counts_what_is_served(config: DataConfig) -> None:
    run = Run(8, 20)
    order = build_order(config, [100, 50], run)
    source, _ = _walk(order, 160)
    rows = plan(config, order, run)
    expected = [np.bincount(source[a:b], minlength=2).tolist() for a, b in ((0, 80), (80, 120), (120, 160))]
    assert [row.sequences for row in rows] == [n for pair in expected for n in pair]
    assert all(row.exhausted_at_step is None for row in rows)
    assert rows[-2].epochs == np.bincount(source)[0] / 100


def test_max_epochs_is_an_error_before_training_that_names_source_and_step(config: DataConfig) -> None:
    sources = [config.sources[0], TokensConfig(path=config.sources[1].path, name="b", max_epochs=0.5)]  # type: ignore[attr-defined]
    short = DataConfig(max_tokens=8, sources=sources)
    with pytest.raises(DataError, match=r"b will have been read .* after step \d+ of 100; .*at most \d+"):
        build_order(short, [100, 50], Run(8, 100))
    on = DataConfig(max_tokens=8, sources=sources, when_exhausted="reweight")
    source, _ = _walk(build_order(on, [100, 50], Run(8, 100)), 800)
    assert np.bincount(source)[1] == 25


@pytest.mark.parametrize("policy", ["error", "stop", "reweight"])
def test_run_without_a_whole_step_is_refused_under_every_policy(config: DataConfig, policy: str) -> None:
    for max_epochs, words in ((0.01, r"b has 50 sequences.*at least 1/50"), (0.1, r"leave 5 seq.*reads 8")):
        source = TokensConfig(path=config.sources[1].path, name="b", max_epochs=max_epochs)  # type: ignore[attr-defined]
        short = DataConfig(max_tokens=8, sources=[source], when_exhausted=policy)  # type: ignore[arg-type]
        for steps in (None, 20):
            with pytest.raises(DataError, match=words):
                build_order(short, [50], Run(8, steps))


def test_temperature_weighs_by_size() -> None:
    sources = [TokensConfig(path="x"), TokensConfig(path="y")]
    for temperature, share in ((1.0, 0.9), (2.0, 0.75), (1e6, 0.5)):
        order = build_order(
            DataConfig(max_tokens=8, sources=sources, temperature=temperature), [900, 100], Run(1)
        )
        assert abs(order.counts(10 * MIX_BLOCK)[0] / (10 * MIX_BLOCK) - share) < 1e-3


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ([{"weights": {"c": 1.0}, "start_step": 3}], "phases name c"),
        ([{"weights": {"a": 1.0}}], "exactly one"),
        ([{"weights": {"a": 0.0}, "start_step": 3}], "one of them above 0"),
        (
            [{"weights": {"a": 1.0}, "start_step": 3}, {"weights": {"a": 1.0}, "start_step": 3}],
            "begin at steps 3, 3",
        ),
    ],
)
def test_phases_that_mean_nothing_are_refused(config: DataConfig, phases: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        phased = DataConfig(max_tokens=8, sources=config.sources, phases=[PhaseConfig(**p) for p in phases])
        build_order(phased, [100, 50], Run(8, 20))


def test_fingerprint_names_phases(config: DataConfig) -> None:
    def of(**changes: object) -> str:
        kept = {"max_tokens": 8, "sources": config.sources, "phases": config.phases}
        return build_loader(
            DataConfig(**kept | changes),  # type: ignore[arg-type]
            "train",
            micro_batch=1,
            global_batch=8,
            steps=20,
        ).fingerprint

    assert len({of(), of(phases=[]), of(phases=config.phases[:1]), of(phases=[], temperature=1.0)}) == 4


def test_plan_command_prints_phases(make_store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(
        "[train]\nsteps = 20\nglobal_batch = 8\n[optimizer]\ntype = 'adamw'\n[data]\nmax_tokens = 8\n"
        f"[[data.sources]]\ntype = 'tokens'\nname = 'a'\npath = '{make_store('p', [800])}'\n"
        "[[data.phases]]\nstart_step = 10\nlr_scale = 0.1\nweights = { a = 1.0 }\n"
    )
    assert main(["plan", str(tmp_path / "run.toml"), "--train.steps=15"]) == 0
    printed = capsys.readouterr().out
    assert "phase 1 from step 10: 320 tokens, learning rate x 0.1" in printed
    assert "source a: 640 tokens (100.0%), 0.8 epochs" in printed


def test_source_of_weight_zero_changes_no_sample_before_its_phase() -> None:
    sizes, two = [50, 70, 40], [0.3, 0.7]
    before, after = Order(3, sizes[:2], two), Order(3, sizes, [*two, 0.0], [(5000, [0.0, 0.5, 0.5])])
    ours, theirs = (order.locate(np.arange(5000)) for order in (before, after))
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    assert set(after.locate(np.arange(5000, 9000))[0].tolist()) == {1, 2}
