"""Converts the keys of torchtitan's TOML files (0.1 to 0.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_trainer.migrate.convert import SOURCES, Converted, Drop, Move, Stack

AUTOMATIC = "Forge decides it by itself"
IN_RUN = "it lies in the run directory"

FLAVORS = {("llama3", "8B"): "llama-8b", ("llama3", "70B"): "llama-70b"}
"""Models with a preset in Forge."""

KEYS: dict[str, Move | Drop | None] = {
    "job.dump_folder": Move("job.root"),
    "job.description": Drop("job.name is the name of the run"),
    "job.print_args": Drop("config.toml in the run directory has them"),
    "job.use_for_integration_test": Drop("nothing here"),
    "profiling.enable_profiling": None,
    "profiling.save_traces_folder": Drop(IN_RUN),
    "profiling.profile_freq": None,
    "profiling.enable_memory_snapshot": Drop(
        "snapshot_step and snapshot_on_oom of the hook `profile`", False
    ),
    "profiling.save_memory_snapshot_folder": Drop(IN_RUN),
    "metrics.log_freq": Move("train.log_every_steps"),
    "metrics.disable_color_printing": Drop(AUTOMATIC),
    "metrics.enable_tensorboard": Move("track.tensorboard"),
    "metrics.save_tb_folder": Drop(IN_RUN),
    "metrics.save_for_all_ranks": Drop("metrics are those of all ranks", False),
    "metrics.enable_wandb": None,
    "model.name": None,
    "model.flavor": None,
    "model.norm_type": Drop("model.norm.type", "rmsnorm"),
    "model.tokenizer_path": None,
    "model.hf_assets_path": None,
    "model.converters": None,
    "model.print_after_conversion": Drop("nothing here", False),
    "optimizer.name": Move("optimizer.type", {"AdamW": "adamw"}),
    "optimizer.lr": Move("optimizer.lr"),
    "optimizer.eps": Move("optimizer.eps"),
    "optimizer.beta1": None,
    "optimizer.beta2": None,
    "optimizer.weight_decay": Move("optimizer.weight_decay"),
    "optimizer.implementation": Drop(AUTOMATIC),
    "optimizer.early_step_in_backward": Drop("nothing here", False),
    "lr_scheduler.warmup_steps": Move("schedule.warmup_steps"),
    "lr_scheduler.decay_ratio": None,
    "lr_scheduler.decay_type": None,
    "lr_scheduler.min_lr_factor": None,
    "lr_scheduler.lr_min": None,
    "training.batch_size": Move("train.micro_batch"),
    "training.local_batch_size": Move("train.micro_batch"),
    "training.global_batch_size": None,
    "training.seq_len": Move("data.max_tokens"),
    "training.max_norm": Move("train.clip_norm"),
    "training.steps": Move("train.steps"),
    "training.dataset": None,
    "training.dataset_path": None,
    "training.seed": Move("job.seed"),
    "training.deterministic": Move("job.deterministic"),
    "training.compile": Move("compile.enabled"),
    "training.gc_freq": Drop(AUTOMATIC),
    "training.gc_debug": Drop("nothing here", False),
    "training.mixed_precision_param": Move(
        "precision.compute", {"bfloat16": "bfloat16", "float32": "float32"}
    ),
    "training.mixed_precision_reduce": Drop("gradients are summed in float32", "float32"),
    "training.enable_cpu_offload": Move("fsdp.offload"),
    "parallelism.data_parallel_replicate_degree": Move("mesh.dp_replicate"),
    "parallelism.data_parallel_shard_degree": Move("mesh.dp_shard"),
    "parallelism.fsdp_reshard_after_forward": Move(
        "fsdp.reshard", {"default": "after_forward", "always": "after_forward", "never": "after_backward"}
    ),
    "parallelism.tensor_parallel_degree": Move("mesh.tp"),
    "parallelism.disable_loss_parallel": Drop(
        "the loss is always computed on the parts of the vocabulary", False
    ),
    "parallelism.enable_async_tensor_parallel": Move("tensor_parallel.async"),
    "parallelism.pipeline_parallel_degree": Move("mesh.pp"),
    "parallelism.pipeline_parallel_schedule": Move(
        "pipeline.schedule",
        {
            "1F1B": "1f1b",
            "GPipe": "gpipe",
            "Interleaved1F1B": "interleaved_1f1b",
            "InterleavedZeroBubble": "interleaved_zero_bubble",
            "ZBVZeroBubble": "zbv_zero_bubble",
            "DualPipeV": "dualpipe_v",
        },
    ),
    "parallelism.pipeline_parallel_microbatch_size": None,
    "parallelism.pipeline_parallel_split_points": Drop("pipeline.layers says the layers of each stage", []),
    "parallelism.pipeline_parallel_layers_per_stage": Drop("pipeline.layers says the layers of each stage"),
    "parallelism.pipeline_parallel_schedule_csv": Drop("nothing here", ""),
    "parallelism.enable_compiled_autograd": Drop("nothing here", False),
    "parallelism.context_parallel_degree": Move("mesh.cp"),
    "parallelism.context_parallel_rotate_method": Drop("context_parallel.method"),
    "parallelism.expert_parallel_degree": Move("mesh.ep"),
    "parallelism.expert_tensor_parallel_degree": Drop("experts are not cut by tp", 1),
    "checkpoint.enable_checkpoint": Drop("a run always has checkpoints", True),
    "checkpoint.enable": Drop("a run always has checkpoints", True),
    "checkpoint.folder": Drop(IN_RUN, "checkpoint"),
    "checkpoint.interval": Move("checkpoint.every_steps"),
    "checkpoint.model_weights_only": Drop("forge export writes the weights alone", False),
    "checkpoint.last_save_model_only": Drop("forge export writes the weights alone"),
    "checkpoint.last_save_model_weights_only": Drop("forge export writes the weights alone"),
    "checkpoint.export_dtype": Drop("forge export writes them"),
    "checkpoint.async_mode": Move(
        "checkpoint.asynchronous", {"disabled": False, "async": True, "async_with_pinned_mem": True}
    ),
    "checkpoint.keep_latest_k": None,
    "checkpoint.initial_load_path": Drop("train.init_from reads what forge-ckpt import has made of it"),
    "checkpoint.initial_load_model_only": Drop("train.init_from reads weights alone", True),
    "checkpoint.exclude_from_loading": Drop("train.init_exclude leaves tensors out", []),
    "checkpoint.create_seed_checkpoint": Drop("checkpoint.keep_initial", False),
    "checkpoint.enable_first_step_checkpoint": Drop("checkpoint.dense names further steps", False),
    "checkpoint.last_save_in_hf": Drop("forge export writes them", False),
    "checkpoint.load_step": Drop("a run goes on from its newest checkpoint; forge branch takes another", -1),
    "activation_checkpoint.mode": Move(
        "activation_checkpointing.mode", {"none": "none", "full": "full", "selective": "selective"}
    ),
    "activation_checkpoint.selective_ac_option": None,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Drop(
        AUTOMATIC, ["moe.router.gate"]
    ),
    "compile.enable": Move("compile.enabled"),
    "compile.components": Drop("blocks and chunks of the loss are compiled"),
    "float8.enable_fsdp_float8_all_gather": Move("fp8.gather"),
    "float8.precompute_float8_dynamic_scale_for_fsdp": Drop(AUTOMATIC),
    "float8.filter_fqns": Drop("fp8.exclude takes patterns of names"),
    "float8.force_recompute_fp8_weight_in_bwd": Drop(AUTOMATIC),
    "float8.emulate": Move("fp8.emulate"),
    "float8.recipe_name": None,
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Move("fp8.gather"),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Drop(AUTOMATIC),
    "quantize.linear.float8.filter_fqns": Drop("fp8.exclude takes patterns of names"),
    "quantize.linear.float8.recipe_name": None,
    "validation.enable": None,
    "validation.enabled": None,
    "validation.dataset": None,
    "validation.dataset_path": None,
    "validation.local_batch_size": None,
    "validation.seq_len": None,
    "validation.freq": None,
    "validation.steps": None,
    "comm.init_timeout_seconds": Drop("resilience.collective_timeout_s"),
    "comm.train_timeout_seconds": Move("resilience.collective_timeout_s"),
    "comm.trace_buf_size": Drop(AUTOMATIC),
    "comm.save_traces_folder": Drop(IN_RUN),
    "memory_estimation.enabled": Drop("forge plan estimates memory", False),
    "memory_estimation.disable_fake_mode": Drop("forge plan estimates memory", False),
    "fault_tolerance.enable": Drop("see docs/survival.md", False),
    "experimental.custom_import": Drop("imports names modules", ""),
    "experimental.custom_args_module": Drop("plugs have keys of their own: docs/plugs.md", ""),
}


def finish(converted: Converted, settings: Mapping[str, Any], ranks: int | None) -> None:
    """Convert settings that depend on several keys."""
    converted.tree.setdefault("job", {}).setdefault("name", "converted")
    _model(converted, settings)
    _batch(converted, settings, ranks)
    _schedule(converted, settings)
    betas = [settings.get("optimizer.beta1", 0.9), settings.get("optimizer.beta2", 0.95)]
    converted.put("optimizer.betas", betas)
    converted.tree["optimizer"].setdefault("lr", 8e-4)
    _activations(converted, settings)
    _float8(converted, settings)
    every = converted.tree.setdefault("checkpoint", {}).setdefault("every_steps", 500)
    if (keep := settings.get("checkpoint.keep_latest_k", 10)) >= 2:
        converted.put("checkpoint.keep", keep)
    else:
        converted.put("checkpoint.keep_every_steps", every)
    if settings.get("metrics.enable_wandb"):
        converted.put("track.wandb", {"project": "torchtitan"})
    if settings.get("profiling.enable_profiling"):
        every = settings.get("profiling.profile_freq", 10)
        converted.put("hooks.profile", {"type": "profile", "first_step": every, "every_steps": every})
    converted.put("eval.every_steps", 0)
    if settings.get("validation.enable", settings.get("validation.enabled", False)):
        converted.problems.append(
            f"validation.dataset = {settings.get('validation.dataset', 'c4_validation')!r} is a name of "
            "their code: set validation.enable to false, and write [eval] and [eval.sets] (docs/runs.md)"
        )
    _data(converted, settings)


def _activations(converted: Converted, settings: Mapping[str, Any]) -> None:
    """Convert `selective_ac_option`, a number of layers or `op`; it applies only if the mode is selective."""
    mode = settings.get("activation_checkpoint.mode", "selective")
    option = str(settings.get("activation_checkpoint.selective_ac_option", "2"))
    if mode != "selective" or option == "op":
        converted.put("activation_checkpointing.mode", mode)
    elif option.isdecimal() and int(option) > 0:
        converted.put("activation_checkpointing.mode", "every")
        converted.put("activation_checkpointing.every", int(option))
    else:
        converted.problems.append(
            f"activation_checkpoint.selective_ac_option = {option!r} has no counterpart; known: op, numbers"
        )


def _float8(converted: Converted, settings: Mapping[str, Any]) -> None:
    recipe = settings.get("float8.recipe_name", settings.get("quantize.linear.float8.recipe_name"))
    converted.put("fp8.recipe", recipe or "tensorwise")
    known = ("float8", "quantize.linear.float8")
    converters = settings.get("model.converters", [])
    if isinstance(converters, str):  # in older files
        converters = [one.strip() for one in converters.split(",") if one.strip()]
    if not any(one in known for one in converters):
        del converted.tree["fp8"]
    if unknown := [one for one in converters if one not in known]:
        converted.problems.append(f"model.converters has {', '.join(unknown)}; known: {', '.join(known)}")


def _model(converted: Converted, settings: Mapping[str, Any]) -> None:
    named = settings.get("model.name", "llama3"), settings.get("model.flavor", "debugmodel")
    if named in FLAVORS:
        converted.put("model.preset", FLAVORS[named])
        converted.notes.append(
            f"model {named[1]}: positions are scaled as in Llama 3.1 here, and are not in older versions of "
            'torchtitan: model.rope = {type = "plain", theta = 500000.0}'
        )
    else:
        converted.ask(
            "model", f"model {named[0]} {named[1]}: its sizes are in their code", "model.preset=llama-1b"
        )
    path = settings.get("model.hf_assets_path", settings.get("model.tokenizer_path"))
    if not isinstance(path, str) or not path:
        converted.ask(
            "data.tokenizer", "no tokenizer is named (model.hf_assets_path)", "data.tokenizer.type=bytes"
        )
        return
    folder = path.removesuffix("/tokenizer.json").removesuffix("/tokenizer.model")
    converted.put("data.tokenizer", {"type": "hf", "path": f"{folder}/tokenizer.json"})


def _batch(converted: Converted, settings: Mapping[str, Any], ranks: int | None) -> None:
    micro = converted.tree.setdefault("train", {}).setdefault("micro_batch", 8)
    converted.tree["train"].setdefault("steps", 10_000)
    converted.put("data.max_tokens", settings.get("training.seq_len", 2048))
    mesh = converted.tree.get("mesh", {})
    if mesh.get("pp", 1) > 1:
        converted.put("train.micro_batch", settings.get("parallelism.pipeline_parallel_microbatch_size", 1))
    global_batch = settings.get("training.global_batch_size", -1)
    if global_batch > 0:
        converted.put("train.global_batch", global_batch)
        return
    if (shard := mesh.get("dp_shard", -1)) == -1:
        if ranks is None:
            converted.problems.append("the global batch follows from the number of ranks: give --ranks")
            return
        others = mesh.get("tp", 1) * mesh.get("pp", 1) * mesh.get("cp", 1) * mesh.get("dp_replicate", 1)
        if ranks < 1 or ranks % others:
            converted.problems.append(
                f"{ranks} ranks are no multiple of tp x pp x cp x dp_replicate = {others}"
            )
            return
        shard = ranks // others
    converted.put("train.global_batch", micro * shard * mesh.get("dp_replicate", 1))


def _schedule(converted: Converted, settings: Mapping[str, Any]) -> None:
    schedule = converted.tree.setdefault("schedule", {})
    schedule.setdefault("warmup_steps", 200)
    kinds = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
    asked = settings.get("lr_scheduler.decay_type", "linear")
    kind = converted.one_of("lr_scheduler.decay_type", asked, kinds)
    schedule["floor"] = settings.get("lr_scheduler.min_lr_factor", settings.get("lr_scheduler.lr_min", 0.0))
    ratio = settings.get("lr_scheduler.decay_ratio")
    if ratio is None and kind != "1-sqrt":
        schedule["type"] = kind
    else:
        schedule |= {"type": "wsd", "shape": kind, "decay_fraction": 1.0 if ratio is None else ratio}


def _data(converted: Converted, settings: Mapping[str, Any]) -> None:
    path, name = settings.get("training.dataset_path"), settings.get("training.dataset", "c4_test")
    streamed = {"type": "hf", "streaming": True, "held_out": 0.0}
    if path is None and name == "c4":
        converted.put("data.sources", [{"path": "allenai/c4", "subset": "en", **streamed}])
    elif path is None:
        converted.ask("data.sources", f"training.dataset = {name!r} is a name of their code", SOURCES)
    else:
        converted.put("data.sources", [{"path": path, **streamed}])


NUMBERS = (
    "training.batch_size", "training.local_batch_size", "training.global_batch_size", "training.steps",
    "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_microbatch_size", "parallelism.context_parallel_degree",
    "checkpoint.interval", "checkpoint.keep_latest_k", "profiling.profile_freq",
)  # fmt: skip
"""Keys whose values are used in arithmetic."""

TORCHTITAN = Stack("torchtitan", KEYS, finish, NUMBERS)
