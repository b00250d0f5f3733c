"""Against `transformers` with random weights, both directions."""

import json
from contextlib import nullcontext

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
from forge_model.attention.cache import Cache
from forge_model.config import DecoderConfig, GroupedQueryConfig, LayerOverride, SwiGLUConfig
from forge_model.decoder.compare import differences
from forge_model.hf.tensors import tensors_of
from like_transformers import Widened, tensors_on_disk

transformers = pytest.importorskip("transformers")

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# 4096 original tokens and head width 12: the ramp blends pairs 2, 3 and 4 of 6, and keeps 0 and 1
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
# the ramp from pair 13.5 down to 11: transformers lets it fall
FALLING = YARN | {"rope_theta": 10.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
MLA = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "first_k_dense_replace": 9,
    "num_mtp_layers": 0,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
FINE = EXPERTS | {"moe_intermediate_size": 20}
DEEPSEEK = MLA | FINE | {"n_routed_experts": 6, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2}
del DEEPSEEK["num_experts"]
GPT_OSS = EXPERTS | {
    "head_dim": 12,
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "swiglu_limit": 0.6,
    "swiglu_alpha": 1.3,
    "attn_implementation": "eager",
}
LAST_SLIDES = {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
# embeddings are multiplied by sqrt(hidden_size), which transformers rounds to float32: 8 is exact
GEMMA = {
    "hidden_size": 64,
    "head_dim": 12,
    "query_pre_attn_scalar": 5,
    "sliding_window": 7,
    "num_hidden_layers": 3,
    "attn_implementation": "eager",
}
CAPPED = {"final_logit_softcapping": 1.5, "tie_word_embeddings": False}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_size": 144}
GEMMA3_ROPE = {
    "full_attention": LINEAR | {"rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
CASES = {
    "llama": ("llama", {}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope-mha": ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "llama-yarn-tied": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "llama-yarn-sharp": ("llama", {"rope_parameters": YARN | {"original_max_position_embeddings": 16}}),
    "llama-yarn-not-truncated": ("llama", {"rope_parameters": YARN | {"truncate": False}}),
    "llama-yarn-scaled": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama-yarn-one-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7}}),
    "llama-yarn-betas": ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0}}),
    "llama-yarn-falling-ramp": ("llama", {"rope_parameters": FALLING}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-biases": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3-sliding": (
        "qwen3",
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3-sliding-pattern": (
        "qwen3",
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-tied": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen2": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9} | LAST_SLIDES,
    ),
    "mistral": ("mistral", {"sliding_window": 11, "head_dim": 20}),
    "mistral-tied": ("mistral", {"sliding_window": 11, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-biases-mha": (
        "olmo2",
        {"attention_bias": True, "num_key_value_heads": 4, "rope_parameters": YARN},
    ),
    "deepseek_v3": ("deepseek_v3", MLA),
    "deepseek_v3-plain-queries": ("deepseek_v3", MLA | {"q_lora_rank": None, "rope_interleave": False}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        MLA | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "attention_bias": True},
    ),
    "deepseek_v3-one-mscale": ("deepseek_v3", MLA | {"rope_parameters": YARN | {"mscale_all_dim": 0.1}}),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": 7}),
    "qwen3_moe": ("qwen3_moe", FINE | {"norm_topk_prob": True, "head_dim": 12}),
    "qwen3_moe-dense-layers": (
        "qwen3_moe",
        FINE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "olmoe": ("olmoe", EXPERTS),
    "deepseek_v3-experts": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3-mtp": ("deepseek_v3", DEEPSEEK | {"num_mtp_layers": 2}),
    "deepseek_v3-two-shared": ("deepseek_v3", DEEPSEEK | {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss-plain": (
        "gpt_oss",
        GPT_OSS
        | {"attention_bias": False, "tie_word_embeddings": True, "rope_parameters": LINEAR}
        | {"layer_types": ["full_attention"] * 3, "num_experts_per_tok": 1},
    ),
    "gemma": ("gemma", {"hidden_size": 64, "head_dim": 20}),
    "gemma-untied-mqa": (
        "gemma",
        {"hidden_size": 64, "head_dim": 12, "num_key_value_heads": 1}
        | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma-odd": (
        "gemma",
        {"hidden_size": 36, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma2-uncapped-odd": (
        "gemma2",
        GEMMA | UNCAPPED | {"num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "gemma2-biases": ("gemma2", GEMMA | {"attention_bias": True, "layer_types": ["full_attention"] * 3}),
    "gemma3": ("gemma3", GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE}),
    "gemma3-capped": (
        "gemma3",
        GEMMA | {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2} | CAPPED,
    ),
}


CLASSES = {
    "deepseek_v3": "DeepseekV3Config",
    "gpt_oss": "GptOssConfig",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "olmo2": "Olmo2Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
}


EXPERTS_IN = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")


def widened(dtype):
    return Widened() if dtype == torch.float64 else nullcontext()


def theirs(case, dtype):
    kind, options = CASES[case]
    make = getattr(transformers, CLASSES[kind])
    shape = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = make(**({"attn_implementation": "sdpa"} | shape | heads | options))
    with widened(dtype):
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            if parameter.ndim == 3 or name.endswith(("gate.weight", "router.weight", "proj_bias")):
                parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def loaded_by_transformers(written, tensors, folder):
    """A model in float64 of our `config.json` and tensors."""
    safetensors = pytest.importorskip("safetensors.torch")
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"dtype": torch.float64, "experts_implementation": "eager", "output_loading_info": True}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("mtp")])
def test_logits_equal_those_of_transformers(case, dtype):
    model = theirs(case, dtype)
    config = config_from_hf(model.config.to_dict())
    ours = config.build().to(dtype)
    loaded = ours.load_state_dict(from_hf(tensors_on_disk(model), config), strict=False)
    assert loaded.missing_keys == (["head.weight"] if config.tie_embeddings else [])
    tokens = torch.randint(97, (2, 50))
    with torch.no_grad(), widened(dtype):
        logits = model(tokens).logits
    difference = (ours(tokens) - logits).abs().max()
    assert difference <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "case", [case for case in CASES if CASES[case][0] in EXPERTS_IN and not case.endswith("mtp")]
)
def test_exported_experts_load_into_transformers_and_give_our_logits(case, tmp_path):
    config = config_from_hf(theirs(case, torch.float64).config.to_dict())
    ours = config.build()
    initialize(ours, 1)
    ours.double()
    written, tensors = config_to_hf(config), to_hf(tensors_of(ours), config)
    with Widened():
        model, info = loaded_by_transformers(written, tensors, tmp_path)
        assert not any(info.values())
        tokens = torch.randint(97, (2, 50))
        with torch.no_grad():
            logits = model.eval()(tokens).logits
    assert (ours(tokens) - logits).abs().max() <= 1e-9
    assert differences(config_from_hf(written), config) == []
    back = from_hf(tensors, config)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors_of(ours).items())


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] not in EXPERTS_IN])
def test_exported_weights_load_into_transformers_and_give_our_logits(case):
    config = config_from_hf(theirs(case, torch.float64).config.to_dict())
    ours = config.build()
    initialize(ours, 1)
    ours.double()
    written = config_to_hf(config)
    model_type = written.pop("model_type")
    with Widened():
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(model_type, **written)
        )
    loaded = model.double().eval().load_state_dict(to_hf(dict(ours.named_parameters()), config), strict=False)
    assert loaded.unexpected_keys == []
    assert loaded.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
    tokens = torch.randint(97, (2, 50))
    with torch.no_grad(), Widened():
        logits = model(tokens).logits
    assert (ours(tokens) - logits).abs().max() <= 1e-9
    assert config_from_hf({"model_type": model_type} | written) == config


