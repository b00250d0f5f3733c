"""Conversion between `[model]` and the `config.json` of vision-language models. Imports no torch.

An absent key has the default of the config class of `transformers` 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_config import plain
from forge_model import ModelError
from forge_model.config import DecoderConfig
from forge_model.decoder.compare import differences
from forge_model.hf.config import HARMLESS, config_from_hf, config_to_hf
from forge_model.hf.families.family import Key
from forge_model.hf.keys import Keys, keyed
from msgspec.structs import replace

from forge_vlm.config import VisionLanguageConfig
from forge_vlm.connectors.config import LinearConfig, MLPConnectorConfig, PixelShuffleConfig
from forge_vlm.encoders.config import TowerConfig
from forge_vlm.fusion.config import JointConfig
from forge_vlm.fusion.cross_attention_config import RESERVED, CrossAttentionConfig
from forge_vlm.hf import mllama
from forge_vlm.hf.towers import ACTIVATIONS, THEIRS, tower_differences, tower_from_hf, tower_to_hf

Full = Mapping[str, Any]
"""A table of a `config.json` with all defaults."""

_IGNORED = "neftune_noise_alpha num_image_tokens perceiver_config pixel_shuffle_factor vision_config"
TEXT_IGNORED = frozenset([*_IGNORED.split(), "transformers.js_config"])
"""Keys of a text model within another that change nothing: of training noise, of the processor, of Idefics2
in SmolVLM, of the outer table (`scale_factor`), of the base class."""

TEXT_FIXED = {"qk_layer_norms": False, "use_resampler": False}

PREFIXES = (
    ("vision_tower.", "multi_modal_projector.", "language_model.model.", "language_model."),
    ("model.vision_tower.", "model.multi_modal_projector.", "model.language_model.", ""),
)
"""Prefixes of the names of the tower, of the connector, of the language model instead of `model.`, and of
`lm_head`: first those that are written, then those of other versions."""


@dataclass(frozen=True)
class WholeFamily:
    """A family of vision-language models in `transformers`.

    Attributes:
        architecture: class of `transformers`.
        keys: keys of its `config.json`, except `vision_config` and `text_config`.
        towers: its possible types of towers, beginning with the default.
        connector: names of modules of the connector, ours to theirs.
        read: converts keys with all defaults, the tower and the decoder to the model.
        write: converts a model to the values of keys.
        image_token: the key for the id of the token at image places.
        dense: converts the table of its language model to one that forge-model reads.
        aliases: other values of `model_type`.
        tower_aliases: names of towers inside its `config.json` that differ from their own.
        prefixes: see `PREFIXES`.
        caps_logits: whether its class applies `final_logit_softcapping` of its language model, as the classes
            of Gemma do; others have their own head, without it.
    """

    architecture: str
    keys: Keys
    towers: tuple[str, ...]
    connector: Mapping[str, str]
    read: Callable[[Full, TowerConfig, DecoderConfig], VisionLanguageConfig]
    write: Callable[[VisionLanguageConfig], dict[str, Any]]
    image_token: str = "image_token_index"
    dense: Callable[[Full], dict[str, Any]] = lambda table: {"model_type": "llama", **table}
    aliases: tuple[str, ...] = ()
    tower_aliases: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[tuple[str, str, str, str], ...] = PREFIXES
    caps_logits: bool = False

    @property
    def kind(self) -> str:
        """The `model_type` that is written."""
        return self.keys.kind


def _read_llava(full: Full, tower: TowerConfig, decoder: DecoderConfig) -> VisionLanguageConfig:
    strategy, layers, act = (
        full[key]
        for key in ("vision_feature_select_strategy", "vision_feature_layer", "projector_hidden_act")
    )
    listed = layers if isinstance(layers, list) and layers else [layers]
    if any(type(one) is not int for one in listed):
        raise ModelError(f"vision_feature_layer = {layers!r}; expected a number, or a list of numbers")
    if act not in ACTIVATIONS:
        raise ModelError(f"projector_hidden_act = {act!r}; expected one of {', '.join(ACTIVATIONS)}")
    if strategy not in (("default", "full") if tower.has_class_token else ("full",)):
        raise ModelError(
            f"vision_feature_select_strategy = {strategy!r}; expected 'full', or 'default' with a tower that "
            "has a class token to be left out"
        )
    options = {"class_token": strategy == "full"} if tower.has_class_token else {}
    tower = replace(tower, layers=layers, **options)
    return VisionLanguageConfig(
        decoder=decoder,
        encoder=replace(tower, post_norm=False) if tower.normalizes else tower,
        connector=MLPConnectorConfig(bias=full["multimodal_projector_bias"], activation=ACTIVATIONS[act]),  # type: ignore[arg-type]
        image_token_id=full["image_token_index"],
    )


def _write_llava(config: VisionLanguageConfig) -> dict[str, Any]:
    connector, encoder = config.connector, config.encoder
    assert isinstance(encoder, TowerConfig)
    return {
        "image_seq_length": config.image_tokens,
        "multimodal_projector_bias": getattr(connector, "bias", True),
        "projector_hidden_act": THEIRS[getattr(connector, "activation", "gelu")],
        "vision_feature_layer": encoder.layers,
        "vision_feature_select_strategy": "default" if encoder.has_class_token > encoder.extra else "full",
    }


def _read_paligemma(full: Full, tower: TowerConfig, decoder: DecoderConfig) -> VisionLanguageConfig:
    if full["projection_dim"] != decoder.dim:
        raise ModelError(f"projection_dim = {full['projection_dim']}; the decoder is {decoder.dim} wide")
    return VisionLanguageConfig(
        decoder=decoder,
        encoder=tower,
        connector=LinearConfig(),
        fusion=JointConfig(attention="prefix"),
        image_token_id=full["image_token_index"],
    )


def _dense_gemma(text: Full) -> dict[str, Any]:
    text = {"model_type": "gemma", **text}
    if text.pop("use_bidirectional_attention", None) is False:
        raise ModelError("text_config.use_bidirectional_attention = False, only True can be read")
    return text


def _read_idefics3(full: Full, tower: TowerConfig, decoder: DecoderConfig) -> VisionLanguageConfig:
    if tower.side % (window := full["scale_factor"]):
        raise ModelError(f"scale_factor = {window} does not divide the {tower.side} patches of a side")
    connector = PixelShuffleConfig(window=window)
    return VisionLanguageConfig(
        decoder=decoder, encoder=tower, connector=connector, image_token_id=full["image_token_id"]
    )


_SMOL = ("_pad_token_id", "transformers.js_config", "use_reentrant_checkpointing")
_SEEN_ELSEWHERE = ("vision_config", "text_config", "vocab_size", "_vocab_size", "hidden_size")
_FIXED = {"is_encoder_decoder": False}
_LLAVA = keyed(
    "projector_hidden_act='gelu' vision_feature_select_strategy='default' multimodal_projector_bias=True "
    "tie_word_embeddings=False"
)
_LLAVA |= {"image_token_index": Key(int, 32000, zero=True), "vision_feature_layer": Key(object, -2)}
_PALIGEMMA = keyed("projection_dim=2048 tie_word_embeddings=True")
_PALIGEMMA |= {"image_token_index": Key(int, 256000, zero=True)}
_IDEFICS3 = keyed("scale_factor=2 tie_word_embeddings=False")
_IDEFICS3 |= {"image_token_id": Key(int, 128257, zero=True)}

WHOLE: tuple[WholeFamily, ...] = (
    WholeFamily(
        "LlavaForConditionalGeneration",
        Keys("llava", _LLAVA, _FIXED, (*_SEEN_ELSEWHERE, "image_seq_length")),
        ("clip_vision_model", "siglip_vision_model", "dinov2"),
        {"up": "linear_1", "down": "linear_2"},
        _read_llava,
        _write_llava,
    ),
    WholeFamily(
        "PaliGemmaForConditionalGeneration",
        Keys("paligemma", _PALIGEMMA, _FIXED, _SEEN_ELSEWHERE),
        ("siglip_vision_model",),
        {"project": "linear"},
        _read_paligemma,
        lambda config: {
            **dict.fromkeys(("projection_dim", "hidden_size"), config.fused_decoder().dim),
            "text_config": {"use_bidirectional_attention": True},
        },
        dense=_dense_gemma,
        caps_logits=True,
    ),
    WholeFamily(
        "Idefics3ForConditionalGeneration",
        Keys("idefics3", _IDEFICS3, _FIXED, (*_SEEN_ELSEWHERE, *_SMOL)),
        ("idefics3_vision",),
        {"projection.project": "modality_projection.proj"},
        _read_idefics3,
        lambda config: {"scale_factor": getattr(config.connector, "window", 1)},
        image_token="image_token_id",
        aliases=("smolvlm",),
        tower_aliases=dict.fromkeys(("idefics3", "smolvlm", "smolvlm_vision"), "idefics3_vision"),
        prefixes=(("model.vision_model.", "model.connector.", "model.text_model.", ""),),
    ),
    WholeFamily(
        "MllamaForConditionalGeneration",
        mllama.WHOLE,
        ("mllama_vision_model",),
        {"project": ""},
        mllama.read,
        mllama.write,
        dense=mllama.dense,
        prefixes=tuple((tower.replace("tower", "model"), *rest) for tower, *rest in PREFIXES),  # type: ignore[misc]
    ),
)


def whole_family(model_type: Any) -> WholeFamily:
    """Return the family of that name.

    Raises:
        ModelError: there is none.
    """
    known = {name: family for family in WHOLE for name in (family.kind, *family.aliases)}
    if model_type not in known:
        raise ModelError(f"given model_type {model_type!r}; expected one of {', '.join(known)}")
    return known[model_type]


def model_from_hf(hf: Mapping[str, Any]) -> VisionLanguageConfig:
    """Return the model that a `config.json` describes.

    Raises:
        ModelError: an unknown model type, or keys that cannot be read.
    """
    family = whole_family(hf.get("model_type"))
    full = family.keys.full(hf)
    vision, text = (hf.get(name) for name in ("vision_config", "text_config"))
    if not vision or not text:
        raise ModelError(f"a {family.kind} without a vision_config or text_config; write their keys out")
    try:
        tower = _tower(family, vision)
        decoder = _decoder(family, text, full.get("tie_word_embeddings", False))
        return family.read(full | {"text_config": text}, tower, decoder)
    except ValueError as error:
        raise ModelError(f"this config.json of a {family.kind} cannot be read: {error}") from None


def _tower(family: WholeFamily, table: Mapping[str, Any]) -> TowerConfig:
    kind = table.get("model_type", family.towers[0])
    if (kind := family.tower_aliases.get(kind, kind)) not in family.towers:
        raise ModelError(f"a tower {kind!r}; expected one of {', '.join(family.towers)}")
    return tower_from_hf({**table, "model_type": kind})


def _decoder(family: WholeFamily, table: Mapping[str, Any], is_tied: bool) -> DecoderConfig:
    text = family.dense({key: one for key, one in table.items() if key not in TEXT_IGNORED})
    for name, value in TEXT_FIXED.items():
        if text.pop(name, None) not in (None, value):
            raise ModelError(f"text_config.{name} = {table[name]!r}, only {value!r} can be read")
    if family.kind == "llava":
        is_tied = is_tied or bool(text.get("tie_word_embeddings"))
    try:
        decoder = config_from_hf(text | {"tie_word_embeddings": is_tied})
    except ModelError as error:
        raise ModelError(f"text_config: {error}") from None
    return decoder if family.caps_logits else replace(decoder, logit_softcap=None)


def model_to_hf(config: VisionLanguageConfig) -> tuple[WholeFamily, dict[str, Any]]:
    """Return the family that can hold a model, and its `config.json`.

    Raises:
        ModelError: none can; the message names the differences to the nearest one.
    """
    obstacles = dict[str, list[str]]()
    for family in WHOLE:
        try:
            written = _written(family, config)
            found = model_differences(config, model_from_hf(written))
        except ModelError as error:
            found = [str(error)]
        if not found:
            _require_image_token(family.kind, config)
            return family, written
        obstacles[family.kind] = found
    fewest = min(map(len, obstacles.values()))
    nearest = [f"\n  {name}: {'; '.join(of)}" for name, of in obstacles.items() if len(of) == fewest]
    raise ModelError(f"no Hugging Face class can hold this model; what stands in the way:{''.join(nearest)}")


def _require_image_token(kind: str, config: VisionLanguageConfig) -> None:
    token, end = config.image_token_id, config.vocab_size + RESERVED * (kind == "mllama")
    if token is None or token >= end:
        first = config.vocab_size if kind == "mllama" else 0
        raise ModelError(
            f"a {kind} has a token at the places of images, and model.image_token_id = {token}; give its id "
            f"in the tokenizer, from {first} to {end - 1}"
        )


def _written(family: WholeFamily, config: VisionLanguageConfig) -> dict[str, Any]:
    assert isinstance(config.decoder, DecoderConfig)
    text = {
        key: value
        for key, value in config_to_hf(config.decoder).items()
        if value is not None or key not in HARMLESS  # such as ids of tokens, which may not be null there
    }
    text |= {"tie_word_embeddings": config.decoder.tie_embeddings}
    return {
        "architectures": [family.architecture],
        "model_type": family.kind,
        "vision_config": tower_to_hf(config.encoder),
        "tie_word_embeddings": config.decoder.tie_embeddings,
        family.image_token: config.image_token_id or 0,
        **(more := family.write(config)),
        "text_config": text | more.get("text_config", {}),
    }


def model_differences(config: VisionLanguageConfig, other: VisionLanguageConfig) -> list[str]:
    """Return why one model with the weights of another computes something else, one line per reason."""
    assert isinstance(config.decoder, DecoderConfig) and isinstance(other.decoder, DecoderConfig)
    assert isinstance(other.encoder, TowerConfig)
    lines = [f"decoder.{line}" for line in differences(config.decoder, other.decoder)]
    if found := tower_differences(config.encoder, other.encoder):
        return lines + found
    mine, its = _outside(config), _outside(other)
    return lines + [f"{key}: {mine[key]!r}, there {its[key]!r}" for key in mine if mine[key] != its[key]]


def _outside(config: VisionLanguageConfig) -> dict[str, Any]:
    """Return what else decides the result, besides tower and decoder weights, with defaults resolved."""
    encoder, connector = config.encoder, config.connector
    assert isinstance(encoder, TowerConfig)
    found = {"type": type(connector).__name__} | plain(connector)
    if isinstance(connector, MLPConnectorConfig):
        found["hidden"] = connector.hidden or config.fused_decoder().dim
    return {
        "encoder.layers": [layer % (encoder.num_layers + 1) for layer in encoder.chosen_layers],
        "encoder.post_norm": encoder.normalizes,
        "encoder.class_token": bool(encoder.extra),
        "encoder.side": encoder.side,
        "connector": found,
        "fusion": _fusion(config),
        "positions": config.positions,
    }


def _fusion(config: VisionLanguageConfig) -> dict[str, Any]:
    fusion, decoder = config.fusion, config.fused_decoder()
    found = {"type": type(fusion).__name__} | plain(fusion)
    if not isinstance(fusion, CrossAttentionConfig):
        return found
    blocks = fusion.blocks(decoder.num_layers)
    layers = [(decoder.layer(block), decoder.layer(block).block) for block in blocks]
    heads = [plain(block.attention(layer, decoder.dim)) for layer, block in layers]  # type: ignore[attr-defined]
    ffns = [plain(block.feed_forward(layer).resolved(decoder.dim)) for layer, block in layers]  # type: ignore[attr-defined]
    kept = {key: found[key] for key in ("type", "sees", "blind", "place")}
    return kept | {"layers": blocks, "heads": heads, "ffn": ffns}
