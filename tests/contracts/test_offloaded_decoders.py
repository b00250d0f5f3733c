"""Decoders whose activations are offloaded beside what is computed: the same gradients, and no race."""

import pytest
import torch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import LatentConfig, MoEConfig, SigmoidRouterConfig
from forge_parallel.offload import Offload
from played_streams import Played

ROUTER = SigmoidRouterConfig(sequence_balance_weight=0.1)
PARTS = {
    "dense": {},
    "experts": {"ffn": MoEConfig(num_experts=4, top_k=2, dim=32, router=ROUTER, shared_experts=1)},
    "latent": {"attention": LatentConfig(num_heads=2, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)},
}


@pytest.mark.parametrize("name", PARTS)
def test_offloaded_decoder_has_the_same_gradients_and_no_race(name):
    model = DecoderConfig(vocab_size=64, dim=64, num_layers=4, max_tokens=32, **PARTS[name]).build()
    initialize(model, 0)
    for module in model.modules():
        if hasattr(module, "_fused"):
            module._fused = False  # as on a GPU, where all experts are one product
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))

    def gradients() -> list[torch.Tensor]:
        model(tokens, labels=tokens, loss_fn=LossConfig().build()).total.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    plain, streams = gradients(), Played()
    way = Offload(lambda device: streams)
    for index, block in enumerate(model.layers.values()):
        way.apply(block, index == 0)
    for _ in range(2):
        with streams:
            found = gradients()
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert streams.copied > 0 and not streams.races
