"""The section `[model.attention]`, and the FLOPs of attention. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from forge_config import Config, Meta, Registry
from msgspec.structs import replace

from forge_model.norm_config import NormConfig, RMSNormConfig

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class AttentionConfig(Config):
    """Interface of `[model.attention]`."""

    @property
    def window(self) -> int | None:
        """The number of tokens that a token sees at most, itself included; None means all."""
        return None

    @property
    def by_blocks(self) -> bool:
        """Whether scores only pass a mask and a softmax over the keys, and perhaps a sink."""
        return True

    def build(self, dim: int, norm: NormConfig) -> nn.Module:
        """A module taking ([B, T, D], rope, mask, cache) to [B, T, D].

        Its attribute `attend`, a `forge_model.attention.mask.Attend`, computes softmax attention and makes
        the mask.
        """
        raise NotImplementedError

    def rotary_dim(self, dim: int) -> int:
        """Width of the part of a head that is rotated."""
        raise NotImplementedError

    def resolved(self, dim: int) -> AttentionConfig:
        """Return the same config with the defaults that depend on the width of the model filled in."""
        return self

    def scaled(self, dim: int, base_head_dim: int) -> AttentionConfig:
        """Return the same config with scores as for heads of `base_head_dim`, falling with their width.

        Source: Yang et al. 2022, arXiv:2203.03466 definition 4.1: 1/d in place of 1/sqrt(d).
        """
        raise ValueError(
            f"scaling.base_head_dim = {base_head_dim} with a {type(self).__name__}, whose scores have no "
            "scale; leave it out"
        )

    def forward_flops(self, dim: int, tokens: int, causal: bool) -> float:
        """Matmul FLOPs a token of a forward pass over sequences of `tokens`."""
        raise NotImplementedError

    def tensor_sizes(self) -> dict[str, int]:
        """The sizes, by key, that tensor parallelism must divide."""
        return {}

    def require_axes(self, norm: NormConfig, tp: int, cp: int) -> None:
        """See `ModelConfig.require_axes`; `norm` belongs to the layer."""


attentions = Registry("attention", AttentionConfig, default="gqa")


@attentions.register("gqa")
class GroupedQueryConfig(AttentionConfig):
    """Multi-head, grouped-query or multi-query attention (Ainslie et al. 2023, arXiv:2305.13245).

    Attributes:
        num_heads: query heads.
        num_kv_heads: key-value heads; absent means as many as query heads.
        head_dim: width of a head; absent means dim / num_heads.
        qk_norm: normalize queries and keys before the rotation.
        qk_norm_over: the unit of normalization: each head (as Qwen3), or all heads at once (as OLMo 2).
        bias: biases on the query, key and value projections.
        output_bias: bias on the output projection.
        sliding_window: number of tokens that a token sees at most, itself included; absent means all.
        scale: factor of the scores; absent means 1/sqrt(head_dim).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118 section 2); absent
            means no cap. Slower: FlexAttention is the only fused kernel for such scores.
        sinks: every head has a learnt score for one more key without a value, so that its weights may sum to
            less than one (GPT-OSS, arXiv:2508.10925). As slow as `softcap`.
        rope_dim: width of the rotated part of each head, its first dims (as GPT-NeoX); absent means all of
            it.
        rope_pairs: rotate neighbouring dims together (as GLM-4); otherwise the two halves of that part.
    """

    num_heads: Count = 8
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    bias: bool = False
    output_bias: bool = False
    sliding_window: Count | None = None
    scale: Positive | None = None
    softcap: Positive | None = None
    sinks: bool = False
    rope_dim: Count | None = None
    rope_pairs: bool = False

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.num_heads % self.kv_heads:
            yield (
                f"num_kv_heads = {self.kv_heads} does not divide num_heads = {self.num_heads}; "
                "every key-value head serves the same number of query heads"
            )
        if self.head_dim is not None and self.head_dim % 2:
            yield f"head_dim = {self.head_dim} is odd; rotary embeddings rotate pairs"
        if self.rope_dim is not None and self.rope_dim % 2:
            yield f"rope_dim = {self.rope_dim} is odd; rotary embeddings rotate pairs"

    @property
    def window(self) -> int | None:
        """See `AttentionConfig.window`."""
        return self.sliding_window

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, with the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def tensor_sizes(self) -> dict[str, int]:
        """See `AttentionConfig.tensor_sizes`."""
        return {"num_heads": self.num_heads}

    @property
    def by_blocks(self) -> bool:
        """See `AttentionConfig.by_blocks`."""
        return self.softcap is None

    def require_axes(self, norm: NormConfig, tp: int, cp: int) -> None:
        """See `AttentionConfig.require_axes`."""
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.kv_heads} can neither be cut over {tp} ranks nor be shared by as many "
                "ranks each; choose mesh.tp as a divisor or a multiple of it"
            )
        in_parts = isinstance(norm, RMSNormConfig) and not norm.zero_centered
        if tp > 1 and self.qk_norm and self.qk_norm_over == "projection" and not in_parts:
            raise ValueError(
                'qk_norm_over = "projection" normalizes the heads of all ranks together, which only a plain '
                "rmsnorm can do in parts; choose that norm, normalize each head, or set mesh.tp = 1"
            )

    def head_width(self, dim: int) -> int:
        """Return the width of a head, with the default resolved."""
        return dim // self.num_heads if self.head_dim is None else self.head_dim

    def rotary_dim(self, dim: int) -> int:
        """See `AttentionConfig.rotary_dim`.

        Raises:
            ValueError: it is wider than a head.
        """
        width = self.head_width(dim)
        if self.rope_dim is not None and self.rope_dim > width:
            raise ValueError(f"rope_dim = {self.rope_dim} of heads that are {width} wide; give no more")
        return self.rope_dim or width

    def resolved(self, dim: int) -> AttentionConfig:
        """See `AttentionConfig.resolved`."""
        width = self.head_width(dim)
        scale = None if self.scale == width**-0.5 else self.scale
        rope_dim = None if self.rotary_dim(dim) == width else self.rope_dim
        return replace(self, num_kv_heads=self.kv_heads, head_dim=width, scale=scale, rope_dim=rope_dim)

    def scaled(self, dim: int, base_head_dim: int) -> AttentionConfig:
        """See `AttentionConfig.scaled`."""
        width = self.head_width(dim)
        if width == base_head_dim:
            return self
        return replace(self, scale=(self.scale or width**-0.5) * (base_head_dim / width) ** 0.5)

    def build(self, dim: int, norm: NormConfig) -> nn.Module:
        """See `AttentionConfig.build`."""
        from forge_model.attention.grouped_query import Attention

        return Attention(self, dim, norm)

    def forward_flops(self, dim: int, tokens: int, causal: bool) -> float:
        """See `AttentionConfig.forward_flops`; `causal` counts only the visible pairs of tokens."""
        width = self.num_heads * self.head_width(dim)
        kv_width = self.kv_heads * self.head_width(dim)
        projections = 2 * dim * (2 * width + 2 * kv_width)
        return projections + 4 * width * visible(tokens, causal, self.sliding_window)


@attentions.register("mla")
class LatentConfig(AttentionConfig):
    """Multi-head latent attention (DeepSeek-V2 and V3, arXiv:2405.04434, arXiv:2412.19437 section 2.1.1).

    Attributes:
        num_heads: heads.
        kv_rank: width of the latent from which keys and values are computed; a cache keeps it and the rotated
            key, of width `rope_dim`.
        q_rank: width of the latent from which queries are computed; absent means no compression of queries.
        nope_dim: width of the part of a query and key without position.
        rope_dim: width of the rotated part; all heads share that of the key.
        value_dim: width of a value.
        bias: biases on the projections to the latents and on the output.
        rope_pairs: rotate neighbouring dims together, as DeepSeek's weights are laid out; otherwise the
            halves.
        scale: factor of the scores; absent means 1/sqrt(nope_dim + rope_dim).
        latent_eps: epsilon of the norms of the latents.
    """

    num_heads: Count = 8
    kv_rank: Count = 512
    q_rank: Count | None = None
    nope_dim: Count = 128
    rope_dim: Count = 64
    value_dim: Count = 128
    bias: bool = False
    rope_pairs: bool = True
    scale: Positive | None = None
    latent_eps: Positive = 1e-6

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.rope_dim % 2:
            yield f"rope_dim = {self.rope_dim} is odd; rotary embeddings rotate pairs"

    @property
    def head_dim(self) -> int:
        """Width of a query."""
        return self.nope_dim + self.rope_dim

    def latent_norm(self, norm: NormConfig) -> NormConfig:
        """Return the norm of the latents, of the same type as the norm of the layer."""
        return replace(norm, eps=self.latent_eps)

    def tensor_sizes(self) -> dict[str, int]:
        """See `AttentionConfig.tensor_sizes`."""
        return {"num_heads": self.num_heads}

    def rotary_dim(self, dim: int) -> int:
        """See `AttentionConfig.rotary_dim`."""
        return self.rope_dim

    def resolved(self, dim: int) -> AttentionConfig:
        """See `AttentionConfig.resolved`."""
        return replace(self, scale=None) if self.scale == self.head_dim**-0.5 else self

    def scaled(self, dim: int, base_head_dim: int) -> AttentionConfig:
        """See `AttentionConfig.scaled`."""
        width = self.head_dim
        if width == base_head_dim:
            return self
        return replace(self, scale=(self.scale or width**-0.5) * (base_head_dim / width) ** 0.5)

    def build(self, dim: int, norm: NormConfig) -> nn.Module:
        """See `AttentionConfig.build`."""
        from forge_model.attention.latent import LatentAttention

        return LatentAttention(self, dim, norm)

    def forward_flops(self, dim: int, tokens: int, causal: bool) -> float:
        """See `AttentionConfig.forward_flops`; as in training, without absorption."""
        width, values = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        queries = dim * width if self.q_rank is None else self.q_rank * (dim + width)
        keys = dim * (self.kv_rank + self.rope_dim)
        keys += self.kv_rank * (self.num_heads * self.nope_dim + values)
        return 2 * (queries + keys + values * dim) + 2 * (width + values) * visible(tokens, causal, None)


def visible(tokens: int, causal: bool, window: int | None) -> float:
    """Mean number of keys a query sees."""
    if not causal:
        return tokens
    window = min(tokens, window or tokens)
    return (window * (window + 1) / 2 + (tokens - window) * window) / tokens
