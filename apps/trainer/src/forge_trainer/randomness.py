"""Random numbers as a pure function of (seed, step, rank), so that there is no generator state to save."""

import random

import numpy as np
import torch


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the generators of torch (CPU and `device`), numpy and Python for one step."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(4, np.uint64)
    torch.default_generator.manual_seed(int(words[0] >> 1))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(words[1] >> 1))
    np.random.seed(int(words[2] & 0xFFFFFFFF))
    random.seed(int(words[3]))
