"""Families with random weights of `transformers`, three odd configurations each, in both directions."""

import json

import pytest
import torch
from forge_model import (
    ModelError,
    Sampling,
    config_from_hf,
    config_to_hf,
    from_hf,
    generate,
    initialize,
    to_hf,
)
from forge_model.config import MTPConfig
from forge_model.decoder.compare import differences
from forge_model.hf.config import families_of
from forge_model.hf.tensors import tensors_of
from like_transformers import Widened, tensors_on_disk
from msgspec.structs import replace

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
LONG: dict[str, object] = {
    "rope_type": "longrope", "rope_theta": 100.0,
    "short_factor": [1.0, 1.3, 2.0], "long_factor": [1.2, 3.0, 9.0],
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
EVERY_SECOND = ["sliding_attention", "full_attention"] * 2
FINE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = FINE | {"shared_expert_intermediate_size": 28}

GROUPED = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 3,
    "topk_group": 2, "n_shared_experts": 2,
}  # fmt: skip
ALONE = {"num_mtp_layers": 0}
MULTIPLIED = {
    "embedding_multiplier": 3.5, "logits_scaling": 1.7, "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
}  # fmt: skip
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 5, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}  # fmt: skip

CASES = {
    "olmo3": {"sliding_window": 7},
    "olmo3-yarn": {
        "sliding_window": 5,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 300.0}},
        "num_key_value_heads": 4,
    },
    "olmo3-listed": {"sliding_window": 9, "layer_types": EVERY_SECOND, "attention_bias": True},
    "smollm3": {},
    "smollm3-listed": {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False, "attention_bias": True},
    "smollm3-sliding": {
        "use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2, "mlp_bias": True
    },
    "glm4": {"head_dim": 20},
    "glm4-quarter": {
        "head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 100.0},
        "attention_bias": False, "tie_word_embeddings": True,
    },
    "glm4-whole": {"head_dim": 12, "rope_parameters": LINEAR | {"partial_rotary_factor": 1.0}},
    "qwen2_moe": SHARED,
    "qwen2_moe-dense": SHARED
    | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "qkv_bias": False, "norm_topk_prob": True},
    "qwen2_moe-sliding": SHARED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    "glm4_moe": GROUPED | ALONE | {"first_k_dense_replace": 2},
    "glm4_moe-no-shared": GROUPED
    | ALONE
    | {"n_shared_experts": 0, "use_qk_norm": True, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    "glm4_moe-biased": GROUPED
    | ALONE
    | {"attention_bias": True, "head_dim": 20, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7}
    | {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 100.0}, "norm_topk_prob": False},
    "dots1-sliding": GROUPED | {"sliding_window": 5, "max_window_layers": 2, "attention_bias": True},
    "dots1-biased": GROUPED | {"attention_bias": True, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "dots1-odd": GROUPED | {"sliding_window": 7, "layer_types": EVERY_SECOND, "head_dim": 20},
    "phi3": {
        "rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 100.0}, "num_attention_heads": 6
    },
    "phi3-sliding": {"partial_rotary_factor": 0.5, "sliding_window": 7, "tie_word_embeddings": True},
    "phi3-mha": {"num_attention_heads": 3, "num_key_value_heads": 3, "partial_rotary_factor": 0.25},
    "phi3-longrope": {
        "rope_parameters": LONG | {"partial_rotary_factor": 0.5}, "original_max_position_embeddings": 14,
    },
    "phi3-longrope-whole": {
        "rope_parameters": LONG
        | {"short_factor": [1.0, 1.1, 1.3, 1.4, 1.7, 2.0], "long_factor": [1.2, 1.9, 2.5, 3.0, 6.0, 9.0]},
        "original_max_position_embeddings": 10, "sliding_window": 11, "num_key_value_heads": 1,
    },
    "phi3-longrope-factor": {
        "rope_parameters": LONG | {"partial_rotary_factor": 0.75, "factor": 3.0, "attention_factor": 1.3},
        "original_max_position_embeddings": 39, "tie_word_embeddings": True, "num_attention_heads": 6,
    },
    "granite": MULTIPLIED,
    "granite-biased": MULTIPLIED
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 1.0},
    "granite-yarn": MULTIPLIED
    | {"rope_parameters": YARN, "num_key_value_heads": 4, "embedding_multiplier": 1.0},
    "granitemoe": MULTIPLIED | LOCAL,
    "granitemoe-tied": MULTIPLIED | LOCAL | {"tie_word_embeddings": True, "attention_bias": True},
    "granitemoe-one": MULTIPLIED | LOCAL | {"num_experts_per_tok": 1, "logits_scaling": 1.0},
    "gpt_neox": {"hidden_size": 64},
    "gpt_neox-serial": {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5},
    "gpt_neox-whole": {
        "rotary_pct": 1.0, "rotary_emb_base": 300, "hidden_act": "gelu_new", "tie_word_embeddings": True,
        "num_attention_heads": 3,
    },
    "gpt2": {"n_inner": 72},
    "gpt2-wide": {"num_attention_heads": 3, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
    "gpt2-untied": {
        "tie_word_embeddings": False, "scale_attn_weights": False, "num_hidden_layers": 1, "n_inner": 50,
    },
    "deepseek_v2": LATENT,
    "deepseek_v2-limited": LATENT
    | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.3}
    | {"first_k_dense_replace": 2, "attention_bias": True},
    "deepseek_v2-yarn": LATENT
    | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "q_lora_rank": None}
    | {"n_shared_experts": 0, "tie_word_embeddings": True},
}  # fmt: skip
# transformers warns of its matrices of width 0, which stand for shared experts where there are none
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def theirs(case):
    """A model of `transformers` in float64; gains are about 1, so that each counts."""
    kind = case.partition("-")[0]
    make = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    known = make.__dataclass_fields__.keys() | make.attribute_map.keys()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    config = make(
        **sizes | CASES[case], pad_token_id=None, attn_implementation="eager", experts_implementation="eager"
    )
    with Widened():
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        buffers = [one for one in model.named_buffers() if one[0].endswith("e_score_correction_bias")]
        for name, tensor in [*model.named_parameters(), *buffers]:
            tensor.normal_(1.0 if tensor.ndim == 1 and name.endswith("weight") else 0.0, 0.2)
    return model


