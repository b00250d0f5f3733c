"""Makes random numbers a pure function of (seed, step, rank), so that no generator state must be saved."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""A fixed workspace makes cuBLAS choose the same kernels each time; it is read at a device's first use."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make torch use only kernels that give the same bits each time, inside this context.

    An operation without such a kernel raises a RuntimeError that names it. `wanted` = False changes nothing.
    """
    if not wanted:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    options: Any = torch.utils.deterministic
    fill = options.fill_uninitialized_memory
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    options.fill_uninitialized_memory = False  # it takes time, and what we read we have written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        options.fill_uninitialized_memory = fill


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_kernels(names: Sequence[str]) -> AbstractContextManager[Any]:
    """Restrict attention to the named kernels inside this context; no names allow every kernel."""
    return sdpa_kernel([KERNELS[name] for name in names]) if names else nullcontext()


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the generators of torch (CPU and `device`), numpy and Python for one step."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(4, np.uint64)
    torch.default_generator.manual_seed(int(words[0] >> 1))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(words[1] >> 1))
    np.random.seed(int(words[2] & 0xFFFFFFFF))
    random.seed(int(words[3]))
