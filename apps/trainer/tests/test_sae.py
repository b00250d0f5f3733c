"""`forge sae train`: from a store and from a run, by the command, with clear errors."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from forge_interp import ActivationStore, extract_representations
from forge_interp.sae import SAETraining, load_sae, train_sae
from forge_interp.sae.activations import Penalty
from forge_interp.sae.autoencoder import SAEConfig
from forge_interp.sae.rows import StoreRows
from forge_resilience.exit_codes import ExitCode
from forge_trainer.cli import main
from forge_trainer.sae.config import AutoencoderConfig, PenaltyConfig, TrainConfig
from torch import nn

FILE = """
out = "{out}"
source = {{ store = "{store}", site = "1" }}
sae = {{ d_sae = 24, activation = "topk", k = 3 }}
train = {{ steps = 12, batch_rows = 50, lr = 1e-2, log_every = 4 }}
"""
RUN = """
[job]
name = "tiny"
root = "{root}"

[model]
vocab_size = 272
dim = 16
num_layers = 2
max_tokens = 16
attention = {{ num_heads = 2, num_kv_heads = 1 }}

[data]
max_tokens = 16
workers = 0
cache_dir = "{cache}"
validation_samples = 4
tokenizer = {{ type = "bytes" }}

[[data.sources]]
type = "files"
paths = ["{text}"]
held_out = 0.3

[train]
steps = 3
global_batch = 8
micro_batch = 2

[optimizer]
type = "adamw"
lr = 1e-2
"""


@pytest.fixture
def store(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6))
    extract_representations(model, torch.randint(9, (60, 5)), "*", tmp_path / "acts", progress=False)
    return tmp_path / "acts"


def write(folder: Path, store: Path, **changes: str) -> str:
    path, text = folder / "sae.toml", FILE.format(out=folder / "sae", store=store)
    for old, new in changes.items():
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


def test_the_command_trains_what_the_library_trains(store, tmp_path, capsys):
    assert main(["sae", "train", write(tmp_path, store), "--train.seed=5"]) == ExitCode.DONE
    config = SAEConfig(6, 24, "topk", k=3.0, rescale_acts_by_decoder_norm=True)
    training = SAETraining(12, 50, lr=1e-2, log_every=4, seed=5)
    sae = train_sae(config, StoreRows(ActivationStore.open(store), "1"), training)
    assert load_sae(tmp_path / "sae").W_dec.equal(sae.W_dec)
    assert len((tmp_path / "sae" / "metrics.jsonl").read_text().splitlines()) == 3
    assert "step 12" in capsys.readouterr().out
    assert (
        main(["sae", "train", str(tmp_path / "sae.toml"), "--train.seed=5"]) == ExitCode.DONE
    )  # there already


def test_a_transcoder_is_trained_where_there_is_a_target(store, tmp_path):
    path = write(tmp_path, store, **{'site = "1"': 'site = "0", target = "1"', '"topk", k = 3': '"relu"'})
    assert main(["sae", "train", path]) == ExitCode.DONE
    sae = load_sae(tmp_path / "sae")
    assert (sae.config.d_out, sae.config.metadata["hook_name_out"]) == (6, "1")


def test_a_run_is_a_source(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "run.toml").write_text(
        RUN.format(root=tmp_path / "runs", cache=tmp_path / "cache", text=text)
    )
    assert main(["train", str(tmp_path / "run.toml")]) == ExitCode.DONE
    source = f'run = "{tmp_path}/runs/tiny", site = "layers.0", samples = 40, samples_per_window = 16'
    path = write(tmp_path, Path("x"), **{'store = "x", site = "1"': source})
    assert main(["sae", "train", path]) == ExitCode.DONE
    last = json.loads((tmp_path / "sae" / "metrics.jsonl").read_text().splitlines()[-1])
    assert load_sae(tmp_path / "sae").config.d_in == 16 and last["step"] == 12
    assert main(["sae", "train", path]) == ExitCode.DONE  # the same, in spite of new objects


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("k = 3", "k = 30", "is more than d_sae 24"),
        (', k = 3', "", "k is None for topk; expected a number of active features"),
        ('site = "1"', 'site = "7"', "7:out: no such value; there are "),
        ('acts"', 'axe"', "axe does not exist"),
        ("steps = 12", "stepps = 12", "stepps"),
        ("batch_rows = 50", "batch_rows = 5000", "a window has 300 rows"),
        ('site = "1"', 'site = "1", run = "x"', "expected one of them"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_that_says_what_to_do(store, tmp_path, capsys, old, new, message):
    path = write(tmp_path, store, **{old: new})
    assert main(["sae", "train", path]) == ExitCode.CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("struct", "of"), [(TrainConfig, SAETraining), (PenaltyConfig, Penalty)])
def test_defaults_are_those_of_the_library(struct, of):
    wanted = {field.name: field for field in fields(of)}
    assert set(struct.__struct_fields__) == set(wanted)
    mine, library = (
        struct(**({"steps": 1} if struct is TrainConfig else {})),
        of(**({"steps": 1} if of is SAETraining else {})),
    )
    for name in set(wanted) - {"penalty"}:
        assert getattr(mine, name) == getattr(library, name), name
    assert set(AutoencoderConfig.__struct_fields__) <= {field.name for field in fields(SAEConfig)}