def logits_of(model, tokens):
    with torch.no_grad(), Widened():
        return model.eval()(tokens).logits


def as_saved(model, folder):
    """What `save_pretrained` writes, read back: keys and tensors."""
    model.save_pretrained(folder)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.load_file(file)
    return json.loads((folder / "config.json").read_text()), tensors


@EVERY_CASE
def test_saved_model_of_transformers_gives_its_logits(case, tmp_path):
    model, tokens = theirs(case), torch.randint(97, (2, 40))
    keys, tensors = as_saved(model, tmp_path)
    assert keys["model_type"] == case.partition("-")[0]
    config = config_from_hf(keys)
    ours = config.build().double()
    loaded = ours.load_state_dict(from_hf(tensors, config), strict=False)
    assert loaded.missing_keys == (["head.weight"] if config.tie_embeddings else [])
    expected = logits_of(model, tokens)
    for length in config.length_borders():
        for near in (tokens[:, :length], tokens[:, : length + 1]):
            assert (ours(near) - logits_of(model, near)).abs().max() <= 1e-9
    assert (ours(tokens) - expected).abs().max() <= 1e-9
    assert (ours.float()(tokens) - expected).abs().max() <= 1e-4


@EVERY_CASE
def test_export_loads_strictly_into_transformers_and_gives_our_logits(case, tmp_path):
    model = theirs(case)
    config = config_from_hf(model.config.to_dict())
    ours = config.build()
    initialize(ours, 1)
    ours.double()
    written, tensors = config_to_hf(config), to_hf(tensors_of(ours), config)
    assert written["model_type"] == model.config.model_type, "an odd case is of this family alone"
    tied = {"lm_head.weight", "embed_out.weight"} if config.tie_embeddings else set()
    assert {*tensors} == {*tensors_on_disk(model)} - tied
    (tmp_path / "config.json").write_text(json.dumps(written))
    copied = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    safetensors.save_file(copied, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"dtype": torch.float64, "experts_implementation": "eager", "output_loading_info": True}
    with Widened():
        read, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert not any(info.values())
    tokens = torch.randint(97, (2, 40))
    assert (ours(tokens) - logits_of(read, tokens)).abs().max() <= 1e-9
    assert differences(config_from_hf(written), config) == []
    back = from_hf(tensors, config)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors_of(ours).items() if name in back)


