"""FlexAttention is seen as attention with a dense mask, or refused where more goes into its weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, attention_statistics, capture, each_attention, edit
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, N, K, T, S = 2, 4, 2, 150, 200
NAMES = ["q", "k", "v", "raw", "scores", "pattern", "z", "entropy", "lag.3"]
MASKS: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "causal": lambda b, h, q, k: q + 50 >= k,
    "by row and head": lambda b, h, q, k: (q + 50 >= k) & (k + 60 * (h + 1) > q + 30 * b),
    "some see nothing": lambda b, h, q, k: (q + 50 >= k) & (q % 7 != 3),
}


class Flex(nn.Module):
    def __init__(self, mask: str = "causal", scale: float | None = None, **options: Any) -> None:
        super().__init__()
        function = MASKS[mask]
        self.mask = None if function is None else create_block_mask(function, B, N, T, S, device="cpu")
        self.scale, self.options = scale, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        options = {"block_mask": self.mask, "scale": self.scale, "enable_gqa": True} | self.options
        return flex_attention(q, k, v, **options)


class Dense(Flex):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = None
        if self.mask is not None:
            b, h, t, s = (torch.arange(n) for n in (B, N, T, S))
            mask = self.mask.mask_mod(b[:, None, None, None], h[:, None, None], t[:, None], s)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=True)


def random_qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, *shape, 16, dtype=torch.float64) for shape in ((N, T), (K, S), (K, S))]


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("mask", MASKS)
def test_flex_attention_is_seen_as_that_with_a_dense_mask(mask: str, scale: float | None):
    found = []
    for model in (Flex(mask, scale), Dense(mask, scale)):
        with capture(model, [f":attn.{name}" for name in NAMES]) as acts:
            model(*random_qkv())
        found.append(dict(acts))
    for site, value in found[1].items():
        torch.testing.assert_close(found[0][site], value, rtol=0, atol=1e-12, equal_nan=True, msg=site)
    model, seen = Flex(mask), []
    with each_attention(model, "", lambda site, call: seen.append(attention_statistics(call, ["sink"]))):
        model(*random_qkv())
    assert seen[0]["sink"].shape == (B, N, T)


@pytest.mark.parametrize("part", ["q", "k", "v", "raw", "pattern", "z"])
def test_edits_of_flex_attention_are_those_with_a_dense_mask(part: str):
    outputs = []
    for model in (Flex("by row and head"), Dense("by row and head")):
        with edit(model, {f":attn.{part}": lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None, None]}):
            outputs.append(model(*random_qkv()))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


def test_flex_attention_with_more_in_its_weights_is_refused():
    model = Flex(score_mod=lambda score, b, h, q, k: 2 * torch.tanh(score / 2))
    with pytest.raises(InterpError, match="FlexAttention with a score_mod"), capture(model, ":attn.z"):
        model(*random_qkv())
    model = Flex(return_aux=AuxRequest(lse=True))
    for site in (":attn.z", ":attn.pattern"):
        with pytest.raises(InterpError, match="goes on with the log-sum-exp"), capture(model, site):
            model(*random_qkv())
    with capture(model, ":out.0") as acts:
        _, aux = model(*random_qkv())
    q, k, _ = random_qkv()
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    hidden = torch.arange(T)[:, None] + 50 < torch.arange(S)
    torch.testing.assert_close(aux.lse, scores.masked_fill(hidden, -torch.inf).logsumexp(-1))
    assert acts[":out.0"].shape == (B, N, T, 16)


@pytest.mark.parametrize("listed", ["hide more", "show more"])
def test_flex_attention_whose_blocks_say_other_than_its_mask_is_refused(listed: str):
    first = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    none = torch.zeros_like(first[0]), first[1]
    lists = (*first, *none) if listed == "hide more" else (*none, torch.full_like(first[0], 2), first[1])
    function = None if listed == "hide more" else MASKS["causal"]
    model = Flex()
    model.mask = BlockMask.from_kv_blocks(*lists, mask_mod=function, seq_lengths=(T, S))
    with pytest.raises(InterpError, match="other keys than its mask_mod"), capture(model, ":attn.pattern"):
        model(*random_qkv())
