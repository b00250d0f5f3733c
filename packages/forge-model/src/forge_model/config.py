"""What `[model]` and `[loss]` hold. Imports no torch; `build()` does.

The parts of a decoder are open sections, so another attention, feed-forward, norm or rope is one struct and
one registry line. B batch, T tokens, D model dim, N heads, K key-value heads, H head dim, F ffn dim, V
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_config import Config, Meta, Registry

from forge_model.rope_config import RopeConfig

if TYPE_CHECKING:
    from torch import nn

    from forge_model.loss import Loss

Count = Annotated[int, Meta(ge=1)]


class NormConfig(Config):
    """Interface of `[model.norm]`.

    Attributes:
        eps: added to the variance.
    """

    eps: Annotated[float, Meta(gt=0)] = 1e-5

    def build(self, dim: int) -> nn.Module:
        """A module [..., dim] -> [..., dim]."""
        raise NotImplementedError


norms = Registry("norm", NormConfig, default="rmsnorm")


@norms.register("rmsnorm")
class RMSNormConfig(NormConfig):
    """Root mean square norm with a gain (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def build(self, dim: int) -> nn.Module:
        """See `NormConfig.build`."""
        from torch import nn

        return nn.RMSNorm(dim, eps=self.eps)


@norms.register("layernorm")
class LayerNormConfig(NormConfig):
    """Layer norm with gain and, when asked for, bias (Ba et al. 2016, arXiv:1607.06450).

    Attributes:
        bias: add a learnt bias.
    """

    bias: bool = False

    def build(self, dim: int) -> nn.Module:
        """See `NormConfig.build`."""
        from torch import nn

        return nn.LayerNorm(dim, eps=self.eps, bias=self.bias)


class AttentionConfig(Config):
    """Interface of `[model.attention]`."""

    def build(self, dim: int, norm: NormConfig) -> nn.Module:
        """A module taking ([B, T, D], rope, mask, cache) to [B, T, D]."""
        raise NotImplementedError

    def rotary_dim(self, dim: int) -> int:
        """Width of the part of a head that is rotated."""
        raise NotImplementedError

    def forward_flops(self, dim: int, tokens: int, causal: bool) -> float:
        """Matmul FLOPs a token of a forward pass over sequences of `tokens`."""
        raise NotImplementedError


attentions = Registry("attention", AttentionConfig, default="gqa")


@attentions.register("gqa")
class GroupedQueryConfig(AttentionConfig):
    """Multi-head, grouped-query or multi-query attention (Ainslie et al. 2023, arXiv:2305.13245).

    Attributes:
        num_heads: query heads.
        num_kv_heads: key-value heads; absent means as many as query heads.
        head_dim: width of a head; absent means dim / num_heads.
        qk_norm: normalize queries and keys of each head before the rotation (as Qwen3).
        bias: biases on the query, key and value projections.
        output_bias: bias on the output projection.
        sliding_window: a token sees at most so many tokens, itself included; absent means all.
    """

    num_heads: Count = 8
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    sliding_window: Count | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.kv_heads} does not divide num_heads = {self.num_heads}; "
                "every key-value head serves the same number of query heads"
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary embeddings rotate pairs")

    @property
    def kv_heads(self) -> int:
        """Key-value heads, the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def rotary_dim(self, dim: int) -> int:
        """See `AttentionConfig.rotary_dim`."""
        return dim // self.num_heads if self.head_dim is None else self.head_dim

    def build(self, dim: int, norm: NormConfig) -> nn.Module:
        """See `AttentionConfig.build`."""
        from forge_model.attention import Attention

        return Attention(self, dim, norm)

    def forward_flops(self, dim: int, tokens: int, causal: bool) -> float:
        """See `AttentionConfig.forward_flops`; `causal` counts only the visible pairs of tokens."""
        width = self.num_heads * self.rotary_dim(dim)
        kv_width = self.kv_heads * self.rotary_dim(dim)
        projections = 2 * dim * (2 * width + 2 * kv_width)
        return projections + 4 * width * self._visible(tokens, causal)

    def _visible(self, tokens: int, causal: bool) -> float:
        """Mean number of keys a query sees."""
        if not causal:
            return tokens
        window = min(tokens, self.sliding_window or tokens)
        return (window * (window + 1) / 2 + (tokens - window) * window) / tokens


class FfnConfig(Config):
    """Interface of `[model.ffn]`.

    Attributes:
        dim: hidden width; absent means the default of the kind.
        bias: biases on all projections.
    """

    dim: Count | None = None
    bias: bool = False

    def build(self, dim: int) -> nn.Module:
        """A module [..., D] -> [..., D]."""
        raise NotImplementedError

    def forward_flops(self, dim: int) -> float:
        """Matmul FLOPs a token of a forward pass."""
        raise NotImplementedError


ffns = Registry("ffn", FfnConfig, default="swiglu")


@ffns.register("swiglu")
class SwiGLUConfig(FfnConfig):
    """Gated feed-forward with SiLU (arXiv:2002.05202); default width 8/3 dim, rounded up to 64."""

    def hidden(self, dim: int) -> int:
        """The hidden width, the default resolved."""
        return -(-8 * dim // 3 // 64) * 64 if self.dim is None else self.dim

    def build(self, dim: int) -> nn.Module:
        """See `FfnConfig.build`."""
        from forge_model.ffn import SwiGLU

        return SwiGLU(dim, self.hidden(dim), self.bias)

    def forward_flops(self, dim: int) -> float:
        """See `FfnConfig.forward_flops`."""
        return 6 * dim * self.hidden(dim)


@ffns.register("mlp")
class MLPConfig(FfnConfig):
    """Plain feed-forward; default width 4 dim.

    Attributes:
        activation: the nonlinearity.
    """

    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"] = "gelu"

    def hidden(self, dim: int) -> int:
        """The hidden width, the default resolved."""
        return 4 * dim if self.dim is None else self.dim

    def build(self, dim: int) -> nn.Module:
        """See `FfnConfig.build`."""
        from forge_model.ffn import MLP

        return MLP(dim, self.hidden(dim), self.activation, self.bias)

    def forward_flops(self, dim: int) -> float:
        """See `FfnConfig.forward_flops`."""
        return 4 * dim * self.hidden(dim)


class ModelConfig(Config):
    """Interface of `[model]`.

    Attributes:
        vocab_size: token ids the model knows.
        max_tokens: longest sequence.
    """

    vocab_size: Count
    max_tokens: Count = 2048

    def build(self) -> nn.Module:
        """The model, with parameters not yet meaningful; build it under `torch.device("meta")`."""
        raise NotImplementedError

    def flops_per_token(self, tokens: int, causal: bool = True) -> float:
        """Model FLOPs a token of forward and backward, recomputation not counted.

        Args:
            tokens: length of the sequences.
            causal: count only the pairs of tokens that attention needs; otherwise all of them.
        """
        raise NotImplementedError


models = Registry("model", ModelConfig, default="decoder")


@models.register("decoder")
class DecoderConfig(ModelConfig):
    """A pre-norm decoder.

    Attributes:
        preset: fills in all keys that are not given, e.g. `llama-1b`; see `forge_model.families`.
        dim: width of the residual stream.
        num_layers: blocks.
        tie_embeddings: the head uses the embedding matrix.
        init_std: standard deviation of the initial matrices; those that write into the residual stream are
            scaled by 1/sqrt(2 num_layers).
    """

    preset: str | None = None
    dim: Count
    num_layers: Count
    tie_embeddings: bool = False
    init_std: Annotated[float, Meta(gt=0)] = 0.02
    attention: AttentionConfig = GroupedQueryConfig()
    ffn: FfnConfig = SwiGLUConfig()
    norm: NormConfig = RMSNormConfig()
    rope: RopeConfig = RopeConfig()

    @classmethod
    def expand(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Lay the given keys over those of the preset.

        Raises:
            ValueError: there is no such preset.
        """
        if "preset" not in given:
            return given
        from forge_model.families import preset

        return _over(preset(given["preset"]), given)

    def __post_init__(self) -> None:
        heads = getattr(self.attention, "num_heads", None)
        if heads and getattr(self.attention, "head_dim", None) is None and self.dim % (2 * heads):
            raise ValueError(
                f"dim = {self.dim} is no even multiple of attention.num_heads = {heads}; "
                "change one of them or give attention.head_dim"
            )

    def build(self) -> nn.Module:
        """See `ModelConfig.build`."""
        from forge_model.decoder import Decoder

        return Decoder(self)

    def flops_per_token(self, tokens: int, causal: bool = True) -> float:
        """See `ModelConfig.flops_per_token`."""
        block = self.attention.forward_flops(self.dim, tokens, causal) + self.ffn.forward_flops(self.dim)
        return 3 * (self.num_layers * block + 2 * self.dim * self.vocab_size)


def _over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, dict) and _same_type(below, value):
            value = _over(below, value)
        merged[name] = value
    return merged


def _same_type(lower: dict[str, Any], upper: dict[str, Any]) -> bool:
    """Whether the upper table refines the lower one, rather than choosing another kind of part."""
    return upper.get("type", lower.get("type")) == lower.get("type")


class LossConfig(Config):
    """Next-token cross entropy.

    Attributes:
        chunk_tokens: logits are made for so many tokens at a time; 0 makes them all at once.
        z_loss_weight: weight of the squared log-normalizer (PaLM, arXiv:2204.02311 section 5); 0 is off.
    """

    free_keys = ("chunk_tokens",)
    recorded_keys = ("z_loss_weight",)

    chunk_tokens: Annotated[int, Meta(ge=0)] = 1024
    z_loss_weight: Annotated[float, Meta(ge=0)] = 0.0

    def build(self) -> Loss:
        """The loss as a function of hidden states, head weight and labels."""
        from forge_model.loss import Loss

        return Loss(self.chunk_tokens, self.z_loss_weight)
