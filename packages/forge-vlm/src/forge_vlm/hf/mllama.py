"""The keys of Mllama, whose text model numbers gated layers among its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_model import ModelError
from forge_model.config import DecoderConfig
from forge_model.hf.families.family import Key
from forge_model.hf.keys import Keys, keyed

from forge_vlm.config import VisionLanguageConfig
from forge_vlm.connectors.config import LinearConfig
from forge_vlm.encoders.config import TowerConfig
from forge_vlm.fusion.cross_attention_config import RESERVED, CrossAttentionConfig

_TEXT = """
    vocab_size=128256 hidden_size=4096 hidden_act='silu' num_hidden_layers=40 num_attention_heads=32
    num_key_value_heads=8 head_dim:int intermediate_size=14336 rope_parameters:object rope_scaling:object
    rope_theta=500000.0 rms_norm_eps=1e-5 max_position_embeddings=131072 initializer_range=0.02
    cross_attention_layers=[3,8,13,18,23,28,33,38]
"""
_FIXED = {"tie_word_embeddings": False, "is_encoder_decoder": False}
TEXT = Keys(
    "mllama_text_model",
    keyed(_TEXT),
    _FIXED | {"dropout": 0, "attention_bias": False, "mlp_bias": False},
)
WHOLE = Keys(
    "mllama",
    {"image_token_index": Key(int, 128256, zero=True)},
    _FIXED,
    ("vision_config", "text_config"),
)


def blocks_of(gated: list[int], layers: int) -> list[int]:
    """Return our blocks that follow their gated layers; `layers` counts both kinds.

    Raises:
        ModelError: a gated layer does not come before a layer of the other kind.
    """
    texts = [layer for layer in range(layers) if layer not in gated]
    if wrong := [layer for layer in gated if layer + 1 not in texts]:
        raise ModelError(f"cross_attention_layers {wrong} of {layers} do not stand before a layer of text")
    return [texts.index(layer + 1) for layer in sorted(gated)]


def dense(table: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the table of their text model to that of a Llama without gated layers."""
    full = TEXT.full(table)
    gated, width = full.pop("cross_attention_layers"), full["hidden_size"] // full["num_attention_heads"]
    if full["head_dim"] not in (None, width):
        raise ModelError(f"head_dim = {full['head_dim']}; the heads of mllama are {width} wide")
    return full | {"model_type": "llama", "num_hidden_layers": full["num_hidden_layers"] - len(gated)}


def read(full: Mapping[str, Any], tower: TowerConfig, decoder: DecoderConfig) -> VisionLanguageConfig:
    """See `WholeFamily.read`."""
    text, image = TEXT.full(full["text_config"]), full["image_token_index"]
    if not decoder.vocab_size <= image < decoder.vocab_size + RESERVED:
        raise ModelError(
            f"image_token_index = {image}; expected one of the {RESERVED} behind the {decoder.vocab_size} of "
            "the vocabulary"
        )
    if not text["cross_attention_layers"]:
        raise ModelError("cross_attention_layers = []: nothing would look at images; expected at least one")
    blocks = blocks_of(text["cross_attention_layers"], text["num_hidden_layers"])
    tiles = getattr(tower, "max_tiles", 1)
    return VisionLanguageConfig(
        decoder=decoder,
        encoder=tower,
        connector=LinearConfig(),
        fusion=CrossAttentionConfig(
            layers=",".join(map(str, blocks)),
            max_visual_tokens=tiles * (tower.side**2 + 1),
            sees="latest",
            blind="mllama",
            place="learned",
        ),
        image_token_id=image,
    )


def write(config: VisionLanguageConfig) -> dict[str, Any]:
    """See `WholeFamily.write`."""
    fusion, decoder = config.fusion, config.decoder
    assert isinstance(decoder, DecoderConfig)
    if not isinstance(fusion, CrossAttentionConfig):
        raise ModelError(f"a {type(fusion).__name__}; mllama has gated layers of cross-attention")
    blocks = fusion.blocks(decoder.num_layers)
    text = {
        "model_type": "mllama_text_model",
        "pad_token_id": None,  # its default lies outside of small vocabularies
        "num_hidden_layers": decoder.num_layers + len(blocks),
        "cross_attention_layers": [block + before for before, block in enumerate(blocks)],
    }
    return {"text_config": text, "image_token_index": config.image_token_id or decoder.vocab_size}
