"""Fingerprints of text, as they were before sources could give more: old checkpoints must go on."""

from pathlib import Path
from typing import Any

import pytest
from forge_data.config import DataConfig
from forge_data.loading.loader import build_loader
from forge_data.order.phases import PhaseConfig
from forge_data.sources.config import FilesConfig, TokensConfig
from forge_data.sources.hf import HfConfig

PINNED = {
    "concat": ("631170a34ab8cf5c66dd1487dbf17be1", "db8263ba954ee3c1d6e74a00ebbd5c92"),
    "documents": ("937bc6f7fef1edb12aab8c83472755e2", "343baaae6fe3b3113cc91f20e4088408"),
    "boundaries": ("15a376ae963cd7a3f1aa532e0485e2cc", "9d225e9c6a07c9fc7be33007a54fba0c"),
    "bestfit": ("8a35bc748085f61e8f5f5edcbed297b5", "ead1e572f561674cced08afc2aca8829"),
    "crop": ("d4dffb7560b70a58d5a4d0316a977bce", "02d329b3f0debcfa3950d425bbbc404c"),
    "phases": ("370c044b1635870609c03aec9c64567f", "db8263ba954ee3c1d6e74a00ebbd5c92"),
    "files": ("40e731153c06c875c2e58471376e193f", "82855eda420fc425ba40b3b549bdb476"),
    "bare": ("167c5f6c0603a877fba22abb07aa4c7a", None),
    "short": ("f9ab167d9f58c74383248ad69a87d955", None),
    "short_bestfit": ("4182084c502e719582bbd9510fe3228c", None),
    "stream": ("18d02ec7ac709be2a646205130b9059c", None),
    "mixed": ("b6af92b4a7e52317325e4aafcdbbb2ed", "865d57af60e47cb978d31275a76c7d3f"),
    "streamed_held": ("dc4ca196ed553f563e8b613508699a78", "0e37cadc420162173ef84c6d98ab3317"),
}
"""By the name of a configuration below: of training, and of validation where it has some; made at 1b4d1b9."""


def _configs(make_store: Any, folder: Path) -> dict[str, DataConfig]:
    a, b = str(make_store("a", [100, 228])), str(make_store("b", [7] * 171 + [4], first=10_000))
    held, short = str(make_store("v", [20, 33], first=50_000)), str(make_store("short", [5], first=60_000))
    (folder / "texts").mkdir()
    for n in range(40):
        (folder / "texts" / f"{n:02}.txt").write_text(f"text {n} " * 5)
    two = [
        TokensConfig(path=a, validation=held, weight=0.3, name="a"),
        TokensConfig(path=b, validation=held, weight=0.7, name="b"),
    ]
    texts = str(folder / "texts")
    stream = HfConfig(path=texts, streaming=True, lanes=4)
    streamed_held = HfConfig(path=texts, streaming=True, lanes=4, validation=f"{texts}/0*.txt")
    less_than_a_sequence = [TokensConfig(path=a, validation=short)]
    phases = [PhaseConfig(start_step=17, weights={"a": 0.2, "b": 0.8})]

    def config(sources: list[Any] = two, **settings: Any) -> DataConfig:
        return DataConfig(max_tokens=8, sources=sources, seed=3, cache_dir=str(folder / "cache"), **settings)

    return {
        "concat": config(),
        "documents": config(mask_documents=True),
        "boundaries": config(mask_boundaries=True),
        "bestfit": config(packing="bestfit", mask_documents=True),
        "crop": config(packing="crop"),
        "phases": config(phases=phases, temperature=2.0),
        "files": config([FilesConfig(paths=[texts], held_out=0.2)]),
        "bare": config([TokensConfig(path=a)]),
        "short": config(less_than_a_sequence),
        "short_bestfit": config(less_than_a_sequence, packing="bestfit"),
        "stream": config([stream]),
        "mixed": config([stream, two[0]], mask_documents=True),
        "streamed_held": config([streamed_held]),
    }


@pytest.mark.parametrize("name", PINNED)
def test_fingerprint_of_text_is_that_of_old_checkpoints(name: str, make_store, tmp_path: Path) -> None:
    config = _configs(make_store, tmp_path)[name]
    train, validation = PINNED[name]
    assert build_loader(config, "train", micro_batch=2, global_batch=8, steps=40).fingerprint == train
    if validation is not None:
        assert build_loader(config, "validation", micro_batch=2).fingerprint == validation
