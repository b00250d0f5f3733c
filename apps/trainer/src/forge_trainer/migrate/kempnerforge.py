"""What of a configuration of KempnerForge depends on several of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from forge_trainer.migrate.convert import Converted, Stack
from forge_trainer.migrate.kempnerforge_keys import KEYS, VISION

BY_HAND = "has another structure here: write it by hand, see docs/vision.md"


def finish(made: Converted, given: Mapping[str, Any], ranks: int | None) -> None:
    """What depends on several keys."""
    for section in VISION:
        if section in given:
            made.problems.append(f"[{section}] {BY_HAND}")
    made.tree.setdefault("job", {}).setdefault("name", "converted")
    _defaults(made)
    _feed_forward(made, given)
    _batch(made, given, ranks)
    _optimizer(made, given)
    _schedule(made, given)
    _data(made, given)
    _evaluation(made, given)
    _rest(made, given)


def _defaults(made: Converted) -> None:
    """Where a default there is another one here, it is written out."""
    theirs = {
        "model.dim": 4096, "model.num_layers": 32, "model.vocab_size": 32_000, "model.max_tokens": 2048,
        "model.attention.num_heads": 32, "train.micro_batch": 8, "train.steps": 100_000, "job.seed": 42,
        "data.max_tokens": 2048, "data.workers": 4, "schedule.warmup_steps": 2000, "compile.enabled": True,
        "job.root": "checkpoints",
    }  # fmt: skip
    for key, value in theirs.items():
        table, name = made.tree, key.split(".")[-1]
        for one in key.split(".")[:-1]:
            table = table.setdefault(one, {})
        table.setdefault(name, value)


def _feed_forward(made: Converted, given: Mapping[str, Any]) -> None:
    dim, layers = made.tree["model"]["dim"], made.tree["model"]["num_layers"]
    multiplier = given.get("model.ffn_dim_multiplier", 1.0)
    hidden = given.get("model.ffn_hidden_dim") or 256 * ceil(int(4 * dim * 2 / 3 * multiplier) / 256)
    activation = given.get("model.activation", "silu")
    dense = (
        {"dim": hidden} if activation == "silu" else {"type": "mlp", "dim": hidden, "activation": activation}
    )
    experts = given.get("model.num_experts", 0)
    made.put("model.ffn", dense)
    if not experts:
        return
    width = 16 * ceil(hidden * given.get("model.moe_expert_ffn_multiplier", 1.0) / 16)
    mixture: dict[str, Any] = {
        "type": "moe",
        "dim": width,
        "num_experts": experts,
        "top_k": given.get("model.moe_top_k", 2),
        "shared_experts": given.get("model.moe_shared_experts", 0),
        "router": _router(given),
    }
    if activation != "silu":
        mixture |= {"activation": activation, "gated": False}
    if capacity := given.get("model.moe_capacity_factor", 0.0):
        mixture["capacity_factor"] = capacity
    if given.get("model.moe_gradient_scale"):
        mixture["scale_gradients"] = True
    every = given.get("model.moe_frequency", 1)
    if every == 1:
        made.put("model.ffn", mixture)
    elif every <= layers:
        made.put("model.overrides", [{"layers": f"{every - 1}::{every}", "ffn": mixture}])


def _router(given: Mapping[str, Any]) -> dict[str, Any]:
    router: dict[str, Any] = {
        "z_loss_weight": given.get("model.moe_router_z_loss_weight", 0.0),
        "sequence_balance_weight": given.get("model.moe_sequence_aux_loss_weight", 0.0),
    }
    balance = given.get("model.moe_aux_loss_weight", 0.01)
    if given.get("model.moe_router", "softmax_topk") == "softmax_topk":
        return router | {"type": "softmax", "batch_balance_weight": balance}
    schedule = {"constant": "constant", "cosine_decay": "cosine", "linear_warmup": "linear_warmup"}
    kind = schedule[given.get("model.moe_bias_schedule", "constant")]
    length = {} if kind == "constant" else {"bias_schedule_steps": given.get("train.max_steps", 100_000)}
    return router | {"type": "sigmoid", "bias_schedule": kind, **length}


def _batch(made: Converted, given: Mapping[str, Any], ranks: int | None) -> None:
    """Sequences of a step: there a product of what a rank does, here a number that no rank changes."""
    mesh = made.tree.get("mesh", {})
    others = mesh.get("tp", 1) * mesh.get("pp", 1) * mesh.get("cp", 1)
    copies = mesh.get("dp_replicate", 1)
    shard = mesh.get("dp_shard", -1)
    experts = given.get("distributed.ep", 1)
    if experts > 1:
        made.put("mesh.ep", experts)
        if shard != -1:
            shard *= experts
            made.put("mesh.dp_shard", shard)
            made.notes.append(
                f"distributed.ep = {experts}: its ranks are among mesh.dp_shard, with data of their own"
            )
    if shard == -1:
        if ranks is None:
            made.problems.append(
                "distributed.dp_shard = -1: the global batch follows from the ranks: give --ranks"
            )
            return
        if ranks % (others * copies):
            made.problems.append(
                f"{ranks} ranks are no multiple of tp x pp x cp x dp_replicate = {others * copies}"
            )
            return
        shard = ranks // (others * copies)
    readers = shard * copies
    each = made.tree["train"]["micro_batch"] * given.get("train.grad_accum_steps", 1)
    made.put("train.global_batch", each * readers)


def _optimizer(made: Converted, given: Mapping[str, Any]) -> None:
    kind = made.tree.setdefault("optimizer", {}).setdefault("type", "adamw")
    made.tree["optimizer"].setdefault("lr", 3e-4)
    made.tree["optimizer"].setdefault("weight_decay", 0.1)
    if "optimizer.eps" in given and kind != "lion":
        made.put("optimizer.eps", given["optimizer.eps"])
    if kind == "lion":
        made.tree["optimizer"].setdefault("betas", [0.9, 0.95])
    if kind == "muon":
        made.put("optimizer.scale", "original")
        made.put("optimizer.momentum", given.get("optimizer.muon_momentum", 0.95))
        made.put("optimizer.ns_steps", given.get("optimizer.muon_ns_steps", 5))
        if (lr := given.get("optimizer.muon_adam_lr")) is not None:
            made.put("optimizer.adamw_lr", lr)
    if kind == "schedule-free-adamw":
        made.put("schedule.warmup_steps", given.get("optimizer.schedule_free_warmup_steps", 0))


def _schedule(made: Converted, given: Mapping[str, Any]) -> None:
    name = given.get("scheduler.name", "cosine")
    if made.tree["optimizer"]["type"] == "schedule-free-adamw":
        name = "constant"
    schedule = made.tree.setdefault("schedule", {})
    schedule["type"] = name
    if name in ("cosine", "linear", "rex", "wsd"):
        schedule["floor"] = given.get("scheduler.min_lr_ratio", 0.1)
    rest = made.tree["train"]["steps"] - schedule.get("warmup_steps", 0)
    decay = given.get("scheduler.decay_steps")
    if name == "wsd":
        shapes = {"cosine": "cosine", "linear": "linear", "sqrt": "1-sqrt"}
        schedule["shape"] = shapes[given.get("scheduler.wsd_decay_type", "cosine")]
        stable = given.get("scheduler.stable_steps")
        schedule["decay_steps"] = (
            decay if decay is not None else rest - stable if stable is not None else rest
        )
    elif decay not in (None, rest) and name not in ("constant", "none"):
        made.problems.append(
            f"scheduler.decay_steps = {decay}: a decay ends with the run here; set train.steps to it"
        )


def _data(made: Converted, given: Mapping[str, Any]) -> None:
    if path := given.get("data.tokenizer_path"):
        made.put("data.tokenizer", {"type": "hf", "path": path})
    listed = given.get("data.datasets") or [_only(given)]
    sources = [made_of for one in listed if (made_of := _source(one, given))]
    if not sources:
        made.problems.append("no data is configured (there: random tokens): add [[data.sources]]")
        return
    if any(source.get("streaming") for source in sources):
        made.put("data.workers", min(1, made.tree["data"]["workers"]))
    if any(source["type"] == "tokens" for source in sources):
        made.notes.append(
            "folders of .npy files: make stores of them with `forge-data import FILES --out STORE`"
        )
    temperature = given.get("data.mix_temperature", 1.0)
    for source in sources:
        source["weight"] = float(source.get("weight", 1.0)) ** (1 / temperature)
    made.put("data.sources", sources)
    phases = given.get("data.phases") or _annealing(given)
    if phases:
        made.put("data.phases", [_phase(phase) for phase in phases])
    if "data.pack_sequences" in given and not given["data.pack_sequences"]:
        made.notes.append("data.pack_sequences = False: documents are always packed; none is attended across")


def _only(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "path": given.get("data.dataset_path", ""),
        "hf_name": given.get("data.hf_dataset_name"),
        "hf_config": given.get("data.hf_dataset_config"),
    }


def _source(one: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any] | None:
    named = {key: one[key] for key in ("name", "weight") if one.get(key)}
    if name := one.get("hf_name"):
        made = {"type": "hf", "path": name, "split": given.get("data.hf_dataset_split", "train"), **named}
        made["text"] = given.get("data.hf_dataset_text_field", "text")
        if subset := one.get("hf_config"):
            made["subset"] = subset
        return made | ({"streaming": True} if given.get("data.hf_streaming") else {})
    return {"type": "tokens", "path": one["path"], **named} if one.get("path") else None


def _annealing(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not given.get("data.anneal_weights"):
        return []
    return [
        {
            "start_step": given.get("data.anneal_start_step", 0),
            "dataset_weights": given["data.anneal_weights"],
        }
    ]


def _phase(phase: Mapping[str, Any]) -> dict[str, Any]:
    made = {"start_step": phase["start_step"], "weights": phase.get("dataset_weights", {})}
    return made | ({"lr_scale": phase["lr_scale"]} if "lr_scale" in phase else {})


def _evaluation(made: Converted, given: Mapping[str, Any]) -> None:
    if not given.get("eval.enabled", False):
        made.put("eval.every_steps", 0)
        return
    made.put("eval.every_steps", given.get("eval.interval", 1000))
    only = {
        "path": given.get("eval.dataset_path"),
        "hf_name": given.get("eval.hf_dataset_name"),
        "hf_config": given.get("eval.hf_dataset_config"),
    }
    split = {"data.hf_dataset_split": given.get("eval.hf_dataset_split", "validation")}
    samples = given.get("eval.steps", 50) * made.tree["train"]["micro_batch"]
    if source := _source(only, dict(given) | split | {"data.hf_streaming": False}):
        made.put("eval.sets.validation", {"sources": [source], "samples": samples})


def _rest(made: Converted, given: Mapping[str, Any]) -> None:
    precision = given.get("train.mixed_precision", "bf16")
    if precision == "fp16":
        made.problems.append("train.mixed_precision = 'fp16': Forge computes in bfloat16 or float32")
    elif precision == "fp8":
        made.put("fp8.recipe", "tensorwise")
    else:
        made.put("precision.compute", {"bf16": "bfloat16", "fp32": "float32"}[precision])
    if precision == "bf16":
        made.notes.append(
            "master weights and moments are float32 here: precision.pure_bf16 = true is what was there"
        )
    backend = given.get("model.sdpa_backend", "auto")
    if backend != "auto":
        made.put("job.attention_kernels", [backend])
    keep = given.get("checkpoint.keep_last_n", 3)
    if keep >= 2:
        made.put("checkpoint.keep", keep)
    else:
        made.notes.append(
            f"checkpoint.keep_last_n = {keep}: at least 2 are kept; keep_every_steps keeps for good"
        )
    if window := given.get("checkpoint.dyn_ckpt_window"):
        made.put(
            "checkpoint.dense",
            [{"from_step": max(1, window.get("start", 0)), "to_step": window.get("stop", 512)}],
        )
    if folder := given.get("checkpoint.load_path"):
        made.problems.append(
            f"checkpoint.load_path = {folder!r}: their checkpoints are torch DCP: forge-ckpt import"
        )
    if given.get("metrics.enable_wandb"):
        name = {"name": given["metrics.wandb_run_name"]} if given.get("metrics.wandb_run_name") else {}
        made.put("track.wandb", {"project": given.get("metrics.wandb_project", "kempnerforge"), **name})
    if given.get("profiling.enable"):
        first, end = given.get("profiling.start_step", 5), given.get("profiling.end_step", 8)
        made.put("hooks.profile", {"type": "profile", "first_step": first, "steps": end - first})


KEMPNERFORGE = Stack("KempnerForge", KEYS, finish)
