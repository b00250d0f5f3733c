"""Converts settings of KempnerForge that depend on several keys."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, gcd
from typing import Any

from forge_trainer.migrate.convert import Converted, Stack
from forge_trainer.migrate.kempnerforge_data import convert_data, convert_evaluation
from forge_trainer.migrate.kempnerforge_keys import KEYS, NUMBERS, VISION

BY_HAND = "has another structure here: write it by hand, see docs/vision.md"
DEFAULT_HEADS = 32


def finish(converted: Converted, settings: Mapping[str, Any], ranks: int | None) -> None:
    """Convert settings that depend on several keys."""
    for section in VISION:
        if section in settings:
            converted.problems.append(f"[{section}] {BY_HAND}")
    converted.tree.setdefault("job", {}).setdefault("name", "converted")
    _defaults(converted)
    _key_value_heads(converted, settings)
    _norms(converted, settings)
    _feed_forward(converted, settings)
    _batch(converted, settings, ranks)
    _optimizer(converted, settings)
    _schedule(converted, settings)
    convert_data(converted, settings)
    convert_evaluation(converted, settings)
    _rest(converted, settings)


def _defaults(converted: Converted) -> None:
    """Write out defaults of KempnerForge that differ from the defaults of Forge."""
    theirs = {
        "model.dim": 4096, "model.num_layers": 32, "model.vocab_size": 32_000, "model.max_tokens": 2048,
        "model.attention.num_heads": 32, "train.micro_batch": 8, "train.steps": 100_000, "job.seed": 42,
        "data.max_tokens": 2048, "data.workers": 4, "schedule.warmup_steps": 2000, "compile.enabled": True,
        "job.root": "checkpoints",
    }  # fmt: skip
    for key, value in theirs.items():
        table, name = converted.tree, key.split(".")[-1]
        for one in key.split(".")[:-1]:
            table = table.setdefault(one, {})
        table.setdefault(name, value)


def _key_value_heads(converted: Converted, settings: Mapping[str, Any]) -> None:
    """Convert `n_kv_heads`: in KempnerForge its default is the default of `n_heads`, not the file's value."""
    heads = settings.get("model.n_heads", DEFAULT_HEADS)
    if "model.n_kv_heads" not in settings and heads != DEFAULT_HEADS and heads % DEFAULT_HEADS == 0:
        converted.put("model.attention.num_kv_heads", DEFAULT_HEADS)
        converted.notes.append(
            f"model.n_heads = {heads} without n_kv_heads trains with {DEFAULT_HEADS} key and value heads "
            "there, and so it does here"
        )


def _norms(converted: Converted, settings: Mapping[str, Any]) -> None:
    """Convert norms: there layer norms have a bias, and norms of queries and keys are always RMS norms."""
    if settings.get("model.norm_type") != "layernorm":
        return
    converted.put("model.norm.bias", True)
    if settings.get("model.qk_norm"):
        converted.problems.append(
            "model.qk_norm = true with norm_type = 'layernorm': there queries and keys have root mean square "
            "norms, here the norm of the model"
        )


