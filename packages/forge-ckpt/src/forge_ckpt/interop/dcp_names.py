"""The weights of torchtitan's Llama under the names of Hugging Face, in its layout.

torchtitan rotates neighbours in a head, as Meta's weights do; Hugging Face rotates halves, so that the rows
of queries and keys change places. Source: torchtitan/models/llama3/model/state_dict_adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_ckpt.error import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
OF_LAYERS = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_HEADS = {
    "self_attn.q_proj.weight": "num_attention_heads",
    "self_attn.k_proj.weight": "num_key_value_heads",
    "self_attn.v_proj.weight": "num_key_value_heads",
}
_NULLABLE = ("num_key_value_heads", "head_dim")
_SIZES = (
    "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", *_NULLABLE
)  # fmt: skip
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")


class LlamaOfTitan(Mapping[str, "Tensor"]):
    """Weights of torchtitan's Llama 3 in the form of Hugging Face; each is read on access.

    Args:
        tensors: by the names of torchtitan.
        config: the `config.json` of the model: `num_attention_heads`, `num_key_value_heads`.

    Raises:
        CheckpointError: a name is not one of that model, the config lacks the number of heads, or a size is
            no number.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        if "num_attention_heads" not in config:
            raise CheckpointError("the config.json says no num_attention_heads; expected that of a Llama")
        for key in config.keys() & _SIZES:
            value = config[key]
            is_size = type(value) is int and value > 0
            if not is_size and (value is not None or key not in _NULLABLE):
                raise CheckpointError(
                    f"the config.json says {key} = {value!r}; expected a whole number above 0"
                )
        heads = config["num_attention_heads"]
        key_heads = config.get("num_key_value_heads") or heads
        self._heads = {"attention.wq.weight": heads, "attention.wk.weight": key_heads}
        self._tensors = tensors
        self._names = {_hf_name(name): name for name in tensors if name != "freqs_cis"}

    def __getitem__(self, name: str) -> Tensor:
        key = self._names[name]
        tensor, found = self._tensors[key], _LAYER.fullmatch(key)
        heads = self._heads.get(found[2]) if found else None
        if heads is None:
            return tensor
        if tensor.ndim != 2 or len(tensor) % (2 * heads):
            raise CheckpointError(f"{key} is {list(tensor.shape)}, which is not {heads} heads")
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def require_config(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Check that a `config.json` fits these weights: a wrong number of heads would mix up rows.

    Args:
        weights: by the names of Hugging Face; may be on the meta device.
        config: its content; absent keys are not compared, except the sizes of heads.

    Raises:
        CheckpointError: it does not; lists every difference.
    """
    rows = {name: tensor.shape[0] for name, tensor in weights.items() if tensor.ndim}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config.get("hidden_size", heads) // heads
    layers = {found[1] for name in weights if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    expected = {"num_hidden_layers": len(layers)}
    wrong = []
    for name, count in rows.items():
        kind = name.split(".", 3)[-1]
        if name == NAMES["tok_embeddings.weight"]:
            expected |= {"vocab_size": count, "hidden_size": weights[name].shape[1]}
        elif kind == OF_LAYERS["feed_forward.w1.weight"]:
            expected["intermediate_size"] = count
        elif kind in _HEADS and "hidden_size" in config:
            needed = (config.get(_HEADS[kind]) or heads) * head_dim
            wrong += [f"{name} has {count} rows, not {needed}"] if count != needed else []
    wrong += [
        f"{key} = {config[key]}, and the weights have {value}"
        for key, value in expected.items()
        if config.get(key, value) != value
    ]
    if config.get("tie_word_embeddings") and NAMES["output.weight"] in weights:
        wrong.append("tie_word_embeddings = true, and the weights have an output of their own")
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong[:20])
        raise CheckpointError(f"the config.json is that of another model:{listed}")


def _hf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in OF_LAYERS:
        raise CheckpointError(
            f"{name} is no weight of torchtitan's Llama 3; leave out --llama to keep the names"
        )
    return f"model.layers.{found[1]}.{OF_LAYERS[found[2]]}"
