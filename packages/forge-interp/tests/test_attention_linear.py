"""A softmax over features is no pattern; one of scores of queries and keys is, however they are made."""

from collections.abc import Callable

import pytest
import torch
from forge_interp import InterpError, capture, each_attention, edit
from torch import Tensor, nn

NAMES = ("scores", "pattern", "v", "z", "entropy")
X = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
GAIN = torch.tensor([2.0, 3.0])[:, None, None]


def by_bmm(k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(k.flatten(0, 1).mT, v.flatten(0, 1)).view(2, 2, 4, 4)


CONTEXTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda k, v: k.mT @ v,
    "einsum": lambda k, v: torch.einsum("bnsd,bnse->bnde", k, v),
    "einsum of a list": lambda k, v: torch.einsum("bnsd,bnse->bnde", [k, v]),
    "bmm": by_bmm,
    "baddbmm": lambda k, v: torch.baddbmm(torch.zeros(4, 4, 4), k.flatten(0, 1).mT, v.flatten(0, 1)).view(
        2, 2, 4, 4
    ),
    "divided": lambda k, v: (k.mT @ v) / 2,
    "gain on the left": lambda k, v: GAIN * (k.mT @ v),
    "torch.mul": lambda k, v: torch.mul(GAIN, k.mT @ v),
    "mT": lambda k, v: (v.mT @ k).mT,
    "transpose": lambda k, v: (v.mT @ k).transpose(-1, -2),
    "outer product": lambda k, v: (k[..., None] * v[..., None, :]).sum(2),
    "norm": lambda k, v: nn.functional.layer_norm(k.mT @ v, (4,)),
    "stack": lambda k, v: torch.stack([x.mT @ y for x, y in zip(k.unbind(1), v.unbind(1), strict=True)], 1),
}


def rotated(q: Tensor) -> Tensor:
    """By position, as in Llama."""
    angles = torch.arange(12.0)[:, None] @ torch.tensor([[1.0, 0.1, 1.0, 0.1]])
    return q * angles.cos() + torch.cat([-q[..., 2:], q[..., :2]], -1) * angles.sin()


QUERIES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "linear": lambda model, x: nn.functional.linear(x, model.q).unflatten(-1, (2, 4)).transpose(1, 2),
    "product": lambda model, x: (x @ model.q.mT).unflatten(-1, (2, 4)).transpose(1, 2),
    "of a cast weight": lambda model, x: x[:, None] @ model.q.view(2, 4, 8).mT.double().float(),
    "einsum": lambda model, x: torch.einsum("btd,nhd->bnth", x, model.q.view(2, 4, 8)),
    "rotated": lambda model, x: rotated(QUERIES["linear"](model, x)),
    "normed": lambda model, x: nn.functional.rms_norm(QUERIES["linear"](model, x), (4,), model.q[0, :4]),
}


class Linear(nn.Module):
    """softmax(q) (softmax(k)^T v), twice: Shen et al. 2018, arXiv:1812.01243."""

    def __init__(self, context: str = "matmul", queries: str = "linear") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 16)
        self.context, self.queries = CONTEXTS[context], QUERIES[queries]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
            q = self.queries(self, x).softmax(-1)
            x = x + (q @ self.context(k.softmax(-2), v)).transpose(1, 2).flatten(2)
        return x


class KeysFirst(nn.Module):
    """softmax(k^T) v, whose softmax is over tokens, for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return (q @ (k.mT.softmax(-1) @ v)).transpose(1, 2).flatten(2)


MODELS = (
    {f"context by {how}": lambda how=how: Linear(context=how) for how in CONTEXTS}
    | {f"queries by {how}": lambda how=how: Linear(queries=how) for how in QUERIES}
    | {"keys first": KeysFirst}
)


@pytest.mark.parametrize("case", MODELS)
def test_a_softmax_over_features_is_not_seen(case: str):
    model = MODELS[case]()
    with torch.no_grad():
        for name in NAMES:
            with pytest.raises(InterpError, match="captured nothing"), capture(model, f":attn.{name}"):
                model(X)
        with pytest.raises(InterpError, match="edited nothing"), edit(model, {":attn.z": torch.zeros_like}):
            model(X)
        with pytest.raises(InterpError, match="none of"), each_attention(model, "", lambda site, call: None):
            model(X)


def assigned(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.empty(2, 2, 12, 12)
    for first in (0, 6):
        scores[:, :, first : first + 6] = q[:, :, first : first + 6] @ k.mT
    return scores


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k: q @ k.mT,
    "einsum": lambda q, k: torch.einsum("bnth,bnsh->bnts", q, k),
    "einsum of a list": lambda q, k: torch.einsum("bnth,bnsh->bnts", [q, k]),
    "baddbmm": lambda q, k: (
        torch.zeros(4, 1, 12).baddbmm(batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT).view(2, 2, 12, 12)
    ),
    "outer product": lambda q, k: (q[:, :, :, None] * k[:, :, None]).sum(-1),
    "outer sum": lambda q, k: q[..., :1] + k[..., :1].mT,
    "distance": lambda q, k: -torch.cdist(q, k),
    "assigned": assigned,
    "added to": lambda q, k: torch.zeros(2, 1, 12, 12) + GAIN * (q @ k.mT),
    "in place": lambda q, k: (q @ k.mT).div_(2).masked_fill_(torch.ones(12, 12).triu(1).bool(), -1e9),
    "where": lambda q, k: torch.where(torch.ones(12, 12).tril().bool(), q @ k.mT, torch.tensor(-1e9)),
    "mixed heads": lambda q, k: nn.functional.linear(
        (q @ k.mT).permute(0, 2, 3, 1), nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    ).permute(0, 3, 1, 2),
    "clipped": lambda q, k: torch.clamp(input=q @ k.mT, min=-1),
    "stacked": lambda q, k: torch.stack([x @ y.mT for x, y in zip(q.unbind(1), k.unbind(1), strict=True)], 1),
    "learned queries": lambda q, k: nn.Parameter(torch.ones(2, 12, 4)) @ k.mT,
    "one query head": lambda q, k: (q[:, :1] @ k.mT).expand(2, 2, 12, 12),
}


class Softmax(nn.Module):
    """Values by a weight for each head, cast as under mixed precision."""

    def __init__(self, scores: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qk, self.v = nn.Linear(8, 16), nn.Parameter(torch.randn(2, 8, 4, dtype=torch.float64))
        self.scores, self.dtype = SCORES[scores], dtype

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        self.pattern, v = self.scores(q, k).softmax(-1), x[:, None].to(self.dtype) @ self.v.to(self.dtype)
        return (self.pattern.to(self.dtype) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", SCORES)
def test_a_softmax_over_keys_is_seen_with_values_of_a_cast_weight(scores: str, dtype: torch.dtype):
    model = Softmax(scores, dtype)
    with torch.no_grad(), capture(model, [":attn.pattern"]) as acts:
        model(X)
    assert acts[":attn.pattern"].shape == (2, 2, 12, 12)
    torch.testing.assert_close(acts[":attn.pattern"], model.pattern)
