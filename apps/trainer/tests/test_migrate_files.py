"""Each run file of KempnerForge, rebuilt from its values, converts, or is refused with the reason."""

import pytest
from forge_config import load
from forge_config.toml import dumps
from forge_trainer.cli import main
from forge_trainer.config.checks import checks, vocabulary_covers_the_tokenizer
from forge_trainer.config.job import Job

TOKENS = {"dataset_path": "/data/fineweb", "file_pattern": "tokenized_*.bin", "prefetch_factor": 2}
LLAMA = {
    "vocab_size": 128256,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.3,
    "max_seq_len": 4096,
    "rope_theta": 500000.0,
}
M7 = LLAMA | {"dim": 4096, "n_layers": 32, "n_heads": 32}
M13 = LLAMA | {"dim": 5120, "n_layers": 40, "n_heads": 40}
M29 = LLAMA | {"dim": 6144, "n_layers": 56, "n_heads": 48}
M70 = {key: value for key, value in LLAMA.items() if key != "ffn_dim_multiplier"}
M70 |= {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_hidden_dim": 28672}
MOE = LLAMA | {"dim": 2048, "n_layers": 24, "n_heads": 16, "n_kv_heads": 4, "num_experts": 8, "moe_top_k": 2}
MOE |= {"moe_frequency": 1, "moe_router": "softmax_topk", "moe_aux_loss_weight": 0.01}
SMALL = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 50257, "max_seq_len": 1024}
TINY = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 32000, "max_seq_len": 512}
WIKITEXT = {
    "hf_dataset_name": "wikitext",
    "hf_dataset_config": "wikitext-103-raw-v1",
    "hf_streaming": True,
    "tokenizer_path": "/models/gpt2/tokenizer.json",
}
EVALUATED = {"enabled": True, "interval": 200, "steps": 20}
EVALUATED |= {"hf_dataset_name": "wikitext", "hf_dataset_config": "wikitext-103-raw-v1"}


def run(model, batch, steps, accumulated, layout, data=TOKENS, warmup=10, **others):
    """A file: sizes, sequences of a rank and micro-batches, and whatever else it sets."""
    train = {"batch_size": batch, "seq_len": model["max_seq_len"], "max_steps": steps}
    train |= {"grad_accum_steps": accumulated, "activation_checkpointing": "full", "mixed_precision": "bf16"}
    out = {"model": model, "train": train | others.pop("train", {}), "data": data, "distributed": layout}
    out["scheduler"] = {"name": "cosine", "warmup_steps": warmup, "min_lr_ratio": 0.1}
    out["optimizer"] = {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.95], "fused": True}
    out["checkpoint"] = {"dir": "checkpoints/run", "interval": 100, "keep_last_n": 2}
    return {name: out.get(name, {}) | table for name, table in ({name: {} for name in out} | others).items()}


MUON = {"name": "muon", "lr": 3e-3, "muon_momentum": 0.95, "muon_ns_steps": 5}
CHUNKED = {"loss_fn": "chunked_cross_entropy", "ce_chunk_size": 4096, "z_loss_weight": 1e-4}
AUTO, PP = {"dp_shard": -1}, {"pp_schedule": "1f1b", "dp_replicate": 1}
FILES = {  # the file, its ranks, and the global batch that it has there
    "7b": (run(M7, 8, 100_000, 4, AUTO, warmup=2000), 4, 128),
    "7b_12gpu_tp4": (run(M7, 4, 500, 8, {"dp_shard": 3, "tp": 4}), 12, 96),
    "7b_16gpu_adamw": (run(M7, 8, 100_000, 4, AUTO, warmup=2000), 16, 512),
    "7b_16gpu_fp8": (run(M7, 4, 50, 4, AUTO, train={"mixed_precision": "fp8"}), 16, 256),
    "7b_16gpu_muon": (run(M7, 4, 50, 4, AUTO, train=CHUNKED, optimizer=MUON), 16, 256),
    "7b_32gpu_fsdp": (run(M7, 4, 50, 4, AUTO), 32, 512),
    "13b_24gpu_validation": (
        run(
            *(M13, 2, 1000, 4, {"dp_shard": 6, "tp": 4}),
            TOKENS | {"tokenizer_path": "/models/llama/tokenizer.json"},
            eval=EVALUATED,
            profiling={"enable": True, "start_step": 5, "end_step": 10},
            metrics={"enable_wandb": True, "wandb_run_name": "13b-24gpu-validation"},
        ),
        24,
        48,
    ),
    "13b_32gpu_tp4_pp2": (run(M13, 4, 20, 4, PP | {"dp_shard": 4, "tp": 4, "pp": 2}, warmup=50), 32, 64),
    "29b_32gpu_tp4_pp2": (run(M29, 1, 20, 8, PP | {"dp_shard": 4, "tp": 4, "pp": 2}, warmup=50), 32, 32),
    "70b_32gpu_tp4": (run(M70, 2, 20, 4, {"dp_shard": 8, "tp": 4}, warmup=50), 32, 64),
    "70b_32gpu_tp4_pp4": (run(M70, 1, 20, 4, PP | {"dp_shard": 2, "tp": 4, "pp": 4}, warmup=50), 32, 8),
    "moe_8gpu_stress": (run(MOE, 10, 20, 1, {"dp_shard": 2, "tp": 4}, warmup=5), 8, 20),
    "moe_ep_32gpu": (run(MOE, 12, 20, 1, {"dp_shard": 4, "tp": 4, "ep": 2}, warmup=5), 32, 48),
    "hf_wikitext": (run(SMALL, 16, 500, 1, AUTO, WIKITEXT, warmup=50), 4, 64),
    "wikitext_test": (run(SMALL, 16, 500, 1, AUTO, {"dataset_path": "data/wikitext103"}, warmup=50), 4, 64),
}
NO_DATA = "no data is configured (there: random tokens)"
REFUSED = {
    "debug": (run(TINY, 4, 100, 1, AUTO, {"num_workers": 2}), NO_DATA),
    "debug_moe": (run(TINY | {"num_experts": 4, "moe_frequency": 2}, 4, 50, 1, AUTO, {}, 5), NO_DATA),
    "default": (run(M7 | {"vocab_size": 32000}, 8, 100_000, 4, AUTO, {}, 2000), NO_DATA),
    "moe_24gpu": (run(MOE, 2, 100, 32, {"dp_shard": 6, "tp": 4}, {"num_workers": 4}), NO_DATA),
}
COCO = {"hf_dataset_name": "nlphuji/coco_karpathy", "hf_dataset_text_field": "caption"}
COCO |= {"hf_dataset_image_field": "image", "hf_image_size": 224, "tokenizer_path": "gpt2"}
ENCODER, SIGLIP = {"type": "random", "feature_dim": 1024}, {"type": "siglip2", "path": "google/siglip2"}
CROSS, MIXTURE, MOMA = {"arch": "cross_attention"}, {"arch": "mot"}, {"arch": "moma"}
STAGES = {"freeze_schedule": [{"start_step": 100, "specs": [{"module": "adapter", "frozen": False}]}]}
VISION = {
    "vlm_7b": (M7, {}, ENCODER, {}),
    "vlm_7b_ac": (M7, {}, ENCODER, {}),
    "vlm_7b_cross_attn": (M7, CROSS, ENCODER, {}),
    "vlm_7b_freeze_schedule": (M7, STAGES, SIGLIP, {}),
    "vlm_7b_moma": (M7, MOMA, ENCODER, {}),
    "vlm_7b_mot": (M7, MIXTURE, ENCODER, {}),
    "vlm_7b_siglip2": (M7, {}, SIGLIP, {}),
    "vlm_7b_siglip2_cross_attn": (M7, CROSS, SIGLIP, {}),
    "vlm_debug": (TINY, {}, ENCODER, {}),
    "vlm_debug_moe": (TINY | {"num_experts": 4}, {}, ENCODER, {}),
    "vlm_debug_moma": (TINY, MOMA, ENCODER, {}),
    "vlm_debug_mot": (TINY, MIXTURE, ENCODER, {}),
    "vlm_video_webvid": (M7, {}, SIGLIP, {"video": {"data_root": "/data/webvid", "fps": 2.0}}),
}


