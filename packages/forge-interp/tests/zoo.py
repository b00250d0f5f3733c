"""Tiny models of many families with random weights, and what a plain hook sees in them.

Needs transformers. B batch, T queries, S keys, N heads, H head dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB, IMAGE_TOKEN = 99, 98
BATCH, LENGTH, PADS, PATCHES = 2, 9, 3, 16


@dataclass(frozen=True)
class Tower:
    """One stack of blocks.

    Attributes:
        blocks: glob of the blocks.
        states: path in the output to the hidden states; None where the model does not give them. They are the
            inputs of all blocks (else their outputs), then the last output behind the norm.
        norm: the module through which the last output goes for that, if any.
        begins_with_input: which of the two.
    """

    blocks: str
    states: str | None = "hidden_states"
    norm: str | None = None
    begins_with_input: bool = True


@dataclass(frozen=True)
class Family:
    """A model to look into.

    Attributes:
        build: (attn_implementation) -> model in eval mode; the same weights for each implementation.
        inputs: (padded) -> arguments of the forward pass; padded: the second text begins with padding.
        towers: its stacks of blocks.
        attention: globs of the modules that call SDPA; none where the family does not.
    """

    build: Callable[[str], nn.Module]
    inputs: Callable[[bool], dict[str, Tensor]]
    towers: tuple[Tower, ...]
    attention: tuple[str, ...] = ()


def build(model: str, config: transformers.PretrainedConfig, attention: str) -> nn.Module:
    """`transformers.<model>` with weights so large that no attention pattern is near uniform."""
    torch.manual_seed(0)
    built = getattr(transformers, model)._from_config(deepcopy(config), attn_implementation=attention)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif not name.endswith("A_log"):
                parameter.normal_(0.0, 0.2)
    return built.eval()


def text(padded: bool, length: int = LENGTH) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens, mask = torch.randint(1, IMAGE_TOKEN, (BATCH, length)), torch.ones(BATCH, length, dtype=torch.long)
    if padded:
        tokens[1, :PADS], mask[1, :PADS] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def tokens_only(padded: bool) -> dict[str, Tensor]:
    return {"input_ids": text(padded)["input_ids"]}


def text_pair(padded: bool) -> dict[str, Tensor]:
    return text(padded) | {"decoder_input_ids": torch.randint(1, IMAGE_TOKEN, (BATCH, LENGTH - 2))}


def text_and_image(padded: bool) -> dict[str, Tensor]:
    return text(padded) | {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def image_in_text(padded: bool) -> dict[str, Tensor]:
    batch = text(padded, LENGTH + PATCHES)
    batch["input_ids"][:, PADS + 1 : PADS + 1 + PATCHES] = IMAGE_TOKEN
    return batch | {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def text_and_patches(padded: bool) -> dict[str, Tensor]:
    """Two images of different shape, the smaller one padded to 16 patches."""
    return text(padded) | {
        "pixel_values": torch.randn(BATCH, PATCHES, 3 * 8 * 8),
        "pixel_attention_mask": torch.tensor([[1] * 16, [1] * 12 + [0] * 4]),
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


def text_and_tiles(padded: bool) -> dict[str, Tensor]:
    """One image a text, of one tile and of two; only the tokens from the image token on see it."""
    batch = text(padded)
    batch["input_ids"][:, PADS + 1] = IMAGE_TOKEN
    tiles = torch.tensor([[[1, 0]], [[1, 1]]])
    seen = torch.zeros(BATCH, LENGTH, 1, 2, dtype=torch.long)
    seen[:, PADS + 1 :] = tiles[:, None]
    return batch | {
        "pixel_values": torch.randn(BATCH, 1, 2, 3, 32, 32),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": tiles,
        "cross_attention_mask": seen,
    }


WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = WIDTH | {"vocab_size": VOCAB, "max_position_embeddings": 64}
GROUPED = ENCODER | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PIXELS = {"image_size": 32, "patch_size": 8}
MLLAMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 4,
    "max_num_tiles": 2,
    "intermediate_layers_indices": [0, 1],
    "vision_output_dim": 96,
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}
DECODER_TOWER = (Tower("model.layers.*", norm="model.norm"),)


def decoder(kind: str, **options: Any) -> Family:
    """A causal language model of the Llama layout."""
    config = getattr(transformers, options.pop("config", f"{kind}Config"))(**GROUPED | options)
    attention = () if kind == "Gemma2" else ("model.layers.*.self_attn",)
    return Family(partial(build, f"{kind}ForCausalLM", config), text, DECODER_TOWER, attention)


def gpt2() -> Family:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    tower = Tower("transformer.h.*", norm="transformer.ln_f")
    return Family(partial(build, "GPT2LMHeadModel", config), text, (tower,), ("transformer.h.*.attn",))


def mamba() -> Family:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, **SPECIAL
    )
    tower = Tower("backbone.layers.*", norm="backbone.norm_f", begins_with_input=False)
    return Family(partial(build, "MambaForCausalLM", config), tokens_only, (tower,))


def t5() -> Family:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
    )
    towers = (
        Tower("encoder.block.*", "encoder_hidden_states", "encoder.final_layer_norm"),
        Tower("decoder.block.*", "decoder_hidden_states", "decoder.final_layer_norm"),
    )
    attention = ("**.SelfAttention", "**.EncDecAttention")
    return Family(partial(build, "T5ForConditionalGeneration", config), text_pair, towers, attention)


def bert() -> Family:
    config = transformers.BertConfig(**ENCODER, pad_token_id=0)
    return Family(
        partial(build, "BertModel", config),
        text,
        (Tower("encoder.layer.*"),),
        ("encoder.layer.*.attention.self",),
    )


def two_towers(kind: str, inputs: Callable[[bool], dict[str, Tensor]], vision: dict[str, Any]) -> Family:
    """CLIP and its like: a text and a vision encoder."""
    config = getattr(transformers, f"{kind}Config")(
        text_config=ENCODER | SPECIAL, vision_config=WIDTH | {"patch_size": 8} | vision
    )
    towers = (
        Tower("text_model.encoder.layers.*", "text_model_output.hidden_states"),
        Tower("vision_model.encoder.layers.*", "vision_model_output.hidden_states"),
    )
    return Family(
        partial(build, f"{kind}Model", config), inputs, towers, ("*_model.encoder.layers.*.self_attn",)
    )


def llava() -> Family:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GROUPED),
        vision_config=transformers.CLIPVisionConfig(**WIDTH, **PIXELS),
        image_token_index=IMAGE_TOKEN,
    )
    towers = (
        Tower("model.vision_tower.encoder.layers.*", None),
        Tower("model.language_model.layers.*", norm="model.language_model.norm"),
    )
    return Family(
        partial(build, "LlavaForConditionalGeneration", config), image_in_text, towers, ("**.self_attn",)
    )


def mllama() -> Family:
    """One layer of self-attention and one of cross-attention in the text tower, vision of two stages."""
    config = transformers.MllamaConfig(
        image_token_index=IMAGE_TOKEN,
        text_config=GROUPED | {"cross_attention_layers": [1]},
        vision_config=MLLAMA_VISION | PIXELS,
    )
    towers = (
        Tower("model.vision_model.transformer.layers.*", None),
        Tower("model.vision_model.global_transformer.layers.*", None),
        Tower("model.language_model.layers.*", norm="model.language_model.norm"),
    )
    attention = ("**.self_attn", "**.cross_attn")
    return Family(partial(build, "MllamaForConditionalGeneration", config), text_and_tiles, towers, attention)


FAMILIES: dict[str, Callable[[], Family]] = {
    "llama": partial(decoder, "Llama"),
    "gpt2": gpt2,
    "gemma2": partial(decoder, "Gemma2", head_dim=8, sliding_window=4),
    "gemma3": partial(
        decoder,
        "Gemma3",
        config="Gemma3TextConfig",
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3": partial(decoder, "Qwen3", head_dim=12),
    "mixtral": partial(decoder, "Mixtral", num_local_experts=4, sliding_window=4),
    "mamba": mamba,
    "t5": t5,
    "bert": bert,
    "clip": partial(two_towers, "CLIP", text_and_image, {"image_size": 32}),
    "siglip2": partial(two_towers, "Siglip2", text_and_patches, {"num_patches": PATCHES}),
    "llava": llava,
    "mllama": mllama,
}
WITH_SDPA = [name for name in FAMILIES if name not in ("gemma2", "mamba")]


def value_of(output: Any) -> Tensor:
    """A module's output tensor, or the first of several."""
    return output if isinstance(output, Tensor) else output[0]