@EVERY_CASE
def test_generation_of_prompts_of_different_lengths_equals_full_forward_passes(case):
    config = config_from_hf(theirs(case).config.to_dict())
    ours = config.build()
    initialize(ours, 1)
    ours.double()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9]]
    for prompt, new in zip(prompts, generate(ours, prompts, 8, Sampling(temperature=0)), strict=True):
        logits = ours(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == new


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_checkpoint_without_the_modules_that_its_config_counts_says_what_to_set(kind, tmp_path):
    small = GROUPED | (LATENT if kind == "deepseek_v3" else {})
    make = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    model = transformers.AutoModelForCausalLM.from_config(make(**SIZES | small))
    keys, tensors = as_saved(model, tmp_path)
    config = config_from_hf(keys)
    assert config.mtp.num_modules == 1, "transformers counts what it does not save"
    with pytest.raises(ModelError, match=r"which `transformers` counts .* set model\.mtp\.num_modules = 0"):
        from_hf(tensors, config)
    without = replace(config, mtp=MTPConfig(num_modules=0))
    assert from_hf(tensors, without).keys() == tensors_of(without.build()).keys()
    tensors.popitem()
    with pytest.raises(ModelError) as caught:
        from_hf(tensors, config)
    assert "num_modules" not in str(caught.value), "something else is missing, too"


def test_tensors_choose_among_the_families_that_can_hold_a_model(tmp_path):
    make = transformers.Phi3Config(**SIZES, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(make).double()
    keys, tensors = as_saved(model, tmp_path)
    config = config_from_hf(keys)
    assert [family.model_type for family, _ in families_of(config)][:2] == ["llama", "mistral"]
    ours = config.build().double()
    ours.load_state_dict(from_hf(tensors, config))
    exported = to_hf(tensors_of(ours), config)
    assert "model.layers.0.self_attn.q_proj.weight" in exported, "the first family is written"
    with pytest.raises(ModelError, match=r"left over \['model\.layers\.0\.self_attn\.qkv_proj\.weight'"):
        from_hf({"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(1), **exported}, config)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"model_type": "phi3", "rope_parameters": YARN}, "rope_type = 'yarn', only default, longrope"),
        ({"model_type": "glm4", "partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"model_type": "glm4", "partial_rotary_factor": 0.001}, "rotates 0 dims"),
        ({"model_type": "gpt_neox", "rope_theta": 5.0}, "rope_theta = 5.0 outside of rope_parameters"),
        ({"model_type": "gpt_neox", "hidden_act": "gelu_fast"}, "hidden_act = 'gelu_fast'"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ({"model_type": "dots1"}, "num_experts_per_tok, n_shared_experts, n_routed_experts = None"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers = \[1\]"),
        ({"model_type": "olmo3", "rope_parameters": LINEAR}, "a table for each of"),
        ({"model_type": "llama", "num_key_value_heads": 3}, "num_kv_heads is num_key_value_heads"),
    ],
    ids=str,
)
def test_values_that_a_family_cannot_follow_are_refused_by_their_names(change, needle):
    with pytest.raises(ModelError, match=needle):
        config_from_hf(change)


def test_first_checkpoints_of_gpt2_have_no_beginning_of_names_and_buffers_beside(tmp_path):
    model = theirs("gpt2")
    keys, tensors = as_saved(model, tmp_path)
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    assert bare.keys().isdisjoint(tensors)
    bare |= {
        f"h.{i}.attn.{name}": torch.ones(1, 1, 64, 64) for i in range(4) for name in ("bias", "masked_bias")
    }
    whole, found = (dict(from_hf(there, config_from_hf(keys))) for there in (tensors, bare))
    assert whole.keys() == found.keys() and all(torch.equal(whole[name], found[name]) for name in whole)


def test_longer_context_of_learned_positions_is_another_model():
    config = config_from_hf({"model_type": "gpt2", "n_positions": 64})
    assert differences(config, replace(config, max_tokens=65)) == ["max_tokens: 64, there 65"]
    rotary = config_from_hf({"model_type": "gpt_neox"})
    assert differences(rotary, replace(rotary, max_tokens=65)) == []
