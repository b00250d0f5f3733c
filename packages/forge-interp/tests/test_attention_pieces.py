"""Attention that is computed in pieces is not taken for softmax(scores) V."""

from collections.abc import Callable

import pytest
import torch
from forge_interp import InterpError, capture, each_attention, edit
from torch import Tensor, nn

NAMES = ("scores", "pattern", "v", "z", "entropy")
IDS = torch.randint(2, 30, (2, 96), generator=torch.Generator().manual_seed(0))


def bird() -> tuple[nn.Module, str]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BigBirdConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_type="block_sparse",
        block_size=8,
        num_random_blocks=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    return transformers.BigBirdModel(config).eval(), "encoder.layer.0.attention.self"


def nystrom() -> tuple[nn.Module, str]:
    transformers = pytest.importorskip("transformers")
    config = transformers.NystromformerConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        segment_means_seq_len=96,
        num_landmarks=8,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    return transformers.NystromformerModel(config).eval(), "encoder.layer.0.attention.self"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [bird, nystrom])
def test_attention_in_pieces_is_refused(make: Callable[[], tuple[nn.Module, str]], name: str):
    model, module = make()
    with torch.no_grad():
        model(IDS)
        with pytest.raises(InterpError, match="in pieces"), capture(model, f"{module}:attn.{name}"):
            model(IDS)
        if name in ("pattern", "z"):
            zeroed = edit(model, {f"{module}:attn.{name}": torch.zeros_like})
            with pytest.raises(InterpError, match="in pieces"), zeroed:
                model(IDS)
        looking = each_attention(model, module, lambda site, call: None)
        with pytest.raises(InterpError, match="in pieces"), looking:
            model(IDS)


class Chunked(nn.Module):
    """All queries in two calls, each with all keys; values by a weight for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk = nn.Embedding(30, 8), nn.Linear(8, 16)
        self.values = nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k = self.qk(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        v = x[:, None] @ self.values
        parts = [((part @ k.mT).softmax(-1) @ v) for part in q.chunk(2, 2)]
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)


def test_pieces_that_are_all_seen_are_told_apart_by_their_number():
    torch.manual_seed(0)
    model = Chunked()
    with torch.no_grad():
        plain = model(IDS)
        with capture(model, ":attn.z") as acts:
            model(IDS)
        assert list(acts) == [":attn.z", ":attn.z#1"]
        torch.testing.assert_close(
            torch.cat([acts[":attn.z"], acts[":attn.z#1"]], 2).transpose(1, 2).flatten(2), plain
        )


class Grouped(nn.Module):
    """Query heads that share keys are rows of one product; a cap on scores, and sinks."""

    def __init__(self, cap: bool, sinks: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.cap = nn.Embedding(30, 8), nn.Linear(8, 32), cap
        self.sinks = nn.Parameter(torch.randn(4)) if sinks else None

    def forward(self, ids: Tensor, zeroed: int | None = None) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (8, 4)).transpose(1, 2).split((4, 2, 2), 1)
        scores = (q.unflatten(1, (2, 2)).flatten(2, 3) @ k.mT).unflatten(2, (2, -1)).flatten(1, 2)
        scores = 2 * torch.tanh(scores / 2) if self.cap else scores
        column = [] if self.sinks is None else [self.sinks[:, None, None].expand(*scores.shape[:-1], 1)]
        weights = torch.cat([scores, *column], -1).softmax(-1)
        weights = weights if self.sinks is None else weights[..., :-1]
        self.weights = weights
        z = weights.unflatten(1, (2, 2)).flatten(2, 3) @ v
        z = z.unflatten(2, (2, -1)).flatten(1, 2)
        if zeroed is not None:
            z = z.index_fill(1, torch.tensor([zeroed]), 0)
        self.z, self.v = z, v
        return z.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_whose_query_heads_are_rows_of_one_product_is_seen(cap: bool, sinks: bool):
    torch.manual_seed(0)
    model = Grouped(cap, sinks)
    with torch.no_grad():
        with capture(model, [":attn.pattern", ":attn.z", ":attn.v"]) as acts:
            model(IDS)
        torch.testing.assert_close(acts[":attn.pattern"], model.weights)
        torch.testing.assert_close(acts[":attn.z"], model.z)
        torch.testing.assert_close(acts[":attn.v"], model.v)
        expected = model(IDS, zeroed=2)
        for name in ("z", "pattern"):
            with edit(model, {f":attn.{name}": lambda x: x.index_fill(1, torch.tensor([2]), 0)}):
                torch.testing.assert_close(model(IDS), expected)
        plain = model(IDS)
        with edit(model, {":attn.v": lambda v: v.clone()}):
            torch.testing.assert_close(model(IDS), plain)
        with edit(model, {":attn.v": lambda v: 2 * v}):
            torch.testing.assert_close(model(IDS), 2 * plain)


def test_the_advice_fits_the_model():
    class Einsum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bnts,bnsh->bnth", (x @ x.mT).softmax(-1), x)

    x = torch.randn(2, 2, 5, 4)
    with pytest.raises(InterpError, match="capture the projections") as error, capture(Einsum(), ":attn.z"):
        Einsum()(x)
    assert "Hugging Face" not in str(error.value) and "MultiheadAttention" not in str(error.value)
    many = nn.MultiheadAttention(4, 2, batch_first=True)
    with pytest.raises(InterpError, match="need_weights=False") as error, capture(many, ":attn.z"):
        many(*[torch.randn(2, 5, 4)] * 3)
    assert "set_attn_implementation" not in str(error.value)
