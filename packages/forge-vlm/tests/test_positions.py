"""Positions of visual tokens in a model: the decoder of Qwen2.5-VL, and generation with a cache."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from forge_model import DecoderConfig, from_hf, initialize
from forge_model.attention.rope_config import MultiAxisRopeConfig, RopeConfig
from forge_model.config import GroupedQueryConfig, RMSNormConfig, SwiGLUConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.images.positions import position_offsets
from msgspec import structs
from torch.overrides import TorchFunctionMode

LAYOUT = [0, 1, 1, 1, 1, 1, 1, 0, 0, 2, 2, 0, 0, 0]
"""Images of 2 x 3 and 1 x 2 visual tokens, and text around them."""
GRIDS = [[(1, 2, 3)], [(1, 1, 2)]]


def offsets(kind):
    images = np.array(LAYOUT)
    places = np.where(images > 0, (images > 0).cumsum(), 0)
    found = position_offsets(kind, places, images, GRIDS, np.zeros_like(images))["position_offsets"]
    return torch.from_numpy(found)[None]


class Widened(TorchFunctionMode):
    """Code that asks for float32 gets float64: transformers rotates in float32 whatever the model is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("heads", "kv", "width", "sections"),
    [(4, 2, 16, (2, 3, 3)), (3, 1, 12, (4, 1, 1)), (2, 2, 24, (3, 4, 5))],
)
def test_decoder_is_that_of_qwen2_5_vl(heads, kv, width, sections, dtype):
    qwen = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(sections)}
    text = qwen.Qwen2_5_VLTextConfig(
        vocab_size=50,
        hidden_size=heads * width,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        rope_parameters=rope,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    theirs = qwen.Qwen2_5_VLTextModel(text).to(dtype).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plain = DecoderConfig(
        vocab_size=50,
        dim=heads * width,
        num_layers=3,
        max_tokens=64,
        attention=GroupedQueryConfig(num_heads=heads, num_kv_heads=kv, bias=True),
        ffn=SwiGLUConfig(dim=40),
        norm=RMSNormConfig(eps=text.rms_norm_eps),
        rope=RopeConfig(theta=5000.0),
        tie_embeddings=True,
    )
    rotated = structs.replace(plain, rope=MultiAxisRopeConfig(theta=5000.0, sections=sections))
    ours = rotated.build().to(dtype)
    named = {f"model.{name}": value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(dict(from_hf(named, plain)), strict=False)
    embeddings = torch.randn(1, len(LAYOUT), heads * width, dtype=dtype)
    at = offsets("grid") + torch.arange(len(LAYOUT))
    with Widened() if dtype == torch.float64 else nullcontext():
        # the frequencies are a buffer that was made in float32
        theirs.rotary_emb = qwen.Qwen2_5_VLRotaryEmbedding(text)
        expected = theirs(inputs_embeds=embeddings, position_ids=at.transpose(0, 1)).last_hidden_state
    expected = expected @ theirs.embed_tokens.weight.T
    found = ours(torch.zeros(1, len(LAYOUT), dtype=torch.int64), hidden=embeddings, positions=at)
    atol = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["image", "grid"])
def test_cached_generation_goes_on_behind_the_positions_of_images(kind):
    decoder = DecoderConfig(
        vocab_size=31,
        dim=32,
        num_layers=2,
        max_tokens=64,
        attention=GroupedQueryConfig(num_heads=2),
        rope=MultiAxisRopeConfig(sections=(4, 2, 2)),
    )
    encoder = ViTConfig(image_size=8, patch_size=4, dim=16, num_heads=2)
    model = VisionLanguageConfig(decoder=decoder, encoder=encoder, positions=kind).build()
    initialize(model, 0)
    model = model.double()
    tokens = torch.randint(31, (1, 20))
    images = np.zeros(20, dtype=np.int64)
    images[2:6] = 1
    places = np.where(images > 0, images.cumsum(), 0)
    moved = position_offsets(kind, places, images, [[(1, 2, 2)]], np.zeros_like(images))["position_offsets"]
    given = {
        "patches": torch.randint(256, (4, 48), dtype=torch.uint8),
        "grids": torch.tensor([[1, 2, 2]]),
        "image_index": torch.from_numpy(places)[None],
        "image_places": torch.tensor([4]),
        "position_offsets": torch.from_numpy(moved)[None],
    }
    expected = model(tokens, **given)
    cache = model.new_cache(20, None, torch.device("cpu"))
    prompt = given | {name: given[name][..., :9] for name in ("image_index", "position_offsets")}
    logits = [model.begin(tokens[:, :9], cache, **prompt)]
    for token in tokens[0, 9:]:
        logits.append(model.writer(token[None, None], cache=cache, last_logits=1)[:, -1])
    torch.testing.assert_close(torch.stack(logits, 1), expected[:, 8:], rtol=0, atol=1e-12)
    apart = model(tokens, **{name: value for name, value in given.items() if name != "position_offsets"})
    assert not torch.allclose(apart, expected)