FAMILY_CASES = [
    "gpt_oss",
    "deepseek_v3-experts",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v3-yarn",
    "llama",
    "qwen2",
    "mistral",
    "olmo2",
    "gemma",
    "gemma2",
    "gemma3-capped",
]


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_generation_of_prompts_of_different_lengths_equals_full_forward_passes(case):
    config = config_from_hf(theirs(case, torch.float64).config.to_dict())
    ours = config.build()
    initialize(ours, 1)
    ours.double()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9]]
    written = generate(ours, prompts, 12, Sampling(temperature=0))
    for prompt, new in zip(prompts, written, strict=True):
        logits = ours(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == new


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_at_other_positions_equal_those_of_transformers(case):
    model = theirs(case, torch.float64)
    config = config_from_hf(model.config.to_dict())
    ours = config.build().double()
    ours.load_state_dict(from_hf(tensors_on_disk(model), config), strict=False)
    tokens, positions = torch.randint(97, (1, 20)), torch.arange(5, 25)
    with torch.no_grad(), Widened():
        logits = model(tokens, position_ids=positions[None]).logits
    assert (ours(tokens, positions=positions) - logits).abs().max() <= 1e-9


def of_mtp_model(ours, tensors, num_layers):
    """Tensors on disk by the names that `MtpModel` has for them, experts as it stacks them."""
    found = {}
    for depth, module in ours.mtp.items():
        experts, place = module.block.ffn.experts, f"layers.{depth}.mtp_block.mlp.experts"
        found[f"{place}.gate_up_proj"] = torch.cat([experts.w_gate, experts.w_up], 1)
        found[f"{place}.down_proj"] = experts.w_down
    for name, tensor in tensors.items():
        parts = name.split(".", 3)
        if parts[1] == "layers" and int(parts[2]) >= num_layers and ".experts." not in name:
            inner = parts[3].replace("shared_head.norm", "post_norm")
            inside = inner.startswith(("self_attn", "mlp", "input_layer", "post_attention"))
            found[f"layers.{int(parts[2]) - num_layers}.{'mtp_block.' * inside}{inner}"] = tensor
    return found


def test_multi_token_prediction_equals_that_of_transformers(tmp_path):
    from transformers.modeling_layers import MtpModel

    config = config_from_hf(theirs("deepseek_v3-mtp", torch.float64).config.to_dict())
    assert config.mtp.num_modules == 2
    ours = config.build()
    initialize(ours, 1)
    ours.double()
    tensors, tokens = to_hf(tensors_of(ours), config), torch.randint(97, (2, 12))
    back = from_hf(tensors, config)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors_of(ours).items())
    with torch.no_grad(), Widened():
        model, _ = loaded_by_transformers(config_to_hf(config), tensors, tmp_path)
        ahead = MtpModel(model, 2).double().eval()
        loaded = ahead.load_state_dict(of_mtp_model(ours, tensors, 2), strict=False)
        assert not loaded.unexpected_keys and all("layers." not in name for name in loaded.missing_keys)
        hidden = model.eval().model(tokens).last_hidden_state
        cache = Cache(2, 12, padding=torch.zeros(2, dtype=torch.long))
        made = ours.hidden_states(tokens, cache)
        for depth, module in enumerate(ours.mtp.values()):
            length = 11 - depth
            following, places = tokens[:, depth + 1 :], torch.arange(length)[None]
            hidden = ahead.forward_layer(depth, hidden[:, :length], places, None, input_ids=following)
            own = Cache(1, 12, padding=torch.zeros(2, dtype=torch.long))
            made = ours.predict_ahead(module, following, made[:, :length], own.layers[0], own.mask(length))
            assert (made - hidden).abs().max() <= 1e-9
    without = config_from_hf(config_to_hf(config) | {"num_nextn_predict_layers": 0})
    assert from_hf(tensors, without).keys() == tensors_of(without.build()).keys()


