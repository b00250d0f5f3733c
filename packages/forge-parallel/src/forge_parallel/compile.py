"""Compilation of the repeated units of a model, and the folder of compiled code."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from forge_parallel import capabilities
from forge_parallel.compile_config import MOST_COMPILATIONS, CompileConfig
from forge_parallel.mesh import Mesh

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compile_blocks(
    blocks: Iterable[nn.Module], config: CompileConfig, mesh: Mesh, apart: Iterable[nn.Module] = ()
) -> None:
    """Compile the forward of each block in place; blocks of one shape share one compilation.

    The hooks of FSDP2 are not compiled. Names of parameters do not change.

    Args:
        blocks: the blocks of the model.
        config: the section `[compile]`.
        mesh: the grid of ranks.
        apart: layers inside blocks that are not compiled, such as experts, whose shapes depend on the data
            and whose load is counted in the backward pass; each splits the graph of its block.
    """
    if config.cache is not None:
        keep_compiled(Path(config.cache), mesh)
    eager = set(apart)
    for layer in eager:
        layer.forward = torch.compiler.disable(layer.forward)
    for block in blocks:
        whole = config.fullgraph and eager.isdisjoint(block.modules())
        block.forward = capabilities.compiled(
            block.forward, MOST_COMPILATIONS, backend=config.backend, fullgraph=whole
        )


def keep_compiled(folder: Path, mesh: Mesh) -> None:
    """Let the compiler of this process read and write its results in a folder.

    Each rank of each layout has its own subfolder: the cache of torch 2.13 to 2.15 takes the code for one
    shard of a DTensor for another shard of another size. A folder that cannot be used is a warning.

    Args:
        folder: best on a disk that survives the job.
        mesh: the grid of ranks.
    """
    shards = mesh.fsdp.shape if mesh.fsdp is not None else ()
    layout = "-".join(map(str, (mesh.pipeline.size, mesh.context.size, *shards, mesh.stage.size)))
    path = folder / layout / f"rank{mesh.pipeline.rank * mesh.stage.size + mesh.stage.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (path.parent, path):
            place.mkdir(mode=0o700, exist_ok=True)
            found = place.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise PermissionError(f"{place} can be written by others, and what is in it is run as code")
        with open(path / f".{os.getpid()}", "wb"):
            pass
        (path / f".{os.getpid()}").unlink()
    except OSError as error:
        warnings.warn(f"compile.cache = {str(folder)!r} is not used: {error}", stacklevel=2)
    else:
        os.environ[FOLDER] = str(path)


def cache_counts() -> dict[str, int]:
    """Return the numbers of graphs that this process has found in the compiler's cache, and has compiled.

    Empty before the backend `inductor` has compiled anything.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    counted = {} if utils is None else utils.counters["inductor"]
    kinds = {"hits": "fxgraph_cache_hit", "misses": "fxgraph_cache_miss"}
    if not any(key in counted for key in kinds.values()):
        return {}
    return {f"compile_cache_{name}": counted.get(key, 0) for name, key in kinds.items()}
