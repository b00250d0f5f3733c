"""Conversion between `[model.encoder]` and the towers of Hugging Face: keys and names. Imports no torch.

An absent key has the default of the config class of `transformers` 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from forge_config import plain
from forge_model import ModelError
from forge_model.hf.config import read_config
from forge_model.hf.families.family import Key
from forge_model.hf.keys import Keys, keyed

from forge_vlm.encoders.config import EncoderConfig, TowerConfig
from forge_vlm.encoders.families import (
    CLIPConfig,
    Dinov2Config,
    Idefics3TowerConfig,
    MllamaTowerConfig,
    Siglip2Config,
    SiglipConfig,
    canvases_of,
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Values of `hidden_act`, theirs to ours."""
THEIRS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items()) if theirs != "gelu_new"}

PRE = {
    "attention_norm": "layer_norm1",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.out_proj",
    "ffn_norm": "layer_norm2",
    "ffn.w_up": "mlp.fc1",
    "ffn.w_down": "mlp.fc2",
    "layers": "encoder.layers",
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "norm": "post_layernorm",
    "pre_norm": "pre_layrnorm",
    "class_token.weight": "embeddings.class_embedding",
}
DINOV2 = {
    "attention_norm": "norm1",
    "attention.wq": "attention.attention.query",
    "attention.wk": "attention.attention.key",
    "attention.wv": "attention.attention.value",
    "attention.wo": "attention.output.dense",
    "attention_post_norm.weight": "layer_scale1.lambda1",
    "ffn_norm": "norm2",
    "ffn.w_up": "mlp.fc1",
    "ffn.w_down": "mlp.fc2",
    "ffn_post_norm.weight": "layer_scale2.lambda1",
    "layers": "encoder.layer",
    "patches": "embeddings.patch_embeddings.projection",
    "positions.weight": "embeddings.position_embeddings",
    "class_token.weight": "embeddings.cls_token",
    "norm": "layernorm",
}

MLLAMA = PRE | {
    "attention_norm": "input_layernorm",
    "attention.wo": "self_attn.o_proj",
    "attention_post_norm.weight": "gate_attn",
    "ffn_norm": "post_attention_layernorm",
    "ffn_post_norm.weight": "gate_ffn",
    "layers": "transformer.layers",
    "last layers": "global_transformer.layers",
    "patches": "patch_embedding",
    "positions.weight": "gated_positional_embedding.embedding",
    "position_tiles.weight": "gated_positional_embedding.tile_embedding.weight",
    "position_tiles.gate.weight": "gated_positional_embedding.gate",
    "pre_tiles.weight": "pre_tile_positional_embedding.embedding.weight",
    "pre_tiles.gate.weight": "pre_tile_positional_embedding.gate",
    "post_tiles.weight": "post_tile_positional_embedding.embedding.weight",
    "post_tiles.gate.weight": "post_tile_positional_embedding.gate",
    "norm": "layernorm_post",
    "pre_norm": "layernorm_pre",
    "class_token.weight": "class_embedding",
}

SHARED = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "patch_size": "patch_size",
    "layer_norm_eps": "eps",
}
"""Keys that mean the same in every tower: theirs, ours."""

SIZES = keyed(
    "hidden_size=768 num_hidden_layers=12 num_attention_heads=12 intermediate_size=3072 layer_norm_eps=1e-6 "
    "hidden_act='gelu_pytorch_tanh' patch_size=16"
)
STD = {"initializer_range": Key(float, 0.02, zero=True)}
FIXED = {"num_channels": 3, "attention_dropout": 0, "dropout": 0, "is_encoder_decoder": False}

NOT_OF_WEIGHTS = {"layers", "post_norm", "class_token", "mean", "std", "init_std", "image_size", "positions"}
NOT_OF_WEIGHTS |= {"max_patches", "layer_scale"}
"""Keys by which towers with the same weights may differ; the table of positions is compared separately."""


