"""Compilation of the repeated units of a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from forge_parallel.config import CompileConfig


def compile_blocks(blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile the forward of each block in place; blocks of one shape share one compilation.

    Only the forward: the hooks of FSDP2 stay outside of it and eager. Names of parameters do not change.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=config.fullgraph)
