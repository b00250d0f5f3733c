"""Keys of a `config.json`: what they mean, what their absence means, and which are refused."""

import json
import subprocess
import sys

import pytest
from forge_config import Config, ConfigError, load, to_toml
from forge_model import ModelError, config_from_hf, config_to_hf
from forge_model.attention.rope_config import YarnRopeConfig
from forge_model.config import (
    DecoderConfig,
    GroupedQueryConfig,
    LayerNormConfig,
    LayerOverride,
    MLPConfig,
    ModelConfig,
    RMSNormConfig,
    RopeConfig,
    SwiGLUConfig,
)
from forge_model.decoder.compare import differences
from forge_model.hf.config import FIXED
from forge_model.hf.families import FAMILIES

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
SHAPES = {
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 6, "n_shared_experts": 1},
    "glm4_moe": {"head_dim": 20},
    "gpt_neox": {"hidden_size": 64},
    "gpt2": {"n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
"""What else is needed for such a small one."""
YARN = {"rope_type": "yarn", "factor": 4.0}


NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 64, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},
}
"""What else the defaults of a class need: it cannot be built of them, or rotates an odd width."""


def default_config(model_type: str):
    return pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING[model_type]


@EVERY_FAMILY
def test_defaults_are_those_of_transformers(family):
    fields = default_config(family.model_type).__dataclass_fields__
    assert {name: key.default for name, key in family.keys.items()} == {
        name: fields[name].default for name in family.keys
    }


@EVERY_FAMILY
def test_every_key_alone_means_what_it_means_to_transformers(family):
    make, shape = default_config(family.model_type), SHAPE | SHAPES.get(family.model_type, {})
    shape = {key: value for key, value in shape.items() if key in family.keys | family.old_keys}
    for left_out in [None, *(shape if family.model_type == "gpt2" else SHAPE)]:
        given = {key: value for key, value in shape.items() if key != left_out}
        if left_out in ("num_attention_heads", "num_key_value_heads") and "hidden_size" in family.keys:
            given |= {"num_attention_heads": 128} if "num_attention_heads" in given else {}
            given |= {"hidden_size": 1024}
            if "kv_lora_rank" in family.keys and left_out == "num_attention_heads":
                given |= {"num_key_value_heads": family.keys[left_out].default}
            if "kv_lora_rank" in family.keys and left_out == "num_key_value_heads":
                given |= {"num_attention_heads": family.keys[left_out].default or 128}
        ours = config_from_hf({"model_type": family.model_type} | given)
        theirs = config_from_hf(make(**given).to_dict())
        assert differences(ours, theirs) == [], left_out
        assert ours.max_tokens == theirs.max_tokens


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_config_of_defaults_is_read_as_transformers_reads_it(family):
    needed, make = NEEDED.get(family.model_type, {}), default_config(family.model_type)
    bare, fields = config_from_hf({"model_type": family.model_type} | needed), make.__dataclass_fields__
    eps = next(name for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if name in fields)
    assert bare.norm.eps == fields[eps].default
    assert differences(bare, config_from_hf(make(**needed).to_dict())) == []


@pytest.mark.parametrize("name", [name for family in FAMILIES for name in family.presets])
def test_every_preset_is_exported_as_what_it_is_called(name, tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(f'[model]\npreset = "{name}"\n')
    written = config_to_hf(load(Whole, path).value.model)
    assert written["model_type"].removesuffix("_text") == name.split("-")[0]


def test_qwen3_without_head_dim_has_heads_of_128():
    config = config_from_hf({"model_type": "qwen3"} | SHAPE)
    assert config.attention.rotary_dim(config.dim) == 128


@pytest.mark.parametrize("window", [False, True])
def test_qwen_without_a_layer_before_the_windows_is_read_as_transformers_reads_it(window):
    given = SHAPE | {"max_window_layers": 0, "use_sliding_window": window, "sliding_window": 16}
    theirs = default_config("qwen3")(**given, hidden_act="swish")
    ours = config_from_hf({"model_type": "qwen3", "hidden_act": "swish"} | given)
    assert differences(ours, config_from_hf(theirs.to_dict())) == []
    windows = [ours.layer(index).attention.window for index in range(2)]
    assert windows == [16 if kind == "sliding_attention" else None for kind in theirs.layer_types]


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "a linear rope without factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "without high_freq_factor, low_freq"),
        ({"rope_parameters": YARN | {"surprise": 3}}, "surprise = 3 is not known of a yarn rope"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention"),
        ({"rope_parameters": YARN | {"factor": "4"}}, "factor = '4'"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"sliding_window": 16}, "sliding_window = 16 is not known"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0 is not known"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None, expected float"),
        ({"hidden_size": "48"}, "hidden_size = '48', expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"model_type": "qwen3", "max_window_layers": -1}, "max_window_layers = -1"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1, expected bool"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias = True"),
        (
            {"model_type": "gpt_oss", "initial_context_length": 7},
            "initial_context_length = 7, where the rope",
        ),
        ({"model_type": "gpt_oss", "swiglu_limit": 0.0}, "swiglu_limit = 0.0"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim = None"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv = 8.0, only None can be read"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "names 1 layers"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "without use_slid"),
    ],
)
def test_config_from_hf_refuses_what_it_cannot_follow(change, needle):
    with pytest.raises(ModelError, match=needle):
        config_from_hf({"model_type": "llama"} | SHAPE | change)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_key_that_must_be_absent_accepts_no_value(family):
    absent = [name for name, value in (FIXED | family.fixed).items() if value is None]
    for name in absent:
        with pytest.raises(ModelError, match=f"{name} = 'silu', only None"):
            config_from_hf({"model_type": family.model_type} | {name: "silu"})