def _feed_forward(converted: Converted, settings: Mapping[str, Any]) -> None:
    dim, layers = converted.tree["model"]["dim"], converted.tree["model"]["num_layers"]
    multiplier = settings.get("model.ffn_dim_multiplier", 1.0)
    hidden = settings.get("model.ffn_hidden_dim") or 256 * ceil(int(4 * dim * 2 / 3 * multiplier) / 256)
    activation = settings.get("model.activation", "silu")
    dense = (
        {"dim": hidden} if activation == "silu" else {"type": "mlp", "dim": hidden, "activation": activation}
    )
    experts = settings.get("model.num_experts", 0)
    converted.put("model.ffn", dense)
    if not experts:
        return
    width = 16 * ceil(hidden * settings.get("model.moe_expert_ffn_multiplier", 1.0) / 16)
    mixture: dict[str, Any] = {
        "type": "moe",
        "dim": width,
        "num_experts": experts,
        "top_k": settings.get("model.moe_top_k", 2),
        "shared_experts": min(1, shared := settings.get("model.moe_shared_experts", 0)),
        "router": _router(converted, settings),
    }
    if shared > 1:
        converted.notes.append(f"model.moe_shared_experts = {shared}: one is built there, and here")
    if activation != "silu":
        mixture |= {"activation": activation, "gated": False}
    if capacity := settings.get("model.moe_capacity_factor", 0.0):
        mixture["capacity_factor"] = capacity
    if settings.get("model.moe_gradient_scale"):
        mixture["scale_gradients"] = True
    every = settings.get("model.moe_frequency", 1)
    if every == 1:
        converted.put("model.ffn", mixture)
    elif every <= layers:
        converted.put("model.overrides", [{"layers": f"{every - 1}::{every}", "ffn": mixture}])


