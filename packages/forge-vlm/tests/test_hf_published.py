"""Whether the files of published models can be followed: keys as they are there, sizes too, no weights."""

import json

import pytest
from forge_vlm.hf.models import model_differences, model_from_hf

transformers = pytest.importorskip("transformers")

SQUARES = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
PUBLISHED = {
    "Llava": {
        "model_type": "llava", "ignore_index": -100, "image_token_index": 32000, "pad_token_id": 32001,
        "projector_hidden_act": "gelu", "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
            "vocab_size": 32064,
        },
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336,
            "num_hidden_layers": 24,
            "intermediate_size": 4096, "num_attention_heads": 16, "patch_size": 14, "projection_dim": 768,
            "vocab_size": 32000,
        },
        "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32064,
    },
    "PaliGemma": {
        "model_type": "paligemma", "_vocab_size": 257152, "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0,
        "hidden_size": 2048, "ignore_index": -100, "image_token_index": 257152, "projection_dim": 2048,
        "text_config": {
            "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8,
            "num_hidden_layers": 18, "num_image_tokens": 256, "num_key_value_heads": 1, "vocab_size": 257216,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "num_image_tokens": 256, "patch_size": 14,
            "projection_dim": 2048, "projector_hidden_act": "gelu_fast", "vision_use_head": False,
        },
    },
    "SmolVLM": {
        "model_type": "smolvlm", "image_token_id": 49190, "pad_token_id": 128002, "scale_factor": 4,
        "use_cache": False, "use_reentrant_checkpointing": False, "vocab_size": 49280,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama", "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
            "is_llama_config": True, "max_position_embeddings": 8192, "neftune_noise_alpha": 0.0,
            "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "pad_token_id": 2,
            "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05,
            "rope_interleaved": False, "rope_theta": 100000, "use_resampler": False, "vocab_size": 49280,
        },
        "vision_config": {
            "model_type": "smolvlm_vision", "hidden_size": 768, "image_size": 512, "num_attention_heads": 12,
            "max_image_size": {"longest_edge": 512}, "patch_size": 16, "size": {"longest_edge": 2048},
            "tie_word_embeddings": False, "use_base_siglip": False,
        },
    },
    "Mllama": {
        "model_type": "mllama", "image_token_index": 128256,
        "text_config": {
            "model_type": "mllama_text_model", "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            "dropout": 0, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                "original_max_position_embeddings": 8192,
            },
        },
        "vision_config": {
            "model_type": "mllama_vision_model", "attention_heads": 16, "hidden_act": "gelu",
            "hidden_size": 1280, "image_size": 560, "intermediate_layers_indices": [3, 7, 15, 23, 30],
            "intermediate_size": 5120,
            "max_num_tiles": 4, "norm_eps": 1e-05, "num_channels": 3, "num_global_layers": 8,
            "num_hidden_layers": 32, "patch_size": 14, "supported_aspect_ratios": SQUARES,
            "vision_output_dim": 7680,
        },
    },
}  # fmt: skip
"""What files of llava-1.5-7b, paligemma-3b, SmolVLM2-500M, Llama-3.2-11B-Vision say, as far as is known."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_files_of_published_models_mean_what_the_classes_of_transformers_make_of_them(kind):
    read = model_from_hf(PUBLISHED[kind])
    made = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(PUBLISHED[kind])))
    assert model_differences(read, model_from_hf(json.loads(json.dumps(made.to_dict())))) == []
    assert model_differences(read, model_from_hf(read.hugging_face().config())) == []
    tokens = {"Llava": 576, "PaliGemma": 256, "SmolVLM": 64, "Mllama": 1601}
    assert read.image_tokens == tokens[kind]
