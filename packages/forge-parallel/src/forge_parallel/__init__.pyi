from .apply import load_full as load_full
from .apply import materialize as materialize
from .apply import parallelize as parallelize
from .apply import set_sync as set_sync
from .compile_config import CompileConfig as CompileConfig
from .config import ActivationCheckpointingConfig as ActivationCheckpointingConfig
from .config import ContextParallelConfig as ContextParallelConfig
from .config import FSDPConfig as FSDPConfig
from .config import MeshConfig as MeshConfig
from .config import ParallelConfig as ParallelConfig
from .config import PipelineConfig as PipelineConfig
from .config import PrecisionConfig as PrecisionConfig
from .config import TensorParallelConfig as TensorParallelConfig
from .env import Env as Env
from .env import process_group as process_group
from .error import ParallelError as ParallelError
from .fp8_config import FP8Config as FP8Config
from .grads import clip_ as clip_
from .grads import global_norm as global_norm
from .mesh import Mesh as Mesh
from .mesh import View as View
from .mesh import build_mesh as build_mesh
from .plan import Plan as Plan
from .runner import build_runner as build_runner
from .stages import keep_stage as keep_stage
from .stages import stages_of as stages_of
from .tensor import LocalShard as LocalShard
from .tensor import local_shard as local_shard

__all__ = [
    "ActivationCheckpointingConfig",
    "CompileConfig",
    "ContextParallelConfig",
    "Env",
    "FP8Config",
    "FSDPConfig",
    "LocalShard",
    "Mesh",
    "MeshConfig",
    "ParallelConfig",
    "ParallelError",
    "PipelineConfig",
    "Plan",
    "PrecisionConfig",
    "TensorParallelConfig",
    "View",
    "build_mesh",
    "build_runner",
    "clip_",
    "global_norm",
    "keep_stage",
    "load_full",
    "local_shard",
    "materialize",
    "parallelize",
    "process_group",
    "set_sync",
    "stages_of",
]
