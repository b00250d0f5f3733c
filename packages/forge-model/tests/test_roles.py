import pytest
import torch
from forge_model import DecoderConfig, ModelError
from forge_model.config import GroupedQueryConfig, LayerNormConfig, MLPConfig
from forge_model.roles import parameter_roles
from torch import nn


@pytest.mark.parametrize("tied", [False, True])
def test_decoder_says_the_role_of_every_parameter_once(tied):
    config = DecoderConfig(
        vocab_size=11,
        dim=8,
        num_layers=2,
        tie_embeddings=tied,
        attention=GroupedQueryConfig(num_heads=2, qk_norm=True, bias=True),
        ffn=MLPConfig(bias=True),
        norm=LayerNormConfig(bias=True),
    )
    model = config.build()
    roles = model.parameter_roles()
    assert roles.keys() == dict(model.named_parameters()).keys()
    expected = {
        "embed.weight": "embedding",
        "norm.weight": "norm",
        "norm.bias": "bias",
        "layers.1.attention.wq.weight": "matrix",
        "layers.1.attention.wq.bias": "bias",
        "layers.0.attention.q_norm.weight": "norm",
        "layers.0.ffn.w_down.weight": "matrix",
    }
    assert expected.items() <= roles.items()
    assert roles.get("head.weight") == (None if tied else "head")


def test_parameter_roles_names_every_parameter_without_one():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))
            self.shift = nn.Parameter(torch.ones(3))

    model = nn.Sequential(nn.Linear(3, 3), Gate())
    with pytest.raises(ModelError, match=r"1\.gain, 1\.shift"):
        parameter_roles(model)
    model[1].roles = {"gain": "norm", "shift": "bias"}
    assert parameter_roles(model)["1.shift"] == "bias"