def modules(model: nn.Module, *globs: str) -> list[str]:
    """Names that match a glob where `*` stands for one component and `**` for any number."""
    found = [name for name, _ in model.named_modules() if any(fits(name, glob) for glob in globs)]
    assert found, (globs, [name for name, _ in model.named_modules()])
    return found


def fits(name: str, glob: str) -> bool:
    if glob.startswith("**."):
        return name.split(".")[-1] == glob[3:]
    parts, pattern = name.split("."), glob.split(".")
    return len(parts) == len(pattern) and all(fnmatchcase(*pair) for pair in zip(parts, pattern, strict=True))


@contextmanager
def hooked(model: nn.Module, names: list[str], read: Callable[..., Tensor]) -> Iterator[dict[str, Tensor]]:
    """What plain hooks see: a copy of `read(args, kwargs, output)` of each module; the last call counts."""
    seen: dict[str, Tensor] = {}

    def hook(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[name] = read(args, kwargs, output).detach().clone()

    handles = [
        model.get_submodule(name).register_forward_hook(partial(hook, name), with_kwargs=True)
        for name in names
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class SdpaCall:
    """What one call of `F.scaled_dot_product_attention` was given and gave: [B, N, T, H], [B, K, S, H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    raw: Tensor
    scores: Tensor
    output: Tensor


class SdpaLog(TorchFunctionMode):
    """Writes down each call of SDPA made while it is on, in order, with textbook scores beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SdpaCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.calls.append(sdpa_call(*args, **kwargs, output=output))
        return output


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    output: Tensor,
) -> SdpaCall:
    """Scores as the documentation of SDPA defines them, in float64."""
    assert dropout_p == 0.0 and (enable_gqa or key.shape[1] == query.shape[1])
    wide = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    raw = query.double() @ wide.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = raw
    if is_causal:
        scores = raw.masked_fill(~torch.ones(raw.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = raw.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = raw + attn_mask
    copies = (one.detach().clone() for one in (query, key, value, raw, scores, output))
    return SdpaCall(*copies)
