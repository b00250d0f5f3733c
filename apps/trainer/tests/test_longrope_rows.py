"""LongRoPE in rows with padding: how a row turns follows from its own tokens, whatever stands beside it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forge_config import ConfigError
from forge_data.tokenizer.tokenizer import BytesConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.attention.rope_config import LongRopeConfig
from forge_model.decoder.config import DecoderConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_model.init import initialize
from forge_parallel import Env, MeshConfig, build_mesh
from forge_trainer.cli import main
from forge_trainer.config.job import load_job

BORDER = 12
ROPE = LongRopeConfig(
    theta=50.0, original_max_tokens=BORDER, factor=4.0, short_factors=(1.0, 1.5), long_factors=(4.0, 20.0)
)


@pytest.fixture
def model():
    config = DecoderConfig(
        vocab_size=300, dim=16, num_layers=2, max_tokens=64, ffn=SwiGLUConfig(dim=24), rope=ROPE,
        attention=GroupedQueryConfig(num_heads=4),
    )  # fmt: skip
    made = config.build()
    initialize(made, 1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 4
    return made.double().eval()


def trained(model: Any, batch_size: int) -> Any:
    from forge_trainer.hooks.harness import TrainedModel

    data = SimpleNamespace(tokenizer=BytesConfig())
    job = SimpleNamespace(
        data=data, mesh=MeshConfig(), tensor_parallel=SimpleNamespace(sequence=False),
        context_parallel=None, train=SimpleNamespace(init_from=None, origins={}), model=model.config,
    )  # fmt: skip
    mesh = build_mesh(MeshConfig(), Env.detect())
    return TrainedModel(SimpleNamespace(job=job, mesh=mesh, parts=[model], step=None), batch_size)  # type: ignore[arg-type]


def of_a_run(model: Any, batch_size: int) -> Any:
    from forge_trainer.commands.harness import RunModel

    return RunModel(model, BytesConfig().build(), batch_size)


@pytest.mark.parametrize("make", [of_a_run, trained])
def test_likelihoods_of_a_batch_are_those_of_each_row_alone(model, make):
    pytest.importorskip("lm_eval")
    lengths = [4, BORDER, BORDER + 1, 30]
    rows = [torch.randint(300, (length + 1,)).tolist() for length in lengths]
    asked = [(("", ""), row[:-3], row[-3:]) for row in rows]
    found = make(model, 3)._loglikelihood_tokens(asked)
    for row, (value, _) in zip(rows, found, strict=True):
        known = model(torch.tensor([row[:-1]]))[0, -3:].log_softmax(-1)
        expected = known.gather(-1, torch.tensor(row[-3:])[:, None]).sum().item()
        assert value == pytest.approx(expected, rel=1e-5), len(row)


JOB = """
[job]
name = "long"

[model]
vocab_size = 300
dim = 16
num_layers = 1
max_tokens = 64
attention = {{ num_heads = 4 }}

[model.rope]
type = "longrope"
original_max_tokens = 12
factor = 4.0
short_factors = [1, 2]
long_factors = [2, 9]

[data]
max_tokens = {length}
packing = "{packing}"
mask_documents = {masked}

[[data.sources]]
type = "python-stdlib"

[train]
steps = 3
global_batch = 2
micro_batch = 2
"""


@pytest.mark.parametrize("packing", ["bestfit", "pad", "crop"])
def test_padding_that_would_count_for_the_length_of_a_row_is_refused(tmp_path, packing):
    def read(length: int, masked: str, packing: str = packing) -> None:
        (tmp_path / "job.toml").write_text(JOB.format(length=length, packing=packing, masked=masked))
        load_job(tmp_path / "job.toml")

    with pytest.raises(ConfigError, match=r"longrope.* more than 12 tokens.*set data\.mask_documents = true"):
        read(BORDER + 1, "false")
    read(BORDER + 1, "true")
    read(BORDER, "false")
    read(BORDER + 1, "false", "concat")


@pytest.mark.slow
def test_verify_export_looks_at_both_sides_of_the_border(tmp_path, capsys, monkeypatch):
    """Wrong factors of either kind are found, though the first tokens compared are above the border."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words and more words " * 200)
    source = 'type = "files"\npaths = ["a.txt"]'
    job = JOB.format(length=16, packing="concat", masked="false").replace('type = "python-stdlib"', source)
    (tmp_path / "job.toml").write_text(job + "\n[checkpoint]\nevery_steps = 3\n")
    assert main(["train", "job.toml"]) == 0
    assert main(["export", "runs/long", "out"]) == 0
    assert main(["verify-export", "runs/long", "out"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in ("short_factor", "long_factor"):
        changed = written["rope_parameters"] | {name: [1.5, 7.0]}
        (tmp_path / "out" / "config.json").write_text(json.dumps(written | {"rope_parameters": changed}))
        assert main(["verify-export", "runs/long", "out"]) != 0, name
        assert "is it the export of this step?" in capsys.readouterr().err
