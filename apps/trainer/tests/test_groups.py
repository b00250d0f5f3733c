"""Which parameters share what, and that frozen ones stand still."""

from typing import get_args

import forge_model.roles
import pytest
import torch
from forge_config import ConfigError
from forge_model import DecoderConfig
from forge_model.config import GroupedQueryConfig
from forge_parallel.mesh import Mesh
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from forge_trainer.optim import AdamWConfig, GroupRule, trainable
from forge_trainer.optim import groups as grouping
from forge_trainer.optim.groups import freeze, is_frozen, listed
from forge_trainer.steps.update import Update
from torch import nn


def model(**options) -> nn.Module:
    config = DecoderConfig(
        vocab_size=11, dim=8, num_layers=3, attention=GroupedQueryConfig(num_heads=2), **options
    )
    built = config.build()
    for parameter in built.parameters():
        nn.init.normal_(parameter)
    return built


def groups(of: nn.Module, *rules: GroupRule, **options) -> dict[str, tuple[float, float, list]]:
    config = AdamWConfig(lr=1.0, weight_decay=0.1, groups=rules, **options)
    freeze(of, rules)
    found: dict[str, tuple[float, float, list]] = {}
    for entry in config.param_groups(trainable([of])):
        for name, _ in entry["params"]:
            assert name not in found, "a parameter is in two groups"
            found[name] = (entry["lr"], entry["weight_decay"], entry["frozen"])
    assert found.keys() == {name for name, p in of.named_parameters() if p.requires_grad}
    return found


def test_roles_are_those_of_the_model():
    assert get_args(grouping.Role) == get_args(forge_model.roles.Role)


def test_without_rules_only_the_roles_decide():
    found = groups(model())
    for name, (lr, decay, frozen) in found.items():
        assert (lr, decay, frozen) == (1.0, 0.0 if "norm" in name else 0.1, [])


def test_factors_of_all_rules_multiply():
    rules = [
        GroupRule(match=("layers.1",), lr=0.5),
        GroupRule(match=("layers.*.attention.w[qk].weight",), lr=0.5, decay=3.0),
        GroupRule(roles=("norm",), lr=4.0, decay=9.0),
        GroupRule(match=("layers.2",), roles=("norm",), freeze_from=2, freeze_until=5),
        GroupRule(match=("layers.2",), freeze_until=1),
    ]
    found = groups(model(), *rules)
    assert found["layers.1.attention.wq.weight"] == (0.25, pytest.approx(0.3), [])
    assert found["layers.1.attention.wv.weight"] == (0.5, 0.1, [])
    assert found["layers.1.ffn_norm.weight"] == (2.0, 0.0, [])
    assert found["layers.2.ffn_norm.weight"] == (4.0, 0.0, [[0, 1], [2, 5]])
    assert found["embed.weight"] == (1.0, 0.1, [])


def test_no_decay_names_roles():
    found = groups(model(), no_decay=("embedding", "norm"))
    assert [found[n][1] for n in ("embed.weight", "norm.weight", "head.weight")] == [0.0, 0.0, 0.1]


def test_tied_parameters_are_in_one_group():
    found = groups(model(tie_embeddings=True), GroupRule(roles=("embedding",), lr=0.5))
    assert found["embed.weight"][0] == 0.5 and "head.weight" not in found


@pytest.mark.parametrize("pattern", ["layer.0", "layers.7", "embed.bias", "weight"])
def test_pattern_that_names_nothing_is_an_error_that_lists_what_there_is(pattern):
    with pytest.raises(ConfigError, match=r"names no parameter; the model has embed\.weight, layers\.\*"):
        freeze(model(), [GroupRule(match=("embed", pattern))])


@pytest.mark.parametrize("match", [(), ("layers.*.ffn",)])
def test_rule_whose_roles_nothing_has_is_an_error_that_lists_those_there_are(match):
    there = "matrix" if match else "embedding, norm, matrix, head"
    with pytest.raises(ConfigError, match=rf"groups\[1\]: .* a role of router; they have {there}$"):
        freeze(model(), [GroupRule(roles=("norm",)), GroupRule(match=match, roles=("router",))])


def test_freezing_everything_is_an_error():
    with pytest.raises(ConfigError, match="every parameter"):
        freeze(model(), [GroupRule(match=("embed", "layers", "norm", "head"), freeze_from=0)])


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        ("[{}]", "names nothing"),
        ("[{match=['embed'],freeze_from=5,freeze_until=5}]", "not after"),
        ("[{roles=['matrx']}]", "matrix"),
        ("[{match=['embed'],lr=-1}]", "lr"),
    ],
)
def test_bad_rules_are_refused_with_their_place(flag, error):
    with pytest.raises(ConfigError, match=error):
        load_job("configs/runs/debug.toml", [f"--optimizer.groups={flag.replace(chr(39), chr(34))}"])


def test_stages_are_half_open():
    assert [is_frozen(((0, 2), (4, None)), step) for step in range(6)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_names_are_listed_once_each_with_their_numbers():
    names = [f"layers.{i}.w" for i in (0, 1, 2, 5, 10)] + ["head.weight"]
    assert listed(names) == ["layers.0-2,5,10.w", "head.weight"]


def test_frozen_parameters_stand_still_and_move_again():
    rules = (
        GroupRule(match=("embed",), freeze_from=0),
        GroupRule(match=("layers.0",), freeze_until=2),
        GroupRule(match=("layers.1",), freeze_from=1),
    )
    trained = model()
    freeze(trained, rules)
    optimizer = AdamWConfig(lr=0.1, groups=rules).build(trainable([trained]))
    update = Update([trained], optimizer, lambda step: 1.0, 0.0, Mesh(torch.device("cpu")))
    names = ["embed.weight", "layers.0.ffn.w_up.weight", "layers.1.ffn.w_up.weight", "head.weight"]
    moved = []
    for step in range(4):
        before = {name: p.detach().clone() for name, p in trained.named_parameters()}
        loss = trained(torch.tensor([[1, 2, 3]])).square().sum()
        loss.backward()
        every = sum(p.grad.square().sum() for p in trained.parameters() if p.grad is not None).sqrt()
        norm = update(step, loss.detach()).grad_norm
        assert norm < every, "frozen gradients are not in the norm"
        now = dict(trained.named_parameters())
        moved.append([not torch.equal(before[name], now[name]) for name in names])
    assert moved == [
        [False, False, True, True],
        [False, False, False, True],
        [False, True, False, True],
        [False, True, False, True],
    ]
    assert trained.embed.weight.grad is None and trained.embed.weight not in optimizer.state


def test_plan_names_every_parameter_once(capsys):
    rules = '--optimizer.groups=[{match=["layers.1.attention"],lr=0.5},{match=["embed"],freeze_from=0}]'
    assert main(["plan", "configs/runs/debug.toml", rules]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    layers.0,2-3.attention.wq.weight" in lines and "    layers.1.attention.wq.weight" in lines
    assert lines[lines.index("    embed.weight") - 1].startswith("  never trained  1 of")
    assert len(set(lines)) == len(lines)
