"""Parts of a model that the loss does not depend on are told after the first step."""

import pytest
import torch
from forge_config import ConfigError
from forge_parallel import Env, MeshConfig, build_mesh
from forge_parallel.mesh import Mesh
from forge_parallel.testing import run_ranks
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from forge_trainer.steps.unreached import tell_unreached, unreached
from torch import nn


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.gate, self.behind = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.apart, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x):
        return self.frozen(self.used(x)) + self.gate(self.behind(x))


UNREACHED = ["behind.weight", "apart.weight", "apart.bias"]


def test_what_no_gradient_reaches_is_named(capsys):
    model, mesh = Partly(), Mesh(torch.device("cpu"))
    model(torch.randn(2, 3)).sum().backward()
    assert unreached([model], mesh) == UNREACHED
    tell_unreached([model], mesh)
    assert (
        "no gradient reaches behind.weight, apart.weight, apart.bias in the first step"
        in capsys.readouterr().err
    )
    tell_unreached([nn.Identity()], mesh)
    assert not capsys.readouterr().err


def on_one_rank():
    env = Env.detect()
    mesh, model = build_mesh(MeshConfig(), env), Partly()
    if env.rank:
        nn.init.ones_(model.gate.weight)
    model(torch.randn(2, 3)).sum().backward()
    return unreached([model], mesh)


def test_one_rank_that_a_gradient_reaches_is_enough():
    assert run_ranks(on_one_rank, 2) == [UNREACHED[1:]] * 2


def test_run_looks_in_its_first_step_only(tmp_path, monkeypatch, capsys):
    looked = []

    def named(parts, mesh):
        looked.append([p.grad is not None for part in parts for p in part.parameters()])
        return ["embed.weight"]

    monkeypatch.setattr("forge_trainer.steps.unreached.unreached", named)
    flags = [f'--job.root="{tmp_path}"', "--eval.every_steps=0", "--data.max_tokens=32", "--train.steps=3"]
    assert main(["train", "configs/runs/debug.toml", *flags, "--schedule.warmup_steps=1"]) == 0
    assert len(looked) == 1 and all(looked[0]), "when there are gradients"
    assert capsys.readouterr().err.count("no gradient reaches embed.weight") == 1


def test_router_that_cannot_learn_is_refused():
    with pytest.raises(ConfigError, match=r"top_k = 1 with router\.normalize = true"):
        load_job("configs/runs/debug.toml", ['--model.ffn={type="moe",top_k=1}'])
    load_job("configs/runs/debug.toml", ['--model.ffn={type="moe",top_k=1,router={normalize=false}}'])
