from .apply import load_full as load_full
from .apply import materialize as materialize
from .apply import parallelize as parallelize
from .apply import set_sync as set_sync
from .config import CompileConfig as CompileConfig
from .config import MeshConfig as MeshConfig
from .config import PrecisionConfig as PrecisionConfig
from .config import RematConfig as RematConfig
from .env import Env as Env
from .env import process_group as process_group
from .error import ParallelError as ParallelError
from .grads import clip_ as clip_
from .grads import global_norm as global_norm
from .mesh import Mesh as Mesh
from .mesh import build_mesh as build_mesh
from .plan import Plan as Plan
from .tensor import local_chunk as local_chunk

__all__ = [
    "CompileConfig",
    "Env",
    "Mesh",
    "MeshConfig",
    "ParallelError",
    "Plan",
    "PrecisionConfig",
    "RematConfig",
    "build_mesh",
    "clip_",
    "global_norm",
    "load_full",
    "local_chunk",
    "materialize",
    "parallelize",
    "process_group",
    "set_sync",
]
