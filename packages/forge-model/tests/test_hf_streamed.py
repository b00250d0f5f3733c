"""Weights get the names of Hugging Face one by one: each of ours is read once, and left before the next."""

import weakref

import pytest
import torch
from forge_model import config_from_hf, from_hf, initialize, to_hf
from forge_model.hf.families import FAMILIES
from forge_model.hf.tensors import tensors_of

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
FINE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
}
GROUPS = {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
MORE = {
    "deepseek_v2": LATENT | {"n_routed_experts": 6, "moe_intermediate_size": 20, "num_experts_per_tok": 2},
    "dots1": GROUPS | {"moe_intermediate_size": 20, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "glm4_moe": GROUPS | {"moe_intermediate_size": 20, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT | GROUPS | {"moe_intermediate_size": 20, "num_experts_per_tok": 2},
    "gpt_neox": {"hidden_size": 64},
    "gpt_oss": {"num_local_experts": 5},
    "mixtral": {"num_local_experts": 5},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": FINE,
    "qwen3_moe": FINE,
}


class Counted(dict):
    """Tensors of which each reading makes a copy.

    Attributes:
        read: the names, in order.
        most: how many copies lay in memory at once, at most.
    """

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read, self.most, self._alive = [], 0, 0

    def __getitem__(self, name):
        values = super().__getitem__(name).detach().numpy().copy()
        weakref.finalize(values, self._left)  # every tensor that shares its memory keeps it
        self._alive += 1
        self.read.append(name)
        self.most = max(self.most, self._alive)
        return torch.from_numpy(values)

    def _left(self):
        self._alive -= 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_to_hf_reads_each_tensor_once_and_keeps_one(family):
    shape = {key: value for key, value in SHAPE.items() if key in family.keys}
    config = config_from_hf({"model_type": family.model_type} | shape | MORE.get(family.model_type, {}))
    model = config.build()
    initialize(model, 3)
    ours = Counted(tensors_of(model))
    theirs = to_hf(ours, config)
    assert not ours.read
    kept = {name: theirs[name].clone() for name in theirs}
    left_out = {"head.weight"} if config.tie_embeddings else set()
    assert sorted(ours.read) == sorted(ours.keys() - left_out) and ours.most == 1
    back = from_hf(kept, config)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors_of(model).items())


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_to_hf_tells_shapes_and_dtypes_of_tensors_on_the_meta_device(name):
    config = config_from_hf({"model_type": name} | SHAPE | MORE[name])
    model, like = config.build(), {}
    initialize(model, 3)
    with torch.device("meta"):
        like = to_hf(tensors_of(config.build()), config)
    theirs = to_hf(tensors_of(model), config)
    assert list(like) == list(theirs) and all(like[key].is_meta for key in like)
    assert all((like[key].shape, like[key].dtype) == (theirs[key].shape, theirs[key].dtype) for key in like)
