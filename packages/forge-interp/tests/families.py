"""One table of families of transformers beside those of the zoo, and forty more for the slow tests."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .zoo import ENCODER, FAMILIES, GROUPED, PIXELS, SPECIAL, VOCAB, Family, Tower, build, modules, text


def image(padded: bool) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def speech(padded: bool) -> dict[str, Tensor]:
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": sound, "decoder_input_ids": text(False, 5)["input_ids"]}


def row(
    kind: str,
    options: dict[str, Any],
    blocks: str = "",
    inputs: Callable[[bool], dict[str, Tensor]] = text,
    model: str = "ForCausalLM",
) -> Family:
    """`blocks` is their glob; without, they are the first list of two."""
    config = getattr(transformers, f"{kind}Config")(**options)
    model = {"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(kind + model, kind + model)
    return Family(partial(build, model, config), inputs, (Tower(blocks),) if blocks else ())


N = 4
WIDE = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": N} | SPECIAL
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": N, "n_positions": 64} | SPECIAL
ROTARY = GPT | {"rotary_dim": 4}
NEO = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": N, "window_size": 4} | SPECIAL
NEO |= {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": N, "max_seq_len": 64}
XGLM = {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": N, "ffn_dim": 48} | SPECIAL
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SINKS = MOE | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4}
SINKS |= {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
SINKS |= {"layer_types": ["sliding_attention", "full_attention"]}
DEBERTA = ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}
DISTIL = {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": N}
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": N,
    "decoder_attention_heads": N, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 10,
    "decoder_start_token_id": 1,
}  # fmt: skip
MAMBA = {"num_heads": N, "head_dim": 16, "state_size": 8, "n_groups": 1}
BIRD = ENCODER | {"attention_type": "original_full"} | SPECIAL
MODERN = ENCODER | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2}
HYBRID = GROUPED | {"num_hidden_layers": 3, "attention_window_size": 4}
NARROW = GROUPED | {"head_dim": 8}
WINDOW = NARROW | {"sliding_window": 4}
GROUPS = GROUPED | {"new_decoder_architecture": True, "num_kv_heads": 2}
EXPERTS = GROUPED | {"num_local_experts": 4}
OPT |= ENCODER | SPECIAL

MORE: dict[str, Callable[[], Family]] = {
    "Gemma": partial(row, "Gemma", NARROW),
    "Mistral": partial(row, "Mistral", WINDOW),
    "Phi3": partial(row, "Phi3", GROUPED),
    "Olmo2": partial(row, "Olmo2", GROUPED),
    "OPT": partial(row, "OPT", OPT),
    "GPTNeoX": partial(row, "GPTNeoX", GROUPED),
    "DeepseekV3": partial(row, "DeepseekV3", GROUPED | LATENT),
    "Falcon": partial(row, "Falcon", GROUPS),
    "Bloom": partial(row, "Bloom", WIDE),
    "Mamba2": partial(row, "Mamba2", GROUPED | MAMBA),
    "RecurrentGemma": partial(row, "RecurrentGemma", HYBRID, "model.layers.*"),
    "GptOss": partial(row, "GptOss", SINKS),
    "ViT": partial(row, "ViT", GROUPED | PIXELS, "", image, "Model"),
    "Dinov2": partial(row, "Dinov2", GROUPED | PIXELS, "", image, "Model"),
    "Whisper": partial(row, "Whisper", GROUPED | WHISPER, "*coder.layers.*", speech, "Model"),
    "GPTJ": partial(row, "GPTJ", ROTARY),
    "GPTNeo": partial(row, "GPTNeo", NEO),
    "CodeGen": partial(row, "CodeGen", ROTARY),
    "Mpt": partial(row, "Mpt", MPT),
    "XGLM": partial(row, "XGLM", XGLM),
    "DebertaV2": partial(row, "DebertaV2", DEBERTA, "", text, "Model"),
}
DECODERS = {
    "Llama": GROUPED, "Mistral": GROUPED, "Qwen2": GROUPED, "Qwen3": GROUPED, "Phi": GROUPED,
    "Phi3": GROUPED, "StableLm": GROUPED, "Starcoder2": GROUPED, "Olmo": GROUPED, "Olmo2": GROUPED,
    "Cohere": GROUPED, "Cohere2": GROUPED, "Gemma": NARROW, "Gemma2": WINDOW, "Granite": GROUPED,
    "Glm": NARROW, "Glm4": NARROW, "Helium": NARROW, "Nemotron": GROUPED, "SmolLM3": GROUPED,
    "Mixtral": EXPERTS, "Qwen2Moe": MOE, "Qwen3Moe": MOE, "Olmoe": MOE, "GPTNeoX": ENCODER | SPECIAL,
    "GPT2": GPT, "GPTBigCode": GPT, "GPTJ": ROTARY, "CodeGen": ROTARY, "GPTNeo": NEO, "Bloom": WIDE,
    "Mpt": MPT, "OPT": OPT, "XGLM": XGLM, "BioGpt": ENCODER | SPECIAL,
    "Falcon": ENCODER | SPECIAL | {"multi_query": True}, "GptOss": SINKS,
}  # fmt: skip
ENCODERS = {
    "Bert": ENCODER, "Roberta": ENCODER | SPECIAL, "Electra": ENCODER | {"embedding_size": 32},
    "DistilBert": DISTIL, "ModernBert": MODERN, "DebertaV2": ENCODER, "MPNet": ENCODER | SPECIAL,
    "BigBird": BIRD, "XLMRoberta": ENCODER | SPECIAL, "Camembert": ENCODER | SPECIAL,
}  # fmt: skip
SLOW = {f"{kind}, slow": partial(row, kind, options) for kind, options in DECODERS.items()}
SLOW |= {
    f"{kind}, slow": partial(row, kind, options, "", text, "Model") for kind, options in ENCODERS.items()
}
assert len(SLOW) >= 40
TABLE = FAMILIES | MORE | SLOW


def made(name: str, attention: str = "sdpa") -> nn.Module:
    """With its own attention where the family has no SDPA, as the error of transformers says."""
    try:
        return TABLE[name]().build(attention)
    except ValueError:
        return TABLE[name]().build("eager")


def blocks(name: str, model: nn.Module) -> list[str]:
    towers = TABLE[name]().towers
    if towers:
        return modules(model, *(tower.blocks for tower in towers))
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    first = next(path for path in lists if len(model.get_submodule(path)) == 2)
    return [f"{first}.0", f"{first}.1"]
