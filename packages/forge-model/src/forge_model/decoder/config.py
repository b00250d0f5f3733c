"""The section `[model]` of a decoder: its parts, which may differ by layer. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_config import Config, Meta, sentences_from
from msgspec import field

from forge_model.attention.config import AttentionConfig, Count, GroupedQueryConfig, Positive
from forge_model.attention.rope_config import RopeConfig
from forge_model.decoder.block_config import BlockConfig, StandardBlockConfig
from forge_model.decoder.mtp_config import MTPConfig
from forge_model.ffn.config import FfnConfig, SwiGLUConfig
from forge_model.model_config import ModelConfig, models
from forge_model.norm_config import NormConfig, RMSNormConfig
from forge_model.scaling import Scaling, ScalingConfig
from forge_model.side_inputs import SideKind, together

if TYPE_CHECKING:
    from torch import nn

    from forge_model.hf.checkpoint import HuggingFace

INDEX = r"(-?\d+|(-?\d+)?:(-?\d+)?(:(-?\d+)?)?)"
INDICES = rf"^{INDEX}(,{INDEX})*$"
NormOrder = Literal["pre", "reordered", "sandwich"]


class LayerConfig(Config):
    """The parts of one block."""

    attention: AttentionConfig
    ffn: FfnConfig
    norm: NormConfig
    rope: RopeConfig
    norm_order: NormOrder = "pre"
    block: BlockConfig = StandardBlockConfig()

    def needs(self) -> dict[str, SideKind]:
        """Return the side inputs of the model that any part of this block needs, by name."""
        return together([self.block.needs, self.ffn.needs, self.norm.needs])


class LayerOverride(Config):
    """Layers that differ from the others: `[[model.overrides]]`.

    Attributes:
        layers: an index or a slice as in Python ("-1" is the last, "5::6" every sixth from 5 on), or several
            with commas between ("0,3,8:10").
        attention: replaces the whole attention of the model; absent means the same.
        ffn: replaces the feed-forward of the model.
        norm: replaces the norm of the model.
        rope: replaces the rotary embedding of the model.
        block: replaces the block of the model.
    """

    layers: Annotated[str, Meta(pattern=INDICES)]
    attention: AttentionConfig | None = None
    ffn: FfnConfig | None = None
    norm: NormConfig | None = None
    rope: RopeConfig | None = None
    block: BlockConfig | None = None

    def indices(self, num_layers: int) -> list[int]:
        """Return the layers of `num_layers` that it names; empty if one of its parts names none."""
        parts = [_indices(part, num_layers) for part in self.layers.split(",")]
        return [index for part in parts for index in part] if all(parts) else []


def _indices(text: str, num_layers: int) -> range:
    """Return the layers that one index or slice names."""
    parts = [int(part) if part else None for part in text.split(":")]
    if len(parts) > 1:
        return range(num_layers)[slice(*parts)]
    index = parts[0]
    assert index is not None
    return range(num_layers)[index : index + 1 or None]


@models.register("decoder")
class DecoderConfig(ModelConfig):
    """A decoder.

    Attributes:
        preset: fills in all absent keys, e.g. `llama-1b`; see `forge_model.hf.families`.
        from: fills them in from the `config.json` in this folder. The run keeps the keys, not the folder.
        vocab_size: number of token ids.
        max_tokens: longest sequence.
        dim: width of the residual stream.
        num_layers: blocks.
        tie_embeddings: the head uses the embedding matrix.
        init_std: standard deviation of the initial matrices; matrices that write into the residual stream are
            scaled by 1/sqrt(2 num_layers).
        attention: the attention of every layer without an override; likewise `ffn`, `norm`, `rope` and
            `block`.
        norm: the norm of the layers, and of the last hidden state.
        norm_order: where a layer has its norms: "pre": x + f(norm(x)); "reordered": x + norm(f(x)), as OLMo 2
            (arXiv:2501.00656); "sandwich": x + norm(f(norm(x))), as Gemma 2 (arXiv:2408.00118).
        embedding_scale: factor on embeddings; Gemma has sqrt(dim).
        learned_positions: a learnt vector for each of `max_tokens` positions is added to the scaled
            embeddings (GPT-2); with `rope.type = "none"` there are no other positions.
        logit_softcap: logits become logit_softcap * tanh(logit / logit_softcap) (arXiv:2408.00118); absent
            means no cap.
        logit_divisor: divisor of logits, before they are capped (Granite, arXiv:2408.13359).
        scaling: use learning rates and initial values that were found for a narrower model; see there.
        mtp: modules that predict tokens after the next one.
        overrides: layers that differ; where two name a layer, the later one counts.
    """

    preset: str | None = None
    from_: str | None = field(default=None, name="from")
    vocab_size: Count  # pyright: ignore[reportIncompatibleMethodOverride]
    max_tokens: Count = 2048  # pyright: ignore[reportIncompatibleMethodOverride]
    dim: Count
    num_layers: Count
    tie_embeddings: bool = False
    init_std: Annotated[float, Meta(gt=0)] = 0.02
    attention: AttentionConfig = GroupedQueryConfig()
    ffn: FfnConfig = SwiGLUConfig()
    norm: NormConfig = RMSNormConfig()
    rope: RopeConfig = RopeConfig()
    norm_order: NormOrder = "pre"
    block: BlockConfig = StandardBlockConfig()
    embedding_scale: Positive = 1.0
    learned_positions: bool = False
    logit_softcap: Positive | None = None
    logit_divisor: Positive = 1.0
    scaling: ScalingConfig | None = None
    mtp: MTPConfig = MTPConfig()
    overrides: list[LayerOverride] = []

    @classmethod
    def expand(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Lay the keys of `[model]` over those of its preset or of the folder named by `from`.

        Raises:
            ValueError: there is no such preset; the folder has no usable `config.json`; or both are named.
        """
        if isinstance(tree.get("from"), str):
            from forge_model.hf.config import model_tree

            if "preset" in tree:
                raise ValueError("preset and from both fill in the keys of the model; give one of them")
            return over(model_tree(tree["from"]), {key: tree[key] for key in tree if key != "from"})
        if "preset" not in tree:
            return tree
        from forge_model.hf.families import preset

        return over(preset(tree["preset"]), tree)

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.mtp.num_modules >= self.max_tokens:
            yield (
                f"mtp.num_modules = {self.mtp.num_modules} of sequences of max_tokens = {self.max_tokens}: "
                "no token stands so far ahead; use fewer modules"
            )
        if self.mtp.num_modules and self.learned_positions:
            yield (
                f"mtp.num_modules = {self.mtp.num_modules} with learned_positions = true: tokens further on "
                "have no positions in a module of it; use 0, or a rotary embedding"
            )
        for number, override in enumerate(self.overrides):
            if not override.indices(self.num_layers):
                yield (
                    f"overrides[{number}].layers = {override.layers!r} names no layer; "
                    f"num_layers = {self.num_layers}, the first layer is 0"
                )
        if self.mtp.num_modules and (needed := self.layer(-1).needs()):
            yield (
                f"mtp.num_modules = {self.mtp.num_modules}: blocks as in the last layer need "
                f"{', '.join(needed)}, which nobody makes for tokens further on; use 0"
            )
        if self.scaling is not None and self.scaling.base_layers is not None and self.norm_order != "pre":
            yield (
                f"scaling.base_layers = {self.scaling.base_layers} with norm_order = "
                f'"{self.norm_order}", whose norms undo the size of residual branches; leave it out'
            )
        yield from sentences_from(self.side_inputs)
        kinds: dict[str, int] = {}
        for index in range(self.num_layers):
            layer = self.layer(index)
            if kinds.setdefault(repr(layer), index) != index:
                continue
            attention = layer.attention
            heads = getattr(attention, "num_heads", None)
            if heads and getattr(attention, "head_dim", None) is None and self.dim % (2 * heads):
                yield (
                    f"dim = {self.dim} is no even multiple of attention.num_heads = {heads} (layer {index}); "
                    "change one of them or give attention.head_dim"
                )
            yield from sentences_from(layer.rope.axes, attention.rotary_dim(self.dim))

    @property
    def scaled(self) -> Scaling:
        """The size of this model relative to its base model."""
        return Scaling() if self.scaling is None else self.scaling.of(self.dim, self.num_layers)

    @property
    def divisor(self) -> float:
        """Divisor of logits; includes the width of a tied matrix, which learns as an embedding."""
        return self.logit_divisor * (self.scaled.width if self.tie_embeddings else 1.0)

    def scales_learning(self) -> bool:
        """See `ModelConfig.scales_learning`."""
        return self.scaling is not None

    def layer(self, index: int) -> LayerConfig:
        """Return the parts of one layer with overrides applied; -1 is the last layer."""
        index %= self.num_layers
        parts: dict[str, Any] = {name: getattr(self, name) for name in LayerConfig.__struct_fields__}
        for override in self.overrides:
            if index in override.indices(self.num_layers):
                parts |= {name: part for name in parts if (part := getattr(override, name, None)) is not None}
        if self.scaling is not None and self.scaling.base_head_dim is not None:
            parts["attention"] = parts["attention"].scaled(self.dim, self.scaling.base_head_dim)
        return LayerConfig(**parts)

    def side_inputs(self) -> dict[str, SideKind]:
        """Return the inputs besides tokens that any part of the model needs, by name.

        Raises:
            ValueError: layers need one name as two kinds.
        """
        return together([*(self.layer(index).needs() for index in range(self.num_layers)), self.norm.needs])

    def hugging_face(self) -> HuggingFace | None:
        """See `ModelConfig.hugging_face`."""
        from forge_model.hf.checkpoint import DecoderCheckpoint

        return DecoderCheckpoint(self)

    def build(self) -> nn.Module:
        """See `ModelConfig.build`."""
        from forge_model.decoder.decoder import Decoder

        return Decoder(self)

    def tensor_sizes(self) -> dict[str, int]:
        """See `ModelConfig.tensor_sizes`."""
        sizes = {"max_tokens": self.max_tokens} if self.learned_positions else {}
        for index in range(self.num_layers):
            layer = self.layer(index)
            for key, size in layer.block.tensor_sizes(layer, self.dim).items():
                same = sizes.setdefault(key, size) == size
                sizes |= {} if same else {f"layer {index} {key}": size}
        return sizes

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `ModelConfig.require_axes`."""
        if cp > 1 and (borders := [n for n in self.length_borders() if n < self.max_tokens]):
            raise ValueError(
                f"longrope turns sequences of more than {borders[0]} tokens otherwise than shorter ones, and "
                "ranks that share a sequence do not know its length; set mesh.cp = 1, or model.max_tokens = "
                f"{borders[0]}"
            )
        if (tp - 1) * -(-self.vocab_size // tp) >= self.vocab_size:
            raise ValueError(
                f"{tp} ranks cannot share a vocabulary of {self.vocab_size}; use a smaller mesh.tp"
            )
        for index in range(self.num_layers):
            layer = self.layer(index)
            if cp > 1 and method == "ring" and not layer.attention.by_blocks:
                raise ValueError(
                    f"layer {index}: softcap changes the scores, of which context parallelism by "
                    '"ring" knows the plain softmax only; set context_parallel.method = "gather" or "ulysses"'
                )
            try:
                layer.block.require_axes(layer, tp, cp, sequence)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from None

    def length_borders(self) -> list[int]:
        """See `ModelConfig.length_borders`."""
        found: set[int] = set()
        for index in range(self.num_layers):
            layer = self.layer(index)
            if layer.rope.rotates:
                long = layer.rope.long_frequencies(layer.attention.rotary_dim(self.dim))
                found |= set() if long is None else {long[0]}
        return sorted(found)

    def expert_counts(self) -> dict[str, int]:
        """See `ModelConfig.expert_counts`."""
        return self._of_experts(lambda ffn: ffn.expert_counts())

    def block_kinds(self) -> int:
        """See `ModelConfig.block_kinds`."""
        return len({repr(self.layer(index)) for index in range(self.num_layers)}) + (self.mtp.num_modules > 0)

    def require_learning(self) -> None:
        """See `ModelConfig.require_learning`."""
        for index in range(self.num_layers):
            self.layer(index).ffn.require_learning()

    def require_cut_experts(self, ranks: int) -> None:
        """See `ModelConfig.require_cut_experts`."""
        if not self.expert_counts():
            super().require_cut_experts(ranks)
        for index in range(self.num_layers):
            try:
                self.layer(index).ffn.require_cut_experts(self.dim, ranks)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from None

    def expert_groups(self) -> dict[str, int]:
        """See `ModelConfig.expert_groups`."""
        return self._of_experts(lambda ffn: ffn.expert_groups())

    def _of_experts(self, tell: Callable[[FfnConfig], dict[str, int]]) -> dict[str, int]:
        """Collect the numbers that feed-forwards return for their layers of experts, by layer and name."""
        return {
            f"layer {index}" + (f" {name}" if name else ""): number
            for index in range(self.num_layers)
            for name, number in tell(self.layer(index).ffn).items()
        }

    def require_stages(self, layers: Sequence[int], is_v: bool = False) -> None:
        """See `ModelConfig.require_stages`."""
        if self.tie_embeddings and is_v:
            raise ValueError(
                "a rank that has the first and the last stage would hold tied embeddings twice; choose a "
                "pipeline.schedule that is no V, or set model.tie_embeddings = false"
            )
        if self.tie_embeddings and self.mtp.num_modules:
            raise ValueError(
                "the last stage has the embedding for the head, and would embed tokens ahead by it a second "
                "time; set model.tie_embeddings = false, or mtp.num_modules = 0"
            )
        if len(layers) > self.num_layers:
            raise ValueError(
                f"{len(layers)} stages need as many layers; model.num_layers = {self.num_layers}"
            )
        if all(layers) and sum(layers) != self.num_layers:
            raise ValueError(f"{list(layers)} do not add up to model.num_layers = {self.num_layers}")

    def layer_flops(self, tokens: int, causal: bool = True) -> list[float]:
        """See `ModelConfig.layer_flops`."""
        layers = (self.layer(index) for index in range(self.num_layers))
        return [layer.block.forward_flops(layer, self.dim, tokens, causal) for layer in layers]

    def flops_per_token(self, tokens: int, causal: bool = True) -> float:
        """See `ModelConfig.flops_per_token`."""
        depths = self.mtp.num_modules
        layers = self.layer_flops(tokens, causal)
        blocks = sum(layers) + depths * layers[-1]
        heads = (1 + depths) * 2 * self.dim * self.vocab_size
        return 3 * (blocks + heads + depths * 4 * self.dim**2)


def over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Lay one tree of keys over another; tables of the same type merge."""
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, dict) and _same_type(below, value):
            value = over(below, value)
        merged[name] = value
    return merged


def _same_type(lower: dict[str, Any], upper: dict[str, Any]) -> bool:
    """Whether the upper table refines the lower one instead of choosing another type."""
    return upper.get("type", lower.get("type")) == lower.get("type")