def test_from_hf_lists_what_is_missing_and_what_is_left_over():
    model = theirs("llama", torch.float32)
    tensors = model.state_dict()
    tensors["model.surprise"] = tensors.pop("model.norm.weight")
    with pytest.raises(ModelError, match=r"missing \['model.norm.weight'\], left over \['model.surprise'\]"):
        from_hf(tensors, config_from_hf(model.config.to_dict()))
    both = model.state_dict() | {"model.surprise": torch.zeros(2)}
    with pytest.raises(ModelError, match=r"missing nothing, left over \['model.surprise'\]"):
        from_hf(both, config_from_hf(model.config.to_dict()))


def test_to_hf_refuses_a_model_no_family_can_hold():
    attention = GroupedQueryConfig(num_heads=2, sliding_window=4)
    wider = GroupedQueryConfig(num_heads=2, sliding_window=5)
    layers = [LayerOverride(layers="0", attention=wider)]
    config = DecoderConfig(vocab_size=8, dim=8, num_layers=2, attention=attention, overrides=layers)
    with pytest.raises(ModelError, match=r"mistral.*: attention.sliding_window: 4, there 5 \(layers 1"):
        config_to_hf(config)


def test_to_hf_refuses_biases_that_qwen3_does_not_have():
    attention = GroupedQueryConfig(num_heads=2, qk_norm=True)
    config = DecoderConfig(
        vocab_size=8, dim=8, num_layers=1, attention=attention, ffn=SwiGLUConfig(bias=True)
    )
    with pytest.raises(ModelError, match=r"qwen3, .*: ffn\.bias: True, there False"):
        config_to_hf(config)


def test_from_hf_reads_a_tensor_when_it_is_taken():
    model = theirs("llama", torch.float32)
    config = config_from_hf(model.config.to_dict())
    read = []

    class Lazy(dict):
        def __getitem__(self, key):
            read.append(key)
            return super().__getitem__(key)

    tensors = from_hf(Lazy(model.state_dict()), config)
    assert len(tensors) == len(dict(model.named_parameters())) and not read
    assert torch.equal(tensors["embed.weight"], model.model.embed_tokens.weight)
    assert read == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("case", ["llama", "qwen3-tied"])
def test_weights_survive_files_that_transformers_writes_and_reads(case, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = theirs(case, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    config = config_from_hf(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    tensors = safetensors.load_file(tmp_path / "theirs" / "model.safetensors")
    back = to_hf(from_hf(tensors, config), config)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config_to_hf(config)))
    safetensors.save_file(dict(back), tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
