"""Stages of a group against the learning rates and freezing that their words say."""

import re

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.config import GroupedQueryConfig
from forge_parallel.mesh import Mesh
from forge_trainer.config.job import load_job
from forge_trainer.optim import AdamWConfig, GroupRule, trainable
from forge_trainer.optim.groups import freeze
from forge_trainer.optim.nothing import NothingToTrain
from forge_trainer.optim.stages import StageRule, frozen_steps, stage_lr_factor, trained_stages
from forge_trainer.steps.update import Update
from torch import nn


def stage(**options):
    return StageRule(**options)


def test_learning_rate_of_each_step_is_that_of_its_stage():
    rules = (
        stage(frozen=True),
        stage(from_step=3, lr=0.5, warmup_steps=2),
        stage(from_step=8, lr=0.1),
        stage(from_step=10, frozen=True),
    )
    assert frozen_steps(rules) == [(0, 3), (10, None)]
    curve = [list(one) for one in trained_stages(rules)]
    found = [stage_lr_factor([curve], step) for step in range(3, 10)]
    assert found == pytest.approx([0.5 / 3, 1 / 3, 0.5, 0.5, 0.5, 0.1, 0.1])
    twice = [stage_lr_factor([curve, [[4, 0.5, 0]]], step) for step in (3, 4, 9)]
    assert twice == pytest.approx([0.5 / 3, 0.5 / 3, 0.05])


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"from_step": 3}, {"from_step": 3, "frozen": True}], "stages begin at 3, 3; expected rising"),
        ([{"from_step": 3}, {"from_tokens": 30}], "all of them steps"),
        ([{"frozen": True, "lr": 0.5}], "with frozen = true"),
        ([{"from_step": 1, "from_tokens": 2}], "say the same"),
    ],
)
def test_stages_that_contradict_are_errors(rules, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        GroupRule(match=("a",), stages=tuple(stage(**rule) for rule in rules))
    with pytest.raises(ValueError, match="say it in stages"):
        GroupRule(match=("a",), freeze_from=1, stages=(stage(),))


JOB = """
[job]
name = "a"
[model]
vocab_size = 257
dim = 8
num_layers = 1
max_tokens = 16
attention = { num_heads = 2 }
[data]
max_tokens = 16
sources = [{ type = "python-stdlib" }]
[train]
steps = 100
global_batch = 4
micro_batch = 1
[optimizer]
type = "adamw"
[[optimizer.groups]]
match = ["embed"]
stages = [{ frozen = true }, { from_tokens = 640 }, { from_tokens = 641, lr = 0.5 }]
"""


def test_tokens_become_the_step_that_first_sees_them(tmp_path):
    (tmp_path / "a.toml").write_text(JOB)
    job = load_job(tmp_path / "a.toml").value
    assert [s.from_step for s in job.optimizer_by_steps.groups[0].stages] == [None, 10, 11]
    grown = load_job(tmp_path / "a.toml", ["--train.batch_warmup=[{steps=4,global_batch=2}]"]).value
    assert [s.from_step for s in grown.optimizer_by_steps.groups[0].stages] == [None, 12, 13]


def model():
    config = DecoderConfig(vocab_size=11, dim=8, num_layers=2, attention=GroupedQueryConfig(num_heads=2))
    built = config.build()
    torch.manual_seed(0)
    for parameter in built.parameters():
        nn.init.normal_(parameter)
    return built


def test_parameters_move_as_one_adamw_with_the_learning_rates_of_the_stages():
    """Beside torch's AdamW over the group, whose learning rate is set by hand."""
    rules = (
        GroupRule(
            match=("layers.0",), stages=(stage(frozen=True), stage(from_step=2, lr=0.5, warmup_steps=1))
        ),
    )
    ours, theirs = model(), model()
    config = AdamWConfig(lr=0.1, weight_decay=0.1, groups=rules)
    freeze(ours, rules)
    update = Update([ours], config.build(trainable([ours])), lambda step: 1.0, 0.0, Mesh(torch.device("cpu")))
    moved = {name: p for name, p in theirs.named_parameters() if name.startswith("layers.0")}
    decays = {name: 0.0 if "norm" in name else 0.1 for name in moved}
    plain = [
        torch.optim.AdamW([p], lr=0.1, weight_decay=decays[name], betas=config.betas, eps=config.eps)
        for name, p in moved.items()
    ]
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    for step, lr in enumerate([0.0, 0.0, 0.025, 0.05, 0.05]):
        for each in (ours, theirs):
            for number, parameter in enumerate(each.parameters()):
                torch.manual_seed(100 * step + number)
                parameter.grad = torch.randn_like(parameter)
        update(step, torch.zeros(()))
        for name, p in ours.named_parameters():
            if name.startswith("layers.0"):
                assert lr or torch.equal(p, before[name])
            else:
                assert not torch.equal(p, before[name])
        for optimizer in plain if lr else ():
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    for name, p in moved.items():
        torch.testing.assert_close(dict(ours.named_parameters())[name], p, rtol=1e-6, atol=1e-7)


def test_rank_without_anything_to_train_steps_without_effect():
    part = model().requires_grad_(False)
    before = [p.clone() for p in part.parameters()]
    assert not trainable([part])
    optimizer = NothingToTrain(0.5)
    updated = Update([part], optimizer, lambda step: 0.1, 1.0, Mesh(torch.device("cpu")))(0, torch.zeros(()))
    assert updated.lr == 0.05 and float(updated.grad_norm) == 0 and bool(updated.finite)
    assert all(torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))