def test_config_from_hf_lists_all_keys_that_it_cannot_follow():
    given = {"model_type": "llama", "hidden_act": "gelu", "logits_scaling": 8.0, "hidden_size": -1}
    with pytest.raises(ModelError) as caught:
        config_from_hf(given)
    assert all(key in str(caught.value) for key in ("hidden_act", "logits_scaling", "hidden_size"))


def test_old_places_of_the_rotary_keys_are_read():
    llama = {"model_type": "llama"} | SHAPE
    assert config_from_hf(llama | {"rope_theta": 5e5}).rope == RopeConfig(theta=5e5)
    scaled = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert config_from_hf(llama | scaled).rope == YarnRopeConfig(
        theta=5e5, factor=4.0, original_max_tokens=2048
    )
    outside = scaled | {"original_max_position_embeddings": 512}
    assert config_from_hf(llama | outside).rope.original_max_tokens == 512
    no_factor = {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 512}}
    assert config_from_hf(llama | no_factor).rope.factor == 4.0


def test_config_to_hf_invents_no_token_ids():
    config = config_from_hf({"model_type": "llama"} | SHAPE)
    written = config_to_hf(config)
    assert [written[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [None] * 3
    theirs = default_config("llama")(**written)
    assert theirs.bos_token_id is None and theirs.eos_token_id is None
    assert config_to_hf(config, eos_token_id=256)["eos_token_id"] == 256


def test_scores_may_be_multiplied_by_more_than_one():
    config = config_from_hf({"model_type": "granite"} | SHAPE | {"attention_multiplier": 2.0})
    assert config_to_hf(config)["attention_multiplier"] == 2.0


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        (
            {
                "attention": GroupedQueryConfig(num_heads=2, bias=True, sliding_window=4),
                "norm_order": "sandwich",
            },
            "qwen2: norm_order: 'sandwich', there 'pre'",
        ),
        (
            {"attention": GroupedQueryConfig(num_heads=2, output_bias=True)},
            "attention.output_bias: True, there F",
        ),
        (
            {"attention": GroupedQueryConfig(num_heads=2, softcap=5.0)},
            "attention.softcap: 5.0, there 'absent'",
        ),
        ({"ffn": MLPConfig()}, "swiglu"),
        ({"norm": LayerNormConfig()}, "rmsnorm"),
        (
            {"overrides": [LayerOverride(layers="1", rope=RopeConfig(theta=5.0))]},
            "rope.theta: 5.0, there 10000.0 .layers 1",
        ),
        (
            {"overrides": [LayerOverride(layers=":", norm=RMSNormConfig(eps=0.1))]},
            "norm.eps: 0.1, there 1e-05",
        ),
        (
            {
                "attention": GroupedQueryConfig(num_heads=2, qk_norm=True, sliding_window=4),
                "overrides": [
                    LayerOverride(
                        layers="1", attention=GroupedQueryConfig(num_heads=2, qk_norm=True, sliding_window=5)
                    )
                ],
            },
            "sliding_window: 5, there 4 .layers 1",
        ),
    ],
)
def test_config_to_hf_refuses_models_that_no_family_can_hold(options, needle):
    base = {"attention": GroupedQueryConfig(num_heads=2)}
    config = DecoderConfig(vocab_size=8, dim=8, num_layers=2, **(base | options))
    with pytest.raises(ModelError, match=needle):
        config_to_hf(config)


BASE = DecoderConfig(vocab_size=97, dim=48, num_layers=2, attention=GroupedQueryConfig(num_heads=4))


