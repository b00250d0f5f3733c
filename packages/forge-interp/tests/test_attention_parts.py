"""A part of the attention of a module is not taken for all of it, and attention over attention is no part."""

from collections.abc import Callable

import pytest
import torch
from forge_interp import InterpError, capture, each_attention, edit
from torch import Tensor, nn

X = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


class Stream(nn.Module):
    """Two layers over a stream [B, N, T, H] that is the values of both."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.join = join
        self.maps = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (3, 4)).transpose(1, 2)
        self.z = []
        for layer in self.maps:
            q, k = layer(x).chunk(2, -1)
            self.z.append(attend(q, k, x))
            x = self.join(x, self.z[-1])
        return x.transpose(1, 2).flatten(2)


JOINS = {
    "x + z": lambda x, z: x + z,
    "z + x": lambda x, z: z + x,
    "z - x": lambda x, z: z - x,
    "z": lambda x, z: z,
    "with a register": lambda x, z: torch.cat([torch.ones_like(z[:, :, :1]), z[:, :, 1:]], 2),
}


@pytest.mark.parametrize("join", JOINS)
def test_attention_over_what_attention_gave_is_seen(join: str):
    torch.manual_seed(0)
    model = Stream(JOINS[join])
    with torch.no_grad(), capture(model, ":attn.z") as acts:
        model(X)
    for site, z in zip((":attn.z", ":attn.z#1"), model.z, strict=True):
        torch.testing.assert_close(acts[site], z)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bnth,bnsh->bnts", q, k).softmax(-1)
    return torch.einsum("bnts,bnsh->bnth", weights, v)


def halves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attend(q[:, :, :4], k, v), by_einsum(q[:, :, 4:], k, v)


def by_assignment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    out[:, :, :4], out[:, :, 4:] = halves(q, k, v)
    return out


def by_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = halves(q, k, v)
    return nn.functional.pad(first, (0, 0, 0, 4)) + nn.functional.pad(second, (0, 0, 4, 0))


def by_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = halves(q, k, v)
    padded = nn.functional.pad(first, (0, 0, 0, 4))
    return torch.where(torch.arange(8)[:, None] < 4, padded, nn.functional.pad(second, (0, 0, 4, 0)))


def by_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = nn.functional.scaled_dot_product_attention(q[:, :, :4], k, v, scale=1.0)
    return torch.cat([first, by_einsum(q[:, :, 4:], k, v)], 2)


WAYS = {
    "assignment": by_assignment,
    "sum": by_sum,
    "where": by_where,
    "cat": lambda q, k, v: torch.cat(halves(q, k, v), 2),
    "cat of transposed": lambda q, k, v: torch.cat([x.transpose(1, 2) for x in halves(q, k, v)], 1).transpose(
        1, 2
    ),
    "stack": lambda q, k, v: torch.stack(halves(q, k, v), 2).flatten(2, 3),
    "sdpa": by_call,
}


class Heads(nn.Module):
    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.way, self.qkv = way, nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.way(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", WAYS)
def test_half_of_the_queries_is_not_taken_for_all(way: str):
    torch.manual_seed(0)
    model = Heads(WAYS[way])
    with torch.no_grad():
        torch.testing.assert_close(model(X), Heads.forward(with_way(model, attend), X))
        for what in (
            capture(model, ":attn.pattern"),
            edit(model, {":attn.z": torch.zeros_like}),
            each_attention(model, "", lambda site, call: None),
        ):
            with pytest.raises(InterpError, match="in pieces: 96 of 192 numbers"), what:
                model(X)


def with_way(model: Heads, way: Callable[..., Tensor]) -> Heads:
    other = Heads(way)
    other.load_state_dict(model.state_dict())
    return other
