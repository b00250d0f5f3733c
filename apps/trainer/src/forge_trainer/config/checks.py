"""Checks that concern several sections; the parameters of a check name the sections that it needs.

Nothing here imports torch, so that a bad configuration is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from forge_config.registry import type_name
from forge_data.config import DataConfig
from forge_model.config import ModelConfig
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import (
    ActivationCheckpointingConfig,
    ContextParallelConfig,
    FSDPConfig,
    MeshConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    TensorParallelConfig,
)
from forge_parallel.dispatch_config import DispatcherConfig
from forge_parallel.error import ParallelError
from forge_parallel.fp8_config import FP8Config

from forge_trainer.checkpoints.init_from import require_origins
from forge_trainer.config.train import TrainConfig, batch_divides, steps_differ_in_length
from forge_trainer.hooks import HookConfig
from forge_trainer.optim import MuonConfig, OptimizerConfig
from forge_trainer.schedule import ScheduleConfig
from forge_trainer.steps import StepConfig

if TYPE_CHECKING:
    from forge_trainer.config.job import JobConfig


SCALED = ("adamw", "lion", "schedule-free-adamw")
"""Optimizers whose update size does not depend on the size of the gradients."""


def sequences_fit_the_model(model: ModelConfig, data: DataConfig) -> None:
    """Require that a sequence has no more tokens than the model has positions."""
    if data.max_tokens > model.max_tokens:
        raise ValueError(
            f"data.max_tokens = {data.max_tokens} is longer than model.max_tokens = {model.max_tokens}; "
            "shorten the sequences or let the model see more positions"
        )


def padding_counts_for_no_length(model: ModelConfig, data: DataConfig) -> None:
    """Require document masks on padded rows if rotations depend on the length: padding must not count."""
    borders = [border for border in model.length_borders() if border < data.max_tokens]
    if borders and data.packing != "concat" and not data.mask_documents:
        raise ValueError(
            f"data.packing = {data.packing!r} pads rows, and longrope turns sequences of more than "
            f"{borders[0]} tokens otherwise than shorter ones: without masks a row of {data.max_tokens} "
            "tokens is one sequence, padding and all; set data.mask_documents = true, or data.max_tokens = "
            f"{borders[0]}"
        )


def items_fit_the_sequences(model: ModelConfig, data: DataConfig) -> None:
    """Require that a sequence has room for an item and one token more, as a sample is never cut."""
    if all(source.has_tokens_only() for source in data.sources) or data.max_tokens > model.item_tokens:
        return
    raise ValueError(
        f"data.max_tokens = {data.max_tokens}, and an image takes {model.item_tokens} tokens of a sequence; "
        f"set data.max_tokens to at least {model.item_tokens + 1}, and more for its text"
    )


def vocabulary_covers_the_tokenizer(model: ModelConfig, data: DataConfig) -> None:
    """Require an embedding for every token id of the tokenizer, except ids that stand for no text."""
    needed = data.tokenizer.vocab_size
    if needed > model.tokenizer_ids:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is smaller than the {needed} ids of the tokenizer; "
            f"set model.vocab_size to at least {needed}"
        )


def data_end_at_a_known_step(data: DataConfig) -> None:
    """Refuse phases at a fraction of a run that ends with its data: each would depend on the other."""
    if data.when_exhausted == "stop" and any(phase.start_fraction is not None for phase in data.phases):
        raise ValueError(
            'data.when_exhausted = "stop" with phases that begin at a start_fraction: how long the run is '
            "depends on them; use start_step or start_tokens"
        )


def warmup_fits(schedule: ScheduleConfig, train: TrainConfig, data: DataConfig) -> None:
    """Require that the warm-up ends before the run does."""
    warmup = schedule.warmup(train.steps, train.sequences(data.max_tokens) * data.max_tokens)
    if warmup >= train.steps:
        raise ValueError(
            f"the warm-up of {warmup} steps (schedule.warmup_*) is not below train.steps = {train.steps}; "
            f"shorten the warm-up, as with --schedule.warmup_steps={train.steps // 10}, or train longer"
        )


def what_averages_does_not_decay(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, train: TrainConfig, data: DataConfig
) -> None:
    """Refuse a decaying schedule for an optimizer that averages weights in place of a decay."""
    step_tokens = train.sequences(data.max_tokens) * data.max_tokens
    if optimizer.needs_constant_lr and schedule.factor(train.steps - 1, train.steps, step_tokens) < 1:
        kind, given = type_name(type(optimizer)), type_name(type(schedule))
        raise ValueError(
            f'optimizer.type = "{kind}" averages weights instead of a decay, and schedule.type = "{given}" '
            'decays; set schedule.type = "constant", with a warm-up'
        )


def noise_is_measured_without_stages(step: StepConfig, mesh: MeshConfig) -> None:
    """Refuse to measure the noise scale with a pipeline, whose schedule may not fit half of a batch."""
    if mesh.pp > 1 and getattr(step, "noise_scale_every_steps", 0):
        raise ValueError(
            f"step.noise_scale_every_steps with mesh.pp = {mesh.pp}: half of the micro-batches may be too "
            "few for the schedule of the pipeline; measure without a pipeline, or set it to 0"
        )


def widths_scale_what_the_optimizer_does(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    """Refuse `[model.scaling]` for an optimizer whose updates scale with the gradients."""
    kind = type_name(type(optimizer))
    if model.scales_learning() and kind not in SCALED:
        raise ValueError(
            f'optimizer.type = "{kind}" with model.scaling, whose learning rates are those of '
            f"{', '.join(SCALED)}; use one of them, or leave scaling out"
        )


def something_is_rounded(optimizer: OptimizerConfig, precision: PrecisionConfig) -> None:
    """Refuse stochastic rounding unless weights are kept in bfloat16."""
    if getattr(optimizer, "rounding", "nearest") == "stochastic" and not precision.pure_bf16:
        raise ValueError(
            'optimizer.rounding = "stochastic" without precision.pure_bf16: weights are kept in float32, '
            "where nothing is rounded away; set precision.pure_bf16 = true, or leave rounding out"
        )


def weights_are_of_the_model(job: JobConfig, model: ModelConfig, train: TrainConfig) -> None:
    """Require that the initial weights fit the model, unless the run has checkpoints already."""
    if train.init_from is not None and not (job.directory / "checkpoints").exists():
        require_origins(model, train)


def axes_divide_the_model(
    model: ModelConfig,
    data: DataConfig,
    mesh: MeshConfig,
    tensor_parallel: TensorParallelConfig,
    context_parallel: ContextParallelConfig,
) -> None:
    """Require that the ranks share heads, widths, vocabulary and sequences evenly."""
    sizes, tp, cp = model.tensor_sizes(), mesh.tp, mesh.cp
    needed = [(name, size, tp, "mesh.tp") for name, size in sizes.items()]
    if cp > 1 and context_parallel.method == "ulysses":
        heads = {name: size for name, size in sizes.items() if name.endswith("num_heads")}
        needed += [(name, size, tp * cp, "mesh.tp times mesh.cp") for name, size in heads.items()]
    cuts = sequence_cuts(mesh, tensor_parallel, context_parallel)
    needed.append(("data.max_tokens", data.max_tokens, cuts, "the parts of a sequence"))
    uneven = [f"{name} = {size} is no multiple of {n} ({what})" for name, size, n, what in needed if size % n]
    if uneven:
        fitting = [str(n) for n in range(1, tp) if not any(size % n for size in sizes.values())]
        hint = f"; of smaller mesh.tp {', '.join(fitting)} would divide the model" if fitting else ""
        raise ValueError(f"mesh.tp = {tp}, mesh.cp = {cp}: {'; '.join(uneven)}{hint}")


def sequence_cuts(
    mesh: MeshConfig, tensor_parallel: TensorParallelConfig, context_parallel: ContextParallelConfig
) -> int:
    """Return into how many parts a sequence is cut; its length must be a multiple of this number."""
    pieces = mesh.cp * context_parallel.pieces if mesh.cp > 1 else 1
    return pieces * (mesh.tp if tensor_parallel.sequence else 1)


def axes_compute_the_model(
    model: ModelConfig,
    mesh: MeshConfig,
    tensor_parallel: TensorParallelConfig,
    context_parallel: ContextParallelConfig,
) -> None:
    """Require that the model supports its tensor and context parallelism exactly."""
    try:
        model.require_axes(mesh.tp, mesh.cp, tensor_parallel.sequence, context_parallel.method)
    except ValueError as error:
        raise ValueError(f"mesh.tp = {mesh.tp}, mesh.cp = {mesh.cp}: {error}") from None


def experts_fit_the_ranks(
    model: ModelConfig,
    mesh: MeshConfig,
    expert_parallel: DispatcherConfig,
    compile: CompileConfig,
    activation_checkpointing: ActivationCheckpointingConfig,
    tensor_parallel: TensorParallelConfig,
) -> None:
    """Require that the ranks share the experts evenly, and that the other sections support experts."""
    counts = model.expert_counts()
    if counts:
        try:
            ParallelConfig(
                compile=compile, activation_checkpointing=activation_checkpointing
            ).require_experts()
        except ParallelError as error:
            raise ValueError(str(error)) from None
    if mesh.ep > 1 and not counts:
        raise ValueError(
            f"mesh.ep = {mesh.ep} shares experts, and no layer of the model has any; set mesh.ep = 1, or use "
            'model.ffn.type = "moe"'
        )
    uneven = [f"{name} has {count}" for name, count in counts.items() if count % mesh.ep]
    if uneven:
        raise ValueError(
            f"mesh.ep = {mesh.ep} does not divide the experts of every layer: {', '.join(uneven)}; use a "
            "divisor of them"
        )
    if mesh.tp > 1 and tensor_parallel.experts == "cut":
        model.require_cut_experts(mesh.tp)
    groups = model.expert_groups()
    for name, count in counts.items() if mesh.ep > 1 else ():
        try:
            expert_parallel.require(mesh.ep, count, groups[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def stages_fit_the_model(
    model: ModelConfig,
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    compile: CompileConfig,
    activation_checkpointing: ActivationCheckpointingConfig,
    fsdp: FSDPConfig,
    tensor_parallel: TensorParallelConfig,
) -> None:
    """Require that the model can be cut into pipeline stages, and that the pipeline supports the sections."""
    if mesh.pp == 1:
        return
    count = mesh.pp * pipeline.held()
    if pipeline.layers and len(pipeline.layers) != count:
        raise ValueError(
            f"pipeline.layers names {len(pipeline.layers)} stages; mesh.pp = {mesh.pp} with "
            f'schedule = "{pipeline.schedule}" has {count}'
        )
    parallel = ParallelConfig(
        pipeline=pipeline,
        compile=compile,
        activation_checkpointing=activation_checkpointing,
        fsdp=fsdp,
        tensor_parallel=tensor_parallel,
    )
    try:
        parallel.require_pipeline(mesh.pp, model.extra_tokens, mesh.tp, mesh.cp)
    except ParallelError as error:
        raise ValueError(str(error)) from None
    try:
        model.require_stages(pipeline.layers or [0] * count, pipeline.is_v)
    except ValueError as error:
        raise ValueError(f"mesh.pp = {mesh.pp}: {error}; or set mesh.pp = 1") from None


def optimizer_can_run_on_the_host(optimizer: OptimizerConfig, fsdp: FSDPConfig) -> None:
    """Refuse Muon with weights on the host: it sends matrices between ranks, which is not tested there."""
    if fsdp.offload and isinstance(optimizer, MuonConfig):
        raise ValueError(
            "fsdp.offload = true keeps weights on the host, where muon has not been tried; use another "
            "optimizer, or fsdp.offload = false"
        )


def sections_fit_together(
    tensor_parallel: TensorParallelConfig,
    fsdp: FSDPConfig,
    fp8: FP8Config,
    activation_checkpointing: ActivationCheckpointingConfig,
    compile: CompileConfig,
) -> None:
    """Require that the sections that `ParallelConfig` joins do not contradict each other."""
    ParallelConfig(
        tensor_parallel=tensor_parallel,
        fsdp=fsdp,
        fp8=fp8,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
    )


def eight_bits_divide_the_tokens(
    train: TrainConfig, data: DataConfig, mesh: MeshConfig, fp8: FP8Config
) -> None:
    """Require a number of tokens for which 8-bit products do not fail in the first backward pass."""
    try:
        fp8.require_tokens(train.micro_batch * data.max_tokens // mesh.cp)
    except ParallelError as error:
        raise ValueError(str(error)) from None


def hooks_see_what_they_need(hooks: Mapping[str, HookConfig], mesh: MeshConfig) -> None:
    """Require a mesh on which each hook sees all that it needs on its rank."""
    for config in hooks.values():
        config.require_mesh(mesh)


def every_part_can_learn(model: ModelConfig) -> None:
    """Refuse a model with trained parts on which the loss does not depend."""
    model.require_learning()


def blocks_are_not_compiled_too_often(model: ModelConfig, compile: CompileConfig) -> None:
    """Refuse to compile too many kinds of layers, which would end a run midway."""
    try:
        compile.require_kinds(model.block_kinds())
    except ParallelError as error:
        raise ValueError(str(error)) from None


checks: list[Callable[..., None]] = [
    sequences_fit_the_model,
    padding_counts_for_no_length,
    items_fit_the_sequences,
    vocabulary_covers_the_tokenizer,
    what_averages_does_not_decay,
    every_part_can_learn,
    batch_divides,
    steps_differ_in_length,
    data_end_at_a_known_step,
    warmup_fits,
    something_is_rounded,
    widths_scale_what_the_optimizer_does,
    noise_is_measured_without_stages,
    weights_are_of_the_model,
    axes_divide_the_model,
    axes_compute_the_model,
    experts_fit_the_ranks,
    stages_fit_the_model,
    optimizer_can_run_on_the_host,
    blocks_are_not_compiled_too_often,
    eight_bits_divide_the_tokens,
    hooks_see_what_they_need,
    sections_fit_together,
]

checks_on_paper = [
    check for check in checks if check not in (weights_are_of_the_model, vocabulary_covers_the_tokenizer)
]
"""The checks of a job that is only planned: neither weights nor the tokenizer are looked for."""