def changed(**options):
    return DecoderConfig(
        **({name: getattr(BASE, name) for name in BASE.__struct_fields__} | options)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"max_tokens": 7, "init_std": 0.5}, []),
        ({"ffn": SwiGLUConfig(dim=128), "attention": GroupedQueryConfig(num_heads=4, head_dim=12)}, []),
        ({"rope": RopeConfig(theta=100.0)}, ["rope.theta: 10000.0, there 100.0"]),
        (
            {"attention": GroupedQueryConfig(num_heads=2, num_kv_heads=1)},
            [
                "attention.num_heads: 4, there 2",
                "attention.num_kv_heads: 4, there 1",
                "attention.head_dim: 12, there 24",
            ],
        ),
        ({"norm": RMSNormConfig(eps=0.1)}, ["norm.eps: 1e-05, there 0.1"]),
        ({"tie_embeddings": True}, ["tie_embeddings: False, there True"]),
        ({"num_layers": 3}, ["num_layers: 2, there 3"]),
        (
            {"ffn": MLPConfig(dim=128)},
            ["ffn.type: 'swiglu', there 'mlp'", "ffn.activation: 'absent', there 'gelu'"],
        ),
        (
            {"overrides": [LayerOverride(layers="1", rope=RopeConfig(theta=5.0))], "vocab_size": 98},
            ["vocab_size: 97, there 98", "rope.theta: 10000.0, there 5.0 (layers 1)"],
        ),
    ],
)
def test_differences_lists_all_that_changes_the_computation(options, expected):
    assert differences(BASE, changed(**options)) == expected


class Whole(Config):
    model: ModelConfig


def folder_of(tmp_path, **change):
    path = tmp_path / "folder"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | SHAPE | change))
    return path


def test_model_from_a_folder_takes_its_keys_and_those_given_beside(tmp_path):
    folder = folder_of(tmp_path, head_dim=12)
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nfrom = "{folder}"\nmax_tokens = 64\nattention = {{ bias = true }}\n')
    loaded = load(Whole, path, ["--model.norm.eps=0.5"])
    model = loaded.value.model
    assert (model.dim, model.max_tokens, model.norm.eps) == (48, 64, 0.5)
    assert model.attention.qk_norm and model.attention.bias and model.attention.kv_heads == 2
    (folder / "config.json").unlink()
    path.write_text(to_toml(loaded.value))
    assert load(Whole, path).value.model == model


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ('from = "nowhere"', r"nowhere.*config\.json"),
        ('from = "FOLDER"\npreset = "llama-8b"', "give one of them"),
        ("from = 3", "from"),
        ('from = "FOLDER"\nhead = 1', "head"),
    ],
)
def test_model_from_a_folder_says_what_is_wrong(tmp_path, text, needle):
    folder = folder_of(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text("[model]\n" + text.replace("FOLDER", str(folder)))
    with pytest.raises(ConfigError, match=needle):
        load(Whole, path)


def test_model_from_a_folder_with_keys_that_cannot_be_followed_lists_them(tmp_path):
    folder = folder_of(tmp_path, logits_scaling=8.0, hidden_act="gelu")
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nfrom = "{folder}"')
    with pytest.raises(ConfigError, match=r"(?s)logits_scaling.*hidden_act|hidden_act.*logits_scaling"):
        load(Whole, path)


MODULES = "config hf.families hf.config hf.rope decoder.compare decoder.config attention.config ffn.config"


@pytest.mark.parametrize(
    "module", [*MODULES.split(), "attention.rope_config", "loss.config", "model_config", "norm_config"]
)
def test_configuration_imports_no_torch(module):
    code = f"import sys, forge_model.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "table",
    [
        {"rope_theta": None},
        {"rope_theta": -5.0},
        {"rope_type": "linear", "factor": None},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": -2.0},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": None, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 0, "high_freq_factor": 4.0},
        YARN | {"factor": 0},
        YARN | {"factor": float("nan")},
        YARN | {"beta_fast": -1.0},
        YARN | {"truncate": "no"},
        YARN | {"attention_factor": 0},
        YARN | {"rope_theta": 1.0},
        YARN | {"original_max_position_embeddings": 16.5},
    ],
    ids=str,
)
def test_values_of_the_rope_table_outside_their_bounds_are_refused(table):
    with pytest.raises(ModelError, match="rope"):
        config_from_hf({"model_type": "llama"} | SHAPE | {"rope_scaling": table})


PUBLISHED_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
OF_OTHERS = {"n_special": 0, "predict_special_tokens": True, "_num_labels": 1, "pruned_heads": {}}


@pytest.mark.parametrize("more", [{}, OF_OTHERS, {"gradient_checkpointing": False, "output_past": True}])
def test_the_first_published_files_of_gpt2_are_read(more):
    """Of gpt2, and what files of its sizes and copies hold beside it."""
    config = config_from_hf(PUBLISHED_GPT2 | more)
    assert config.max_tokens == 1024 and config.learned_positions and config.num_layers == 12


def test_a_context_of_gpt2_that_contradicts_its_positions_is_refused():
    with pytest.raises(ModelError, match="n_ctx = 512 and n_positions = 1024 mean the same"):
        config_from_hf(PUBLISHED_GPT2 | {"n_ctx": 512})
