"""The configuration of a run: the only place that names all sections.

Nothing here imports torch, so that a bad configuration is reported at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from forge_ckpt.config import CheckpointConfig
from forge_config import Config, Meta, absolute
from forge_config.load import Loaded, load
from forge_data.config import DataConfig
from forge_data.order.batch_sizes import BatchSizes
from forge_model.config import LossConfig, ModelConfig
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
from forge_parallel.dispatch_config import AllToAllConfig, DispatcherConfig
from forge_parallel.error import ParallelError
from forge_parallel.fp8_config import FP8Config
from forge_parallel.group_config import ProcessGroupConfig
from forge_resilience.config import ResilienceConfig
from forge_vlm.config import VisionLanguageConfig as VisionLanguageConfig  # registers its type
from forge_vlm.sources.columns import ImageTextConfig as ImageTextConfig  # registers its type
from forge_vlm.sources.published import CocoKarpathyConfig as CocoKarpathyConfig  # registers its type
from forge_vlm.sources.shapes import ShapesConfig as ShapesConfig  # registers its type
from forge_vlm.sources.tars import WebdatasetConfig as WebdatasetConfig  # registers its type
from msgspec import structs

from forge_trainer.config.checks import (
    checks,
    checks_on_paper,
    weights_are_of_the_model,
)
from forge_trainer.config.eval import EvalConfig
from forge_trainer.config.hub import fetch_named, fetch_shapes
from forge_trainer.config.other_names import HINTS
from forge_trainer.config.train import TrainConfig, uneven
from forge_trainer.hooks import HookConfig
from forge_trainer.hooks.by_path import classes_in
from forge_trainer.optim import OptimizerConfig
from forge_trainer.run_dir.environment import recorded_folder
from forge_trainer.schedule import ScheduleConfig
from forge_trainer.steps import StepConfig, TextStepConfig
from forge_trainer.track import TrackConfig

RUN_NAME = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"


class JobConfig(Config):
    """The identity of a run.

    Attributes:
        name: name of the run, whose folder is `<root>/<name>`; letters, digits, `.`, `_`, `-`.
        root: folder of all runs.
        seed: seed of the initial weights and of every random number drawn while training.
        deterministic: whether to use only GPU kernels that add in the same order each time: runs are equal
            bit for bit, and slower; an operation without such a kernel fails. CPU runs are always equal.
        attention_kernels: the kernels that `scaled_dot_product_attention` may choose from; default all. If
            none of them supports a layer, the first step raises an error. FlexAttention, which masks
            documents on GPUs, is not among them.
        numa: the cores near its GPU to which a rank is bound: its NUMA `node` or `socket`, a part of the node
            (`exclusive`), or a `core-complex`; as `torchrun --numa-binding` does. Needs GPUs and numactl.
    """

    free_keys = ("name", "root", "numa")
    recorded_keys = ("deterministic", "attention_kernels")

    name: Annotated[str, Meta(pattern=RUN_NAME)]
    root: str = "runs"
    seed: Annotated[int, Meta(ge=0)] = 0
    deterministic: bool = False
    attention_kernels: tuple[Literal["flash", "cudnn", "efficient", "math"], ...] = ()
    numa: Literal["none", "node", "socket", "exclusive", "core-complex"] = "none"

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.root) / self.name


class Job(Config):
    """The configuration of a run, as `forge train` reads it from TOML."""

    free_keys = ("hooks",)

    job: JobConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig = LossConfig()
    step: StepConfig = TextStepConfig()
    eval: EvalConfig = EvalConfig()
    mesh: MeshConfig = MeshConfig()
    process_group: ProcessGroupConfig = ProcessGroupConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    context_parallel: ContextParallelConfig = ContextParallelConfig()
    expert_parallel: DispatcherConfig = AllToAllConfig()
    pipeline: PipelineConfig = PipelineConfig()
    fsdp: FSDPConfig = FSDPConfig()
    precision: PrecisionConfig = PrecisionConfig()
    fp8: FP8Config = FP8Config()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    track: TrackConfig = TrackConfig()
    hooks: dict[str, HookConfig] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        batch = self.train.sequences(self.data.max_tokens)
        if batch != self.train.global_batch:
            structs.force_setattr(self, "train", structs.replace(self.train, global_batch=batch))

    @property
    def batch_sizes(self) -> BatchSizes:
        """The number of sequences of each step."""
        stages = [(stage.steps, stage.global_batch) for stage in self.train.batch_warmup]
        return BatchSizes(stages, self.train.global_batch)

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step, after the warm-up of the batch."""
        return self.train.global_batch * self.data.max_tokens

    def require_mesh(self, world_size: int) -> dict[str, int]:
        """Check that the ranks can be arranged in the mesh; return the size of each axis.

        Raises:
            ParallelError: they cannot.
        """
        sizes = self.mesh.sizes(world_size)
        if sizes["cp"] > 1 and getattr(self.step, "answers", False):
            raise ParallelError(
                f"step.answers = true counts documents, which mesh.cp = {sizes['cp']} cuts; set it to false, "
                "or cp = 1"
            )
        return sizes

    def require_layout(self, world_size: int) -> None:
        """Check that the ranks can be arranged in the mesh and share the global batch evenly.

        Raises:
            ParallelError: they cannot.
        """
        sizes = self.require_mesh(world_size)
        readers = sizes["dp_replicate"] * sizes["dp_shard"]
        for batch in self.batch_sizes.all():
            share, rest = divmod(batch, readers)
            if rest or share % self.train.micro_batch:
                raise ParallelError(uneven(batch, self.train.micro_batch, readers))
            if sizes["pp"] > 1:
                self.pipeline.require_micro_batches(share // self.train.micro_batch, sizes["pp"])
            if share == self.train.micro_batch and getattr(self.step, "noise_scale_every_steps", 0):
                raise ParallelError(
                    f"step.noise_scale_every_steps with a global batch of {batch} over {readers} readers: "
                    "each has one micro-batch, and two are needed to compare; use a smaller train.micro_batch"
                )

    @property
    def optimizer_by_steps(self) -> OptimizerConfig:
        """`optimizer` with the stages of its groups given in steps."""
        batches, tokens = self.batch_sizes, self.data.max_tokens

        def step_of(seen: int) -> int:
            samples = -(-seen // tokens)
            full_steps = batches.whole_steps(samples // batches.unit)
            return full_steps + (batches.samples(full_steps) < samples)

        groups = tuple(group.in_steps(step_of) for group in self.optimizer.groups)
        return structs.replace(self.optimizer, groups=groups)

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the factor of the peak learning rate: the schedule times the phase of the data.

        Args:
            step: number of the step, from 0.
            steps: number of steps of the run; fewer than `train.steps` if its data end earlier.
        """
        scale = self.data.lr_scale(step, steps, self.train.global_batch)
        return self.schedule.factor(step, steps=steps, step_tokens=self.step_tokens) * scale

    @property
    def parallel(self) -> ParallelConfig:
        """The sections that `parallelize` applies."""
        return ParallelConfig(
            tensor_parallel=self.tensor_parallel,
            context_parallel=self.context_parallel,
            expert_parallel=self.expert_parallel,
            pipeline=self.pipeline,
            fsdp=self.fsdp,
            precision=self.precision,
            fp8=self.fp8,
            activation_checkpointing=self.activation_checkpointing,
            compile=self.compile,
        )


def load_job(
    path: Path | str, overrides: Sequence[str] = (), branch: bool = False, on_paper: bool = False
) -> Loaded[Job]:
    """Read a job from TOML and `--section.key=value` overrides.

    Paths are made absolute here, so that a recorded configuration means the same wherever it is opened.
    Modules that the `config.toml` of a run imports are also looked for in the folders of its last start.

    Args:
        path: path of the TOML file.
        overrides: overrides of the command line.
        branch: whether the run begins with a checkpoint; then `train.init_from` is not looked for.
        on_paper: whether the job is only planned; then neither weights nor the tokenizer are looked for.

    Raises:
        ConfigError: the configuration is wrong; lists every problem with its place.
    """
    folders = [recorded_folder(Path(path).parent, key) for key in ("folder", "config_folder")]
    import_folders = [folder for folder in folders if folder is not None]
    left_out = [weights_are_of_the_model] if branch else []
    wanted = checks_on_paper if on_paper else [check for check in checks if check not in left_out]
    every = [*wanted, classes_in([Path(path).parent, *import_folders])]
    prepare = fetch_shapes if on_paper else fetch_named
    loaded = load(Job, path, overrides, every, import_folders, prepare, HINTS)
    return replace(loaded, value=absolute(loaded.value, Path.cwd()))
