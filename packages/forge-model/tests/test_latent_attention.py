"""What a cache of latent attention holds, and that decoding from it changes nothing."""

import pytest
import torch
from forge_model import DecoderConfig, initialize
from forge_model.attention.cache import Cache
from forge_model.config import LatentConfig

LATENT = LatentConfig(num_heads=3, kv_rank=10, q_rank=14, nope_dim=6, rope_dim=8, value_dim=5)


def build():
    config = DecoderConfig(vocab_size=41, dim=24, num_layers=2, max_tokens=48, init_std=0.3, attention=LATENT)
    model = config.build()
    initialize(model, 0)
    return model.double().eval()


@pytest.mark.parametrize("portions", [[5, 1, 1, 4], [1, 10], [11]])
@torch.no_grad()
def test_absorbed_decoding_equals_the_full_forward_pass(portions):
    model, tokens = build(), torch.randint(41, (2, 11))
    cache = Cache(2, 11, padding=torch.zeros(2, dtype=torch.long))
    parts = [model(part, cache=cache) for part in tokens.split(portions, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_cache_keeps_a_latent_and_one_rotated_key_a_token():
    model, cache = build(), Cache(2, 11, padding=torch.zeros(2, dtype=torch.long))
    model(torch.randint(41, (2, 7)), cache=cache)
    layer = cache.layers[0]
    assert (layer._key.shape, layer._value.shape) == ((2, 1, 11, 10), (2, 1, 11, 8))


def test_rotated_widths_are_even():
    with pytest.raises(ValueError, match="rope_dim = 5 is odd"):
        LatentConfig(rope_dim=5)
