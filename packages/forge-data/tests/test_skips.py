import itertools
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data.cli import main
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import build_loader
from forge_data.order.mixing import Run, build_order, last_step, plan
from forge_data.order.order import Order
from forge_data.order.phases import PhaseConfig
from forge_data.order.skips import SkipConfig, Skips, build_skips
from forge_data.sources.config import TokensConfig

B = 8


def test_skips_leave_out_what_they_name_and_nothing_else() -> None:
    draw = random.Random(0)
    intervals = [(a, a + draw.randint(1, 9)) for a in (draw.randrange(300) for _ in range(20))]
    skips = Skips(intervals)
    left = [n for n in range(400) if not any(a <= n < b for a, b in intervals)]
    places = np.arange(len(left))
    assert skips.ordinals(places).tolist() == left
    assert [skips.place(n) for n in left] == places.tolist()


def test_skips_count_steps_as_the_run_sees_them() -> None:
    """After steps 2 and 3 are left out, step 2 is what step 4 was."""
    twice = [SkipConfig(start_step=2, end_step=4), SkipConfig(start_step=2, end_step=3)]
    assert build_skips(twice, B).intervals == [(2 * B, 5 * B)]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"start_step": 3},
        {"start_step": 3, "end_step": 3},
        {"samples": [1], "start_step": 1, "end_step": 2},
    ],
)
def test_skip_that_says_nothing_or_two_things_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="expected a start_step below an end_step, or samples"):
        SkipConfig(**wrong)


def test_order_counts_what_is_not_left_out() -> None:
    skips = Skips([(100, 900), (5000, 5001)])
    order = Order(0, [50, 70], [0.4, 0.6], [(3000, [1, 1])], skips=skips)
    source, _ = order.locate(np.arange(6000))
    for count in (0, 1, 100, 101, 3000, 4199, 4200, 6000):
        assert order.counts(count).tolist() == np.bincount(source[:count], minlength=2).tolist()


@pytest.fixture
def config(make_store) -> DataConfig:
    a, b = make_store("a", [200]), make_store("b", [999], first=10_000)
    sources = [TokensConfig(path=str(a), name="a"), TokensConfig(path=str(b), name="b")]
    return DataConfig(max_tokens=4, sources=sources)


def _steps(config: DataConfig, count: int, first: int = 0) -> list[list[int]]:
    loader = build_loader(config, "train", micro_batch=B, global_batch=B, first_sample=first * B, steps=40)
    return [step[0].inputs["tokens"][:, 0].tolist() for step in itertools.islice(iter(loader), count)]


def test_run_without_some_steps_reads_those_that_follow_and_says_so(config: DataConfig) -> None:
    without = msgspec.structs.replace(config, skip=[SkipConfig(start_step=5, end_step=9)])
    whole = _steps(config, 30)
    assert _steps(without, 26) == whole[:5] + whole[9:]
    assert _steps(without, 10, first=7) == whole[11:21]
    loader = build_loader(without, "train", micro_batch=B, global_batch=B, steps=40)
    assert loader.plan[-1] == "left out: steps 5 to 8"


def test_phase_begins_at_its_step_though_samples_are_left_out(config: DataConfig) -> None:
    phases = [PhaseConfig(start_step=10, weights={"b": 1.0})]
    both = msgspec.structs.replace(config, phases=phases, skip=[SkipConfig(start_step=3, end_step=7)])
    steps = _steps(both, 14)
    assert min(steps[9]) < 10_000 and min(steps[10]) >= 10_000


@pytest.mark.parametrize(
    "event",
    [
        {"phases": [PhaseConfig(start_step=12, weights={"a": 0.2, "b": 0.8})]},
        {"skip": [SkipConfig(start_step=12, end_step=14)]},
    ],
)
def test_run_may_change_what_it_has_not_come_to(config: DataConfig, event: dict) -> None:
    """Weights of a later phase, a later skip: the stream so far is the same, as it will be."""
    changed = msgspec.structs.replace(config, **event)
    old, new = (build_loader(c, "train", micro_batch=B, global_batch=B, steps=40) for c in (config, changed))
    assert _steps(changed, 12) == _steps(config, 12) and _steps(changed, 20) != _steps(config, 20)
    saved = old.fingerprint_at(12 * B)
    new.require(saved, 12 * B)
    with pytest.raises(DataError, match="new run"):
        new.require(old.fingerprint_at(13 * B), 13 * B)
    with pytest.raises(DataError, match="new run"):
        old.require(new.fingerprint_at(13 * B), 13 * B)
    new.require(new.fingerprint_at(20 * B), 20 * B)


def test_stop_ends_the_run_where_a_source_is_exhausted(config: DataConfig) -> None:
    sources = [msgspec.structs.replace(config.sources[0], max_epochs=2.0), config.sources[1]]
    capped = msgspec.structs.replace(config, sources=sources, when_exhausted="stop")
    run = Run(B, 1000)
    order = build_order(capped, [50, 250], run)
    last = last_step(order, run)
    source, _ = order.locate(np.arange(order.end))
    assert np.bincount(source)[0] == 100 and last == len(source) // B < 1000
    assert sum(one.sequences for one in plan(capped, order, run)) == last * B
    loader = build_loader(capped, "train", micro_batch=B, global_batch=B, steps=1000)
    served = itertools.islice(iter(loader), last)
    assert all((step[0].statistics["source"] >= 0).all() for step in served)
    with pytest.raises(DataError, match="as often as max_epochs allows"):
        list(itertools.islice(iter(loader), last + 100))
    assert loader.last_step == last and loader.plan[-1].startswith(f"the run ends at step {last}")


def test_sample_prints_what_a_step_has_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run that leaves steps out, on two ranks, against what its loader has served."""
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 20)
    (tmp_path / "config.toml").write_text(
        f"""
        [data]
        max_tokens = 16
        cache_dir = "{tmp_path}"
        packing = "bestfit"
        [[data.sources]]
        type = "files"
        name = "some"
        held_out = 0.0
        paths = ["{tmp_path}/text"]
        [[data.skip]]
        start_step = 1
        end_step = 3
        [train]
        steps = 20
        global_batch = 4
        """
    )
    for rank in range(2):
        arguments = ["sample", str(tmp_path), "--step", "5", "--rank", str(rank), "--world-size", "2"]
        assert main(arguments) == 0
        out = capsys.readouterr().out
        place = 7 * 4 + 2 * rank
        assert out.count("-- step 5") == 2 and f"sample {place}, source some" in out and "docu" in out
    assert main(["sample", str(tmp_path), "--step", "20"]) == 1
    assert "below 20" in capsys.readouterr().err