def _router(converted: Converted, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the router: there only sigmoid has a sequence loss, over a micro-batch; both weights count."""
    router: dict[str, Any] = {"z_loss_weight": settings.get("model.moe_router_z_loss_weight", 0.0)}
    balance = settings.get("model.moe_aux_loss_weight", 0.01)
    of_sequences = settings.get("model.moe_sequence_aux_loss_weight", 0.0)
    kinds = {"softmax_topk": "softmax", "sigmoid_topk": "sigmoid"}
    kind = converted.one_of("model.moe_router", settings.get("model.moe_router", "softmax_topk"), kinds)
    if kind != "sigmoid":
        if of_sequences:
            converted.notes.append(
                "model.moe_sequence_aux_loss_weight: the softmax router has no such loss there"
            )
        return router | {"type": "softmax", "batch_balance_weight": balance}
    schedules = {"constant": "constant", "cosine_decay": "cosine", "linear_warmup": "linear_warmup"}
    asked = settings.get("model.moe_bias_schedule", "constant")
    schedule = converted.one_of("model.moe_bias_schedule", asked, schedules)
    length = {}
    if schedule != "constant":
        length = {"bias_schedule_steps": settings.get("train.max_steps", 100_000)}
    if of_sequences:
        router["batch_balance_weight"] = balance * of_sequences
        converted.notes.append(
            f"model.moe_sequence_aux_loss_weight = {of_sequences}: there it is multiplied by "
            "moe_aux_loss_weight and is a loss of the batch: router.batch_balance_weight is the product"
        )
    return router | {"type": "sigmoid", "bias_schedule": schedule, **length}


def _batch(converted: Converted, settings: Mapping[str, Any], ranks: int | None) -> None:
    """Convert the batch: a product with the number of ranks in KempnerForge, a fixed number in Forge."""
    mesh = converted.tree.get("mesh", {})
    others = mesh.get("tp", 1) * mesh.get("pp", 1) * mesh.get("cp", 1)
    copies = mesh.get("dp_replicate", 1)
    shard = mesh.get("dp_shard", -1)
    experts = settings.get("distributed.ep", 1)
    if experts > 1:
        converted.put("mesh.ep", experts)
    if shard == -1:
        if ranks is None:
            converted.problems.append(
                "distributed.dp_shard = -1: the global batch follows from the ranks: give --ranks"
            )
            return
        others *= copies * experts
        if ranks < 1 or ranks % others:
            converted.problems.append(
                f"{ranks} ranks are no multiple of tp x pp x cp x ep x dp_replicate = {others}"
            )
            return
        shard = ranks // others
    elif experts > 1:
        converted.put("mesh.dp_shard", shard * experts)
    each = converted.tree["train"]["micro_batch"] * settings.get("train.grad_accum_steps", 1)
    converted.put("train.global_batch", each * shard * copies)
    if experts > 1:
        _experts(converted, experts, each)


def _experts(converted: Converted, experts: int, each: int) -> None:
    """Convert `ep`: in KempnerForge its ranks read the same sequences; in Forge each reads its part."""
    if each % experts:
        converted.problems.append(
            f"distributed.ep = {experts}: its ranks read the same {each} sequences of a step there and share "
            f"them here: make train.batch_size x grad_accum_steps a multiple of {experts}"
        )
        return
    converted.put("train.micro_batch", gcd(converted.tree["train"]["micro_batch"], each // experts))
    converted.notes.append(
        f"distributed.ep = {experts}: its ranks are among mesh.dp_shard and share the {each} sequences that "
        "each of them reads there; the global batch is the same"
    )


def _optimizer(converted: Converted, settings: Mapping[str, Any]) -> None:
    kind = converted.tree.setdefault("optimizer", {}).setdefault("type", "adamw")
    converted.tree["optimizer"].setdefault("lr", 3e-4)
    converted.tree["optimizer"].setdefault("weight_decay", 0.1)
    if "optimizer.eps" in settings and kind != "lion":
        converted.put("optimizer.eps", settings["optimizer.eps"])
    if kind == "lion":
        converted.tree["optimizer"].setdefault("betas", [0.9, 0.95])
    if kind == "muon":
        converted.put("optimizer.scale", "original")
        converted.put("optimizer.nesterov", False)
        converted.notes.append(
            "optimizer.name = 'muon': whole matrices are orthogonalized here, embeddings and the output are "
            "AdamW's; there it is the part of each rank, of all matrices that are not too narrow"
        )
        converted.put("optimizer.momentum", settings.get("optimizer.muon_momentum", 0.95))
        converted.put("optimizer.ns_steps", settings.get("optimizer.muon_ns_steps", 5))
        if (lr := settings.get("optimizer.muon_adam_lr")) is not None:
            converted.put("optimizer.adamw_lr", lr)
    if kind == "schedule-free-adamw":
        converted.put("schedule.warmup_steps", settings.get("optimizer.schedule_free_warmup_steps", 0))
        if (name := settings.get("scheduler.name", "cosine")) != "none":
            converted.notes.append(
                f"scheduler.name = {name!r} multiplies the learning rate of schedule-free there; here it has "
                "none but its own warm-up"
            )


def _schedule(converted: Converted, settings: Mapping[str, Any]) -> None:
    name = settings.get("scheduler.name", "cosine")
    if converted.tree["optimizer"]["type"] == "schedule-free-adamw":
        name = "constant"
    schedule = converted.tree.setdefault("schedule", {})
    schedule["type"] = name
    if name == "none":
        schedule["warmup_steps"] = 0
    if name == "rex":
        schedule["type"] = _rex(converted, settings)
    if name in ("cosine", "linear", "rex", "wsd"):
        schedule["floor"] = settings.get("scheduler.min_lr_ratio", 0.1)
    steps, warmup = converted.tree["train"]["steps"], schedule.get("warmup_steps", 0)
    if warmup >= steps:
        converted.problems.append(
            f"a warm-up of {warmup} steps (scheduler.warmup_steps; 2000 if absent) and train.max_steps = "
            f"{steps}: there the run ends within its warm-up, here a warm-up is shorter than the run: "
            "shorten it"
        )
        return
    rest = steps - warmup
    decay = settings.get("scheduler.decay_steps") or None  # 0 there: as if absent
    if name == "wsd":
        shapes = {"cosine": "cosine", "linear": "linear"}  # sqrt(1 - progress) is none of ours
        asked = settings.get("scheduler.wsd_decay_type", "cosine")
        schedule["shape"] = converted.one_of("scheduler.wsd_decay_type", asked, shapes)
        stable = settings.get("scheduler.stable_steps") or 0
        schedule["decay_steps"] = max(0, rest - stable) if decay is None else decay
        if decay not in (None, rest - stable):
            converted.problems.append(
                f"scheduler.stable_steps = {stable} and decay_steps = {decay} are {stable + decay} steps, "
                f"and {rest} come behind the warm-up: a decay ends with the run here; make them equal"
            )
    elif decay not in (None, rest) and name not in ("constant", "none"):
        converted.problems.append(
            f"scheduler.decay_steps = {decay}: a decay ends with the run here; set train.steps to it"
        )


def _rex(converted: Converted, settings: Mapping[str, Any]) -> str:
    """Convert rex: there a power of the rest, linear for 1; in Forge the shape of Chen et al. 2021."""
    floor, power = settings.get("scheduler.min_lr_ratio", 0.1), settings.get("scheduler.rex_alpha", 1.0)
    if (floor, power) != (0.0, 1.0):
        converted.problems.append(
            f"scheduler.name = 'rex' is max({floor}, (1 - progress) ** {power}) there, and has "
            "no counterpart; cosine, linear and wsd have"
        )
    return "linear"


def _rest(converted: Converted, settings: Mapping[str, Any]) -> None:
    precision = settings.get("train.mixed_precision", "bf16")
    if precision == "fp16":
        converted.problems.append("train.mixed_precision = 'fp16': Forge computes in bfloat16 or float32")
    elif precision == "fp8":
        converted.put("fp8.recipe", "tensorwise")
    else:
        kinds = {"bf16": "bfloat16", "fp32": "float32"}
        converted.put("precision.compute", converted.one_of("train.mixed_precision", precision, kinds))
    if precision in ("bf16", "fp8"):
        converted.notes.append(
            "master weights and moments are float32 here: precision.pure_bf16 = true is what was there"
        )
    backend = settings.get("model.sdpa_backend", "auto")
    if backend != "auto":
        converted.put("job.attention_kernels", [backend])
    _checkpoints(converted, settings)
    if settings.get("metrics.enable_wandb"):
        name = {"name": settings["metrics.wandb_run_name"]} if settings.get("metrics.wandb_run_name") else {}
        converted.put(
            "track.wandb", {"project": settings.get("metrics.wandb_project", "kempnerforge"), **name}
        )
    if settings.get("profiling.enable"):
        first, end = settings.get("profiling.start_step", 5), settings.get("profiling.end_step", 8)
        converted.put("hooks.profile", {"type": "profile", "first_step": first, "steps": end - first})


def _checkpoints(converted: Converted, settings: Mapping[str, Any]) -> None:
    keep = settings.get("checkpoint.keep_last_n", 3)
    if keep >= 2:
        converted.put("checkpoint.keep", keep)
    elif keep == 1:
        converted.notes.append("checkpoint.keep_last_n = 1: at least 2 are kept")
    else:
        converted.put("checkpoint.keep_every_steps", settings.get("checkpoint.interval", 1000))
    if window := settings.get("checkpoint.dyn_ckpt_window"):
        _window(converted, window.get("start", 0), window.get("stop", 512))
    if folder := settings.get("checkpoint.load_path"):
        converted.problems.append(
            f"checkpoint.load_path = {folder!r}: convert the file without it, make weights of the "
            "checkpoint by `forge-ckpt import --kempnerforge`, and name them in train.init_from"
        )


def _window(converted: Converted, start: int, stop: int) -> None:
    """Convert a window: steps `start` and `start` + 1, 2, 4, ... up to `stop`; 0 is the initial state."""
    if start == 0:
        converted.put("checkpoint.keep_initial", True)
        converted.put("checkpoint.dense", [{"from_step": 1, "to_step": stop}])
        return
    steps = [start, *(start + 2**power for power in range(64) if start + 2**power <= stop)]
    converted.put("checkpoint.dense", [{"from_step": step, "to_step": step, "every": 1} for step in steps])


KEMPNERFORGE = Stack("KempnerForge", KEYS, finish, NUMBERS)
