"""The section `[mesh]` and the sections of `ParallelConfig`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal

from forge_config import ALL_KEYS, Config, Meta
from msgspec import field

from forge_parallel.compile_config import CompileConfig
from forge_parallel.dispatch_config import AllToAllConfig, DispatcherConfig
from forge_parallel.error import ParallelError
from forge_parallel.fp8_config import FP8Config

AUTO = -1


class MeshConfig(Config):
    """How the ranks are laid out; the product of all axes is the number of ranks.

    Attributes:
        pp: stages of the pipeline; each rank has the layers of one or several stages.
        dp_replicate: copies of the model; gradients are summed over them (HSDP when above 1).
        dp_shard: ranks that share one copy (FSDP2); -1 takes all remaining ranks.
        cp: ranks that share each sequence (context parallelism); FSDP2 shards over them too.
        tp: ranks that share each matrix (tensor parallelism); best within a node.
        ep: ranks that share the experts of a layer (expert parallelism), each with its own data. They are no
            further ranks but neighbours among the dp_shard times cp ranks; FSDP2 shards the experts of a rank
            over the rest of these.
    """

    free_keys = (ALL_KEYS,)

    pp: Annotated[int, Meta(ge=1)] = 1
    dp_replicate: Annotated[int, Meta(ge=1)] = 1
    dp_shard: Annotated[int, Meta(ge=-1)] = AUTO
    cp: Annotated[int, Meta(ge=1)] = 1
    tp: Annotated[int, Meta(ge=1)] = 1
    ep: Annotated[int, Meta(ge=1)] = 1

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.dp_shard == 0:
            yield "dp_shard = 0; give -1 for all the ranks that are left, or at least 1"

    def sizes(self, world_size: int) -> dict[str, int]:
        """Return the size of each axis for a number of ranks, the outermost first.

        Raises:
            ParallelError: the axes do not multiply to the number of ranks, or ep does not divide dp_shard
                times cp.
        """
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name != "ep"}
        fixed = prod(size for name, size in given.items() if name != "dp_shard")
        shard = world_size // fixed if self.dp_shard == AUTO else self.dp_shard
        if shard * fixed != world_size or not shard:
            product = " times ".join(
                f"{name} = {size}" for name, size in given.items() if size != 1 or name.startswith("dp_")
            )
            raise ParallelError(
                f"{world_size} ranks cannot be laid out as {product}; the product must be {world_size}"
            )
        if shard * self.cp % self.ep:
            raise ParallelError(
                f"mesh.ep = {self.ep} does not divide the {shard * self.cp} ranks of dp_shard = {shard} "
                f"times cp = {self.cp}, among which the experts are shared; use a divisor of it"
            )
        return given | {"dp_shard": shard}


class FSDPConfig(Config):
    """How FSDP2 trades memory for communication.

    Attributes:
        reduce_gradients: when the gradients of a step are summed over ranks. `last_micro_batch` communicates
            once a step, and holds the full gradients of the model in float32 on every rank between its
            micro-batches. `every_micro_batch` holds only this rank's shard of them, and communicates once a
            micro-batch (with copies of the model once a step): for models whose full gradients do not fit.
            Both are the same without accumulation.
        reshard: when a gathered unit is freed. `after_forward` gathers each unit for every forward and every
            backward pass (ZeRO-3). `after_backward` gathers it once a micro-batch and `after_step` once a
            step: both hold the whole model on every rank in the compute format meanwhile, for models that fit
            so. A pipeline always uses `after_step`.
        offload: keep weights, gradients and moments in host memory, where the optimizer runs; each unit is
            copied to the GPU when it is used. Slow: for models that fit in no other way.
        prefetch: number of layers that the host gathers ahead; 0 leaves it to FSDP2, which gathers one ahead
            as long as the host is ahead.
    """

    free_keys = (ALL_KEYS,)

    reduce_gradients: Literal["last_micro_batch", "every_micro_batch"] = "last_micro_batch"
    reshard: Literal["after_forward", "after_backward", "after_step"] = "after_forward"
    offload: bool = False
    prefetch: Annotated[int, Meta(ge=0)] = 0


class PrecisionConfig(Config):
    """The number formats of a run.

    Attributes:
        compute: of matmuls and activations; `auto` is bfloat16 on a GPU and float32 on a CPU. Master weights,
            gradient sums and optimizer moments are float32, also for a model that comes in bfloat16; a
            float64 model stays float64, unless compute is bfloat16.
        pure_bf16: keep the master weights and moments in bfloat16 too. Half the memory, but small updates are
            rounded away: norm gains hardly move at ordinary learning rates. Not with compute = "float32".
    """

    recorded_keys = ("compute",)

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    pure_bf16: bool = False

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.pure_bf16 and self.compute == "float32":
            yield (
                'compute = "float32" with pure_bf16 = true, which computes in bfloat16; '
                'give compute = "auto" or pure_bf16 = false'
            )

    def compute_dtype(self, device_type: str) -> Literal["float32", "bfloat16"]:
        """Return the compute format on a kind of device."""
        if self.pure_bf16:
            return "bfloat16"
        if self.compute == "auto":
            return "bfloat16" if device_type == "cuda" else "float32"
        return self.compute

    def needs_group(self, device_type: str) -> bool:
        """Whether even a lone process needs FSDP2, which keeps float32 masters of bfloat16 weights."""
        return self.compute_dtype(device_type) != "float32" and not self.pure_bf16


class TensorParallelConfig(Config):
    """How the ranks of `mesh.tp` share the work.

    Attributes:
        sequence: shard the residual stream and its norms over the tokens too (Korthikanti et al. 2022,
            arXiv:2205.05198 section 4.2.2): the same traffic, less memory. Sequences must be multiples of tp.
        experts: how a mixture of experts is shared. `whole`: each rank has every expert whole, and serves its
            own tokens of the residual stream. `cut`: each rank has a part of the hidden width of every
            expert, shared experts too, and serves all tokens; the results of the ranks are summed.
        async: let the compiler split matmuls and the gathers and sums around them into pieces that overlap.
            Needs compiled blocks and GPUs with access to each other's memory (NVLink).
    """

    free_keys = (ALL_KEYS,)

    sequence: bool = True
    experts: Literal["whole", "cut"] = "whole"
    async_: bool = field(default=False, name="async")

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.async_ and not self.sequence:
            yield "async = true needs sequence = true: sums for all ranks are not overlapped"


class ContextParallelConfig(Config):
    """How the ranks of `mesh.cp` share the attention of a sequence.

    Attributes:
        method: `gather`: each rank has the keys and values of the whole sequence and a part of the queries,
            cut so that causal attention is equal work for all. `ring`: each rank has the same part of the
            queries and receives the keys and values of the other ranks one after the other, only those that
            its tokens attend to, while it computes (Liu et al. 2023, arXiv:2310.01889): for sequences whose
            keys and values fit on no rank. `ulysses`: each rank has a part of the heads over the whole
            sequence (Jacobs et al. 2023, arXiv:2309.14509); heads must be multiples of cp times tp.
    """

    free_keys = (ALL_KEYS,)

    method: Literal["gather", "ring", "ulysses"] = "gather"

    @property
    def pieces(self) -> int:
        """Number of pieces that each rank has of a sequence."""
        return 1 if self.method == "ulysses" else 2


PIPELINES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
"""Each schedule and its name in `torch.distributed.pipelining`."""


class PipelineConfig(Config):
    """How the ranks of `mesh.pp` share the layers.

    Attributes:
        schedule: the order of forward and backward passes: `gpipe` (Huang et al. 2019, arXiv:1811.06965) and
            `1f1b` (Narayanan et al. 2019, arXiv:1806.03377) with one stage a rank, `interleaved_1f1b`
            (Narayanan et al. 2021, arXiv:2104.04473) and `interleaved_zero_bubble` (Qi et al. 2023,
            arXiv:2401.10241) with several, `zbv_zero_bubble` and `dualpipe_v` (DeepSeek-AI 2024,
            arXiv:2412.19437) with two, of which the last stage is on the first rank.
        stages_per_rank: stages of each rank in the interleaved schedules.
        layers: number of layers of each stage; empty balances the stages by cost.
        max_parameters: upper bound of the parameters of a stage, embedding and head included, where `layers`
            is empty. Each takes 16 bytes with its gradient and moments in float32, shared by the ranks of a
            stage. 0: no bound.
    """

    free_keys = (ALL_KEYS,)

    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
    ] = "1f1b"
    stages_per_rank: Annotated[int, Meta(ge=2)] = 2
    layers: list[Annotated[int, Meta(ge=1)]] = []
    max_parameters: Annotated[int, Meta(ge=0)] = 0

    @property
    def is_v(self) -> bool:
        """Whether the stages go down the ranks and up again."""
        return self.schedule in ("zbv_zero_bubble", "dualpipe_v")

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return "zero_bubble" in self.schedule or self.is_v

    def require_micro_batches(self, count: int, ranks: int) -> None:
        """Check that the schedule can take this number of micro-batches a step.

        Raises:
            ParallelError: it cannot; says which numbers it can take.
        """
        least = {"1f1b": ranks, "dualpipe_v": 2 * ranks}.get(self.schedule, 1)
        rounds = max(1, count // ranks) if self.schedule.startswith("interleaved") else 1
        if count < least or count % rounds:
            wanted = f"at least {least}" if count < least else f"a multiple of {ranks}"
            raise ParallelError(
                f'pipeline.schedule = "{self.schedule}" on mesh.pp = {ranks} cannot take {count} '
                f"micro-batches a step on each rank; use {wanted}, by train.global_batch or train.micro_batch"
            )

    def held(self) -> int:
        """Number of stages of each rank."""
        if self.is_v:
            return 2
        return self.stages_per_rank if self.schedule.startswith("interleaved") else 1


class ActivationCheckpointingConfig(Config):
    """Which activations are recomputed in the backward pass instead of kept.

    Attributes:
        mode: `none` keeps all; `full` keeps only the input of each block; `every` does so with every
            `every`-th block; `selective` keeps the results of matmuls, attention and collectives, and
            recomputes the rest; `offload` keeps all of each block on the host; `budget` lets the compiler
            choose.
        every: 2 recomputes half of the blocks.
        budget: for `budget`, the share of activations that is kept, from 0 (`full`) to 1 (`none`).
    """

    free_keys = (ALL_KEYS,)

    mode: Literal["none", "full", "every", "selective", "offload", "budget"] = "none"
    every: Annotated[int, Meta(ge=1)] = 2
    budget: Annotated[float, Meta(ge=0, le=1)] = 0.5


class ParallelConfig(Config):
    """The sections that `parallelize` applies, in one struct.

    Attributes:
        tensor_parallel: how matrices are shared.
        context_parallel: how sequences are shared.
        expert_parallel: how rows travel to the experts of other ranks.
        pipeline: how layers are shared.
        fsdp: how parameters are sharded.
        precision: number formats.
        fp8: matmuls in 8-bit floats.
        activation_checkpointing: which activations are recomputed.
        compile: whether blocks are compiled.
    """

    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    context_parallel: ContextParallelConfig = ContextParallelConfig()
    expert_parallel: DispatcherConfig = AllToAllConfig()
    pipeline: PipelineConfig = PipelineConfig()
    fsdp: FSDPConfig = FSDPConfig()
    precision: PrecisionConfig = PrecisionConfig()
    fp8: FP8Config = FP8Config()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    compile: CompileConfig = CompileConfig()

    def needs_group(self, device_type: str) -> bool:
        """Whether even a lone process needs FSDP2: for float32 masters, or to keep weights on the host."""
        return self.precision.needs_group(device_type) or (self.fsdp.offload and device_type == "cuda")

    def require_experts(self) -> None:
        """Refuse sections that layers of experts do not support.

        Raises:
            ParallelError: a section asks for something that they do not support.
        """
        if self.compile.enabled and self.activation_checkpointing.mode == "selective":
            raise ParallelError(
                'activation_checkpointing.mode = "selective" with compile.enabled = true needs whole '
                "graphs, and blocks are cut around layers of experts; choose another mode, or compile nothing"
            )

    def require_pipeline(self, ranks: int, extra_tokens: int, tp: int, cp: int) -> None:
        """Check that a pipeline of `ranks` ranks supports the mesh and the other sections.

        `extra_tokens` is that of the `StagePlan`; `tp` and `cp` are the sizes of the mesh.

        Raises:
            ParallelError: it does not.
        """
        sequence = tp > 1 and self.tensor_parallel.sequence
        if ranks > 1 and extra_tokens and (sequence or cp > 1):
            raise ParallelError(
                f"stages pass on {extra_tokens} rows beside the tokens, such as image features, which are "
                "never cut; use tensor_parallel.sequence = false and mesh.cp = 1, or mesh.pp = 1"
            )
        if ranks > 1 and self.fsdp.reduce_gradients == "every_micro_batch":
            raise ParallelError(
                'fsdp.reduce_gradients = "every_micro_batch" cannot be done in a pipeline, which sums '
                'gradients once a step; use "last_micro_batch" or mesh.pp = 1'
            )
        split = ranks > 1 and self.pipeline.splits_backward
        selective = self.activation_checkpointing.mode == "selective"
        if split and (self.compile.enabled or selective):
            key = 'activation_checkpointing.mode = "selective"' if selective else "compile.enabled = true"
            raise ParallelError(
                f'pipeline.schedule = "{self.pipeline.schedule}" takes the backward pass in two, which '
                f"cannot be done with {key}; change it, or choose another schedule"
            )

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        mode = self.activation_checkpointing.mode
        if mode == "budget" and not self.compile.enabled:
            yield ('activation_checkpointing.mode = "budget" needs compile.enabled = true')
        if mode == "offload" and self.compile.enabled:
            yield ('activation_checkpointing.mode = "offload" needs compile.enabled = false')
        if self.context_parallel.method == "ring" and self.compile.enabled:
            yield (
                'context_parallel.method = "ring" sends messages between kernels, which is not compiled; set '
                'compile.enabled = false, or method = "gather" or "ulysses"'
            )
        if self.tensor_parallel.async_ and not (self.compile.enabled and self.compile.backend == "inductor"):
            yield (
                "tensor_parallel.async = true is done by the compiler; set compile.enabled = true with "
                'backend = "inductor", or async = false'
            )
        if self.fp8.experts and self.tensor_parallel.experts == "cut":
            yield (
                'tensor_parallel.experts = "cut" leaves each rank narrow experts, and 8-bit products want '
                'wide ones; set it to "whole", or fp8.experts = false'
            )
        if self.fp8.gather and self.fsdp.offload:
            yield ("fp8.gather = true needs fsdp.offload = false: weights are rounded on the GPU")
        if self.fp8.gather and mode == "offload":
            yield ('fp8.gather = true needs another activation_checkpointing.mode than "offload"')
        if self.fp8.emulate and self.compile.enabled:
            yield ("fp8.emulate = true needs compile.enabled = false")