@dataclass(frozen=True)
class TowerFamily:
    """A family of towers in `transformers`.

    Attributes:
        config: our type of tower.
        keys: keys of its `config.json`.
        architecture: class of `transformers`; empty if the tower has no model class of its own.
        whole: `model_type` of models with a text tower that have it as `vision_config`.
        names: names of modules and parameters, ours to theirs.
        more: reads keys besides the shared ones.
        write: writes keys besides the shared ones.
        ignored: beginnings of names of their tensors that the features do not need.
        shared: keys with the same meaning, theirs to ours.
    """

    config: type[TowerConfig]
    keys: Keys
    architecture: str
    whole: str
    more: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=lambda: PRE)
    ignored: tuple[str, ...] = ("head.", "embeddings.position_ids")
    shared: Mapping[str, str] = field(default_factory=lambda: SHARED)

    @property
    def model_type(self) -> str:
        """The `model_type` in its `config.json`."""
        return self.keys.kind


def _gelu(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return activation and hidden width of most towers.

    Raises:
        ModelError: an unknown activation.
    """
    if full["hidden_act"] not in ACTIVATIONS:
        raise ModelError(f"hidden_act = {full['hidden_act']!r}; expected one of {', '.join(ACTIVATIONS)}")
    found = {"activation": ACTIVATIONS[full["hidden_act"]]}
    return found | ({"ffn_dim": full["intermediate_size"]} if "intermediate_size" in full else {})


def _act(config: TowerConfig) -> dict[str, Any]:
    return {"hidden_act": THEIRS[config.activation], "intermediate_size": config.ffn_dim or 4 * config.dim}


def _fixed_size(full: Mapping[str, Any]) -> dict[str, Any]:
    std = {"init_std": full["initializer_range"]} if "initializer_range" in full else {}
    return _gelu(full) | {"image_size": full["image_size"], "positions": None} | std


def _write_fixed(config: Any) -> dict[str, Any]:
    return _act(config) | {"image_size": config.position_side * config.patch_size} | _image(config)


def _image(config: Any) -> dict[str, Any]:
    """Return the size of the images, unless the table of positions has another size."""
    return {"image_size": config.image_size} if config.position_side == config.side else {}


def _read_siglip2(full: Mapping[str, Any]) -> dict[str, Any]:
    side = isqrt(full["num_patches"])
    if side * side != full["num_patches"]:
        raise ModelError(f"num_patches = {full['num_patches']}, expected a square number")
    return _gelu(full) | {"positions": side, "max_patches": full["num_patches"]}


def _read_dinov2(full: Mapping[str, Any]) -> dict[str, Any]:
    hidden = full["hidden_size"] * full["mlp_ratio"]
    if full["use_swiglu_ffn"]:
        hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
    return _fixed_size(full) | {
        "ffn_dim": hidden,
        "ffn_type": "swiglu" if full["use_swiglu_ffn"] else "mlp",
        "qkv_bias": full["qkv_bias"],
        "layer_scale": full["layerscale_value"],
    }


def _write_dinov2(config: Any) -> dict[str, Any]:
    hidden, swiglu = config.ffn().hidden(config.dim), config.ffn_type == "swiglu"
    for ratio in range(1, hidden // config.dim * 2 + 2):
        written = {"hidden_size": config.dim, "mlp_ratio": ratio, "use_swiglu_ffn": swiglu}
        if _hidden(written) == hidden:
            break
    else:
        raise ModelError(
            f"encoder.ffn_dim = {hidden} is no multiple of dim = {config.dim} as DINOv2 has them"
        )
    act = {name: value for name, value in _write_fixed(config).items() if name != "intermediate_size"}
    return act | written | {"qkv_bias": config.qkv_bias, "layerscale_value": config.layer_scale}


def _hidden(written: Mapping[str, Any]) -> int:
    filler = {"hidden_act": "gelu", "image_size": 1, "qkv_bias": True, "layerscale_value": 1.0}
    return _read_dinov2(filler | dict(written))["ffn_dim"]


def _read_mllama(full: Mapping[str, Any]) -> dict[str, Any]:
    layers = [layer % full["num_hidden_layers"] + 1 for layer in full["intermediate_layers_indices"]]
    width, tiles = full["hidden_size"] * (1 + len(layers)), full["max_num_tiles"]
    shapes, canvases = full["supported_aspect_ratios"], canvases_of(tiles)
    if shapes is not None and [tuple(one) for one in shapes] != canvases:
        raise ModelError(f"supported_aspect_ratios = {shapes}; expected all of {tiles} tiles")
    if full["vision_output_dim"] != width:
        raise ModelError(f"vision_output_dim = {full['vision_output_dim']}; the features are {width} wide")
    more = {"layers": layers, "max_tiles": tiles, "global_layers": full["num_global_layers"]}
    return _fixed_size(full) | more


def _write_mllama(config: MllamaTowerConfig) -> dict[str, Any]:
    return _write_fixed(config) | {
        "intermediate_layers_indices": [layer - 1 for layer in config.chosen_layers],
        "max_num_tiles": config.max_tiles,
        "num_global_layers": config.global_layers,
        "supported_aspect_ratios": [list(one) for one in config.canvases],
        "vision_output_dim": config.width,
    }


_CLIP = SIZES | STD | keyed("image_size=224 patch_size=32 hidden_act='quick_gelu' layer_norm_eps=1e-5")
_IDEFICS3 = SIZES | STD | keyed("hidden_size=1152 num_attention_heads=16 image_size=224 patch_size=32")
_DINOV2 = STD | keyed(
    "hidden_size=768 num_hidden_layers=12 num_attention_heads=12 layer_norm_eps=1e-6 hidden_act='gelu' "
    "image_size=224 patch_size=14 mlp_ratio=4 qkv_bias=True layerscale_value=1.0 use_swiglu_ffn=False"
)
_MLLAMA = STD | keyed(
    "hidden_size=1280 num_hidden_layers=32 attention_heads=16 intermediate_size=5120 norm_eps=1e-5 "
    "hidden_act='gelu' patch_size=14 image_size=448 num_global_layers=8 vision_output_dim=7680 "
    "max_num_tiles=4 intermediate_layers_indices=[3,7,15,23,30] supported_aspect_ratios:list"
)
_RENAMED = {"num_attention_heads": "attention_heads", "layer_norm_eps": "norm_eps"}
_OUTSIDE = ("projection_dim", "initializer_factor", "vision_use_head", "vocab_size", "tie_word_embeddings")
_BACKBONE = ("out_features", "out_indices", "stage_names", "apply_layernorm", "reshape_hidden_states")
_NO_DROP = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "drop_path_rate": 0}

TOWERS: tuple[TowerFamily, ...] = (
    TowerFamily(
        CLIPConfig,
        Keys("clip_vision_model", _CLIP, FIXED, _OUTSIDE),
        "CLIPVisionModel",
        "clip",
        _fixed_size,
        _write_fixed,
    ),
    TowerFamily(
        SiglipConfig,
        Keys(
            "siglip_vision_model",
            SIZES | keyed("image_size=224"),
            FIXED,
            (*_OUTSIDE, "num_image_tokens", "projector_hidden_act"),
        ),
        "SiglipVisionModel",
        "siglip",
        _fixed_size,
        lambda config: _write_fixed(config) | {"vision_use_head": False},
    ),
    TowerFamily(
        Siglip2Config,
        Keys("siglip2_vision_model", SIZES | keyed("num_patches=256"), FIXED, _OUTSIDE),
        "Siglip2VisionModel",
        "siglip2",
        _read_siglip2,
        lambda config: _act(config) | {"num_patches": config.positions**2, "vision_use_head": False},
    ),
    TowerFamily(
        Dinov2Config,
        Keys("dinov2", _DINOV2, FIXED | _NO_DROP, (*_OUTSIDE, *_BACKBONE, "use_mask_token")),
        "Dinov2Model",
        "",
        _read_dinov2,
        lambda config: _write_dinov2(config) | {"use_mask_token": False},
        DINOV2,
        ("embeddings.mask_token",),
    ),
    TowerFamily(
        Idefics3TowerConfig,
        Keys("idefics3_vision", _IDEFICS3, FIXED, (*_OUTSIDE, "size", "max_image_size", "use_base_siglip")),
        "",
        "",
        _fixed_size,
        _write_fixed,
    ),
    TowerFamily(
        MllamaTowerConfig,
        Keys(
            "mllama_vision_model",
            _MLLAMA,
            FIXED,
            ("vision_input_dim", "projection_dim", "max_aspect_ratio_id"),
        ),
        "MllamaVisionModel",
        "",
        _read_mllama,
        _write_mllama,
        MLLAMA,
        shared={_RENAMED.get(theirs, theirs): ours for theirs, ours in SHARED.items()},
    ),
)


def tower_family(encoder: EncoderConfig) -> TowerFamily:
    """Return the family of a tower.

    Raises:
        ModelError: `transformers` has no such tower.
    """
    for family in TOWERS:
        if type(encoder) is family.config:
            return family
    raise ModelError(f"no class of transformers computes the tower of a {type(encoder).__name__}")


def tower_from_hf(hf: Mapping[str, Any]) -> TowerConfig:
    """Return the tower that a `config.json` describes, of the tower alone or of a model with text and tower.

    Raises:
        ModelError: an unknown model type, or keys that cannot be read; lists them all.
    """
    kind, table = hf.get("model_type"), hf
    for family in TOWERS:
        if kind == family.whole and family.whole:
            table = hf.get("vision_config") or {}
            if (tower := table.get("model_type", family.model_type)) != family.model_type:
                raise ModelError(f"a {kind} with a tower {tower!r}; expected {family.model_type}")
        elif kind != family.model_type:
            continue
        full = family.keys.full(table)
        given = {ours: full[theirs] for theirs, ours in family.shared.items()} | family.more(full)
        try:
            return family.config(**given)
        except ValueError as error:
            raise ModelError(f"this config.json of a {kind} cannot be read: {error}") from None
    known = ", ".join([*(one.model_type for one in TOWERS), *(one.whole for one in TOWERS if one.whole)])
    raise ModelError(f"given model_type {kind!r}; expected one of {known}")


def tower_tree(kind: type[TowerConfig], folder: str) -> dict[str, Any]:
    """Return the keys of `[model.encoder]` for the tower in a folder, with all defaults filled in.

    Raises:
        ModelError: there is no `config.json`, it cannot be read, or it has a tower of another type.
    """
    tower = tower_from_hf(read_config(folder))
    if type(tower) is not kind:
        raise ModelError(
            f"encoder.from = {folder!r} holds a {type(tower).__name__}; expected a {kind.__name__}"
        )
    return {key: value for key, value in plain(tower).items() if key not in ("type", "from")}


def tower_to_hf(encoder: EncoderConfig) -> dict[str, Any]:
    """Return the `config.json` of a tower.

    Raises:
        ModelError: `transformers` has no such tower.
    """
    family = tower_family(encoder)
    assert isinstance(encoder, TowerConfig)
    written = {theirs: getattr(encoder, ours) for theirs, ours in family.shared.items()}
    written |= family.write(encoder)
    if "initializer_range" in family.keys.keys:
        written["initializer_range"] = encoder.init_std
    named = {"architectures": [family.architecture]} if family.architecture else {}
    return named | {"model_type": family.model_type} | written


def tower_differences(encoder: EncoderConfig, other: TowerConfig) -> list[str]:
    """Return why weights of one tower do not fit another, one line per reason."""
    if type(encoder) is not type(other):
        return [f"encoder: a {type(encoder).__name__}, there a {type(other).__name__}"]
    assert isinstance(encoder, TowerConfig)
    mine, its = (_of_weights(one) for one in (encoder, other))
    return [f"encoder.{key}: {mine[key]!r}, there {its[key]!r}" for key in mine if mine[key] != its[key]]


def _of_weights(tower: TowerConfig) -> dict[str, Any]:
    found = {key: value for key, value in plain(tower).items() if key not in NOT_OF_WEIGHTS | {"type"}}
    return found | {"ffn_dim": tower.ffn().hidden(tower.dim), "positions": tower.position_side}