def converted(tmp_path, tree, ranks=4):
    (tmp_path / "theirs.toml").write_text(dumps(tree))
    out = tmp_path / "ours.toml"
    flags = ["--from", "kempnerforge", "--ranks", str(ranks), "--out", str(out)]
    return main(["convert", str(tmp_path / "theirs.toml"), *flags]), out


@pytest.mark.parametrize("name", FILES)
def test_run_file_of_text_converts(tmp_path, name, capsys):
    theirs, ranks, batch = FILES[name]
    code, out = converted(tmp_path, theirs, ranks)
    if theirs["scheduler"]["warmup_steps"] >= theirs["train"]["max_steps"]:  # short benchmarks
        assert code == 78 and "a warm-up of 50 steps (scheduler.warmup_steps" in capsys.readouterr().err
        code, out = converted(tmp_path, theirs | {"scheduler": {"warmup_steps": 5}}, ranks)
    assert code == 0, capsys.readouterr().err
    here = [check for check in checks if check is not vocabulary_covers_the_tokenizer]
    job = load(Job, out, (), here).value
    model, mesh = theirs["model"], theirs["distributed"]
    assert (job.model.dim, job.model.num_layers, job.model.vocab_size) == (
        model["dim"],
        model["n_layers"],
        model["vocab_size"],
    )
    heads = job.model.attention
    assert (heads.num_heads, heads.num_kv_heads) == (model["n_heads"], model["n_kv_heads"])
    hidden = model.get("ffn_hidden_dim") or int(8 / 3 * model["dim"] * model.get("ffn_dim_multiplier", 1.0))
    assert 0 <= job.model.ffn.dim - hidden < 256
    assert job.model.rope.theta == model.get("rope_theta", 10000.0)
    assert (job.mesh.tp, job.mesh.pp, job.mesh.ep) == tuple(mesh.get(key, 1) for key in ("tp", "pp", "ep"))
    assert (job.train.global_batch, job.train.steps) == (batch, theirs["train"]["max_steps"])


@pytest.mark.parametrize("name", REFUSED)
def test_run_file_without_data_is_refused(tmp_path, name, capsys):
    theirs, said = REFUSED[name]
    code, out = converted(tmp_path, theirs, 24)
    assert code == 78 and not out.exists() and said in capsys.readouterr().err


@pytest.mark.parametrize("name", VISION)
def test_run_file_of_images_is_refused(tmp_path, name, capsys):
    model, kind, encoder, others = VISION[name]
    tree = run(model, 8, 200, 1, AUTO, COCO)
    tree |= {"vision_encoder": encoder, "vlm": {"arch": "joint_decoder", "max_text_len": 512} | kind} | others
    code, out = converted(tmp_path, tree)
    said = capsys.readouterr().err
    assert code == 78 and not out.exists()
    for section in ("vision_encoder", "vlm", *others):
        assert f"[{section}] has another structure here: write it by hand, see docs/vision.md" in said
