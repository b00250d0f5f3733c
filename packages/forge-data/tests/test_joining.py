"""A source that joins a run later, as a recorded change."""

import itertools
from typing import Any

import pytest
from forge_config import MayChange, judge
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import Loader, build_loader
from forge_data.order.phases import PhaseConfig
from forge_data.sources.config import TokensConfig


@pytest.fixture
def configs(make_store: Any, tmp_path) -> tuple[DataConfig, DataConfig]:
    """Of a run, and of the same run with a source that a phase reads from step 10 on."""
    paths = [str(make_store(name, [9] * 40, first=1000 * n)) for n, name in enumerate("abc")]
    sources = [
        TokensConfig(path=path, name=name, validation=path) for path, name in zip(paths, "abc", strict=True)
    ]
    settings: dict[str, Any] = {"max_tokens": 8, "cache_dir": str(tmp_path / "cache")}
    late = TokensConfig(path=paths[2], name="c", validation=paths[2], weight=0.0)
    phases = [PhaseConfig(start_step=10, weights={"a": 0.5, "c": 0.5})]
    return DataConfig(sources=sources[:2], **settings), DataConfig(
        sources=[*sources[:2], late], phases=phases, **settings
    )


def _loader(config: DataConfig, first: int = 0) -> Loader:
    return build_loader(config, "train", micro_batch=4, global_batch=4, steps=40, first_sample=first)


def _sources(loader: Loader, steps: int) -> list[list[int]]:
    return [item[0].statistics["source"].tolist() for item in itertools.islice(loader, steps)]


def test_source_joins_at_its_phase_and_the_run_goes_on(configs) -> None:
    old, new = configs
    began = _loader(old)
    goes_on = _loader(new, first=20)
    goes_on.require(began.fingerprint, 20)
    assert _sources(began, 10) == _sources(_loader(new), 10)
    assert not any(2 in step for step in _sources(_loader(new), 10))
    assert any(2 in step for step in _sources(_loader(new, first=40), 10))
    with pytest.raises(DataError, match="not those the run was trained on"):
        _loader(new, first=60).require(began.fingerprint, 60)
    _loader(new, first=60).require(_loader(new).fingerprint, 60)


def test_source_that_joins_is_a_recorded_change(configs) -> None:
    judged = judge(*configs)
    assert {one.may for one in judged} == {MayChange.RECORDED}
    assert {one.change.key for one in judged} >= {"sources[2].path", "sources[2].weight"}
    back = judge(*reversed(configs))
    assert MayChange.NEVER in {one.may for one in back}


def test_sources_without_any_weight_are_refused(configs) -> None:
    with pytest.raises(ValueError, match="weights of 0 are all 0"):
        DataConfig(max_tokens=8, sources=[TokensConfig(path="x", weight=0.0)])
