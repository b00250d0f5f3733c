"""Models and tokenizers by their names on the hub, from a cache that was filled before."""

import json

import pytest
from forge_config import ConfigError, to_toml
from forge_model import config_to_hf
from forge_trainer.config.hub import fetch_named
from forge_trainer.config.job import load_job

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RUN = "configs/runs/debug.toml"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The cache of `huggingface_hub` with one model, as that writes it; nothing can be fetched."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "models--lab--small"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    config = config_to_hf(load_job(RUN, ["--model.num_layers=3"]).value.model)
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


@pytest.mark.parametrize("name", ["hf://lab/small", f"hf://lab/small@{COMMIT}"])
def test_model_is_read_by_its_name_and_the_run_keeps_the_commit(cached, tmp_path, name, capsys):
    path = tmp_path / "job.toml"
    text = to_toml(load_job(RUN).value)
    before, _, after = text.partition("[model]")
    path.write_text(f'{before}[model]\nfrom = "{name}"\n\n{after[after.index("[data]") :]}')
    flags = [f'--train.init_from="{name}"']
    job = load_job(path, flags, branch=True).value
    assert job.model.num_layers == 3  # type: ignore[attr-defined]
    assert job.train.init_from == str(cached)
    assert f"{name}: commit 0123456789ab" in capsys.readouterr().err


def test_folder_is_a_folder_whatever_the_hub_has(cached):
    tree = {"model": {"from": "lab/small"}, "train": {"init_from": {"decoder": "lab/small@300"}}}
    fetch_named(tree)
    assert tree == {"model": {"from": "lab/small"}, "train": {"init_from": {"decoder": "lab/small@300"}}}


def test_name_that_cannot_be_had_is_one_line_with_what_is_in_the_cache(cached):
    with pytest.raises(ConfigError, match=r"lab/other is not .* In the cache are: lab/small") as said:
        load_job(RUN, ["--model.from=hf://lab/other"])
    assert "\n" not in str(said.value)
    with pytest.raises(ConfigError, match="lab/tok is not in the cache"):
        load_job(RUN, ['--data.tokenizer={type="hf",path="hf://lab/tok"}'])
