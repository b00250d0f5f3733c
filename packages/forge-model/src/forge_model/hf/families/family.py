"""Families of published models: their presets, and the keys and names of their Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from forge_model.decoder.config import DecoderConfig

LAYER_KEYS = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.w_gate": "mlp.gate_proj",
    "ffn.w_up": "mlp.up_proj",
    "ffn.w_down": "mlp.down_proj",
}
"""Module names inside a block: ours, theirs."""

LEAVES = {"selection_bias": "e_score_correction_bias"}
"""Names of parameters and buffers that differ: ours, theirs."""

EXPERTS = "ffn.experts"
"""The module of stacked parameters inside a block."""

OUTER_KEYS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


class Packed(NamedTuple):
    """Where one of our parameters is in a Hugging Face parameter that holds several of ours.

    Attributes:
        key: name of the Hugging Face parameter: its module in a block, or its leaf among the experts.
        part: index of our parameter in it.
        parts: number of our parameters in it.
        turns: unit in which our parameters alternate: one `row`, the rows of a `head`, or `all` rows.
        transposed: whether the Hugging Face parameter is [..., in, out].
    """

    key: str
    part: int = 0
    parts: int = 1
    turns: Literal["row", "head", "all"] = "all"
    transposed: bool = False


class Key(NamedTuple):
    """A key of a `config.json`.

    Attributes:
        kind: type of its value; numbers are above zero.
        default: value if the key is absent.
        nullable: whether null is allowed.
        zero: whether the number may be zero.
    """

    kind: type
    default: Any
    nullable: bool = False
    zero: bool = False

    def accepts(self, value: object) -> bool:
        """Whether the key may have this value."""
        if value is None:
            return self.nullable
        if self.kind in (int, float):
            if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
                return False
            return value > 0 or (self.zero and value == 0)
        return isinstance(value, self.kind)


SHARED_KEYS: dict[str, Key] = {
    "hidden_size": Key(int, 4096),
    "num_hidden_layers": Key(int, 32),
    "num_attention_heads": Key(int, 32),
    "initializer_range": Key(float, 0.02),
    "rms_norm_eps": Key(float, 1e-6),
    "tie_word_embeddings": Key(bool, False),
    "attention_bias": Key(bool, False),
}
"""Keys that mean the same in every family."""


@dataclass(frozen=True)
class Family:
    """A family of published models. "Theirs" are names in Hugging Face checkpoints, "ours" in `Decoder`.

    Attributes:
        model_type: `model_type` in the `config.json`.
        architecture: class of `transformers`.
        presets: keys of `[model]` by name of the preset.
        keys: keys of the `config.json` that shape the model.
        layer_keys: names inside a block, ours to theirs, of modules or of single parameters; or the place of
            one of our modules in one of theirs.
        read: converts a `config.json` without problems and with all defaults to the model.
        write: converts a model that the family can hold to values of `keys` and `old_keys`; values of other
            keys are dropped.
        problems: yields problems of a `config.json` whose values have the right types.
        old_keys: keys that the class of `transformers` reads besides its fields.
        fixed: keys that are accepted only with this value, and are written with it.
        theta: default base of the rotary embedding.
        expert_keys: our stacked parameters, and their names within each expert or their place in a stacked
            parameter of theirs.
        aliases: other names of keys.
        mtp_keys: module names inside a module for multi-token prediction, ours to theirs.
        outer_keys: module names outside of the blocks, ours to theirs.
        layers: their name for all blocks.
        empty: their tensors without elements, with their shapes, for parts that the model does not have.
        base: prefix of all names of tensors except the head; a checkpoint may leave it out.
        unused: a pattern for names of tensors in older checkpoints that nothing reads.
    """

    model_type: str
    architecture: str
    presets: dict[str, dict[str, Any]]
    keys: dict[str, Key]
    layer_keys: Mapping[str, str | Packed]
    read: Callable[[Mapping[str, Any]], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    problems: Callable[[Mapping[str, Any]], Iterator[str]]
    old_keys: dict[str, Key] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    theta: float = 10000.0
    expert_keys: dict[str, str] | dict[str, Packed] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    mtp_keys: dict[str, str] = field(default_factory=dict)
    outer_keys: dict[str, str] = field(default_factory=lambda: OUTER_KEYS)
    layers: str = "model.layers"
    empty: Callable[[DecoderConfig], dict[str, tuple[int, int]]] = lambda config: {}
    base: str = ""
    unused: str = "(?!)"

    def hf_key(self, name: str, num_layers: int) -> str:
        """Return their name of our parameter: layers.3.ffn.w_up.weight -> model.layers.3.mlp.up_proj.weight.

        The name of a stacked parameter has `{}` in place of the expert index, unless it is `packed`.
        Modules for multi-token prediction are numbered as if they were further layers.

        Raises:
            KeyError: they have no such parameter.
        """
        module, _, leaf = name.rpartition(".")
        if not module.startswith(("layers.", "mtp.")):
            return f"{self.outer_keys[module]}.{leaf}"
        kind, index, inner = module.split(".", 2)
        if kind == "mtp":
            index = str(num_layers + int(index))
            if not inner.startswith("block."):
                return f"{self.layers}.{index}.{self.mtp_keys[inner]}.{leaf}"
            inner = inner.removeprefix("block.")
        if f"{inner}.{leaf}" in self.layer_keys:
            return f"{self.layers}.{index}.{self.layer_keys[f'{inner}.{leaf}']}"
        module = self.layer_keys[inner]
        place = f"{self.layers}.{index}.{module.key if isinstance(module, Packed) else module}"
        if inner != EXPERTS:
            return f"{place}.{LEAVES.get(leaf, leaf)}"
        key = self.expert_keys[leaf]
        return f"{place}.{key.key}" if isinstance(key, Packed) else f"{place}.{{}}.{key}.weight"

    def gathers(self) -> bool:
        """Whether any of their tensors holds several of ours, or a part of one of ours."""
        return bool(self.expert_keys) or any(isinstance(key, Packed) for key in self.layer_keys.values())

    def packed(self, name: str) -> Packed | None:
        """Return where our parameter is in the one that `hf_key` names; None if it is all of it."""
        module, _, leaf = name.rpartition(".")
        inner = module.split(".", 2)[-1].removeprefix("block.")
        key = self.expert_keys.get(leaf) if inner == EXPERTS else self.layer_keys.get(inner)
        return key if isinstance(key, Packed) else None


SMALL: dict[str, dict[str, Any]] = {
    "20m": {
        "dim": 256,
        "num_layers": 8,
        "tie_embeddings": True,
        "attention": {"num_heads": 4},
        "ffn": {"dim": 768},
    },
    "125m": {
        "dim": 768,
        "num_layers": 12,
        "tie_embeddings": True,
        "attention": {"num_heads": 12},
        "ffn": {"dim": 2048},
    },
    "350m": {
        "dim": 1024,
        "num_layers": 24,
        "tie_embeddings": True,
        "attention": {"num_heads": 16},
        "ffn": {"dim": 2752},
    },
}
"""Shapes for studies at small scale, with a vocabulary of 50304: the same for every family."""

LARGE: dict[str, dict[str, Any]] = {
    "1b": {
        "dim": 2048,
        "num_layers": 16,
        "tie_embeddings": True,
        "attention": {"num_heads": 32, "num_kv_heads": 8},
        "ffn": {"dim": 8192},
    },
    "3b": {
        "dim": 3072,
        "num_layers": 28,
        "tie_embeddings": True,
        "attention": {"num_heads": 24, "num_kv_heads": 8},
        "ffn": {"dim": 8192},
    },
    "8b": {
        "dim": 4096,
        "num_layers": 32,
        "attention": {"num_heads": 32, "num_kv_heads": 8},
        "ffn": {"dim": 14336},
    },
    "13b": {
        "dim": 5120,
        "num_layers": 40,
        "attention": {"num_heads": 40, "num_kv_heads": 8},
        "ffn": {"dim": 13824},
    },
    "70b": {
        "dim": 8192,
        "num_layers": 80,
        "attention": {"num_heads": 64, "num_kv_heads": 8},
        "ffn": {"dim": 28672},
    },
}
"""Shapes of the Llama 3 generation (1b and 3b as Llama 3.2, 8b and 70b as 3.1; 13b has no such original)."""


def presets(prefix: str, shapes: dict[str, dict[str, Any]], **shared: Any) -> dict[str, dict[str, Any]]:
    """Return the shapes by name, each merged with the keys that all of them share; tables merge."""
    made = {}
    for size, shape in shapes.items():
        merged = {
            key: value | shape.get(key, {}) if isinstance(value, dict) else value
            for key, value in shared.items()
        }
        made[f"{prefix}-{size}"] = merged | {k: v for k, v in shape.items() if k not in merged}
    return made
