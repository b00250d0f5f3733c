"""How a model is run beside its training: without gradients, leaving no trace."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from forge_parallel.apply import reshard
from torch import nn


@contextmanager
def evaluating(*parts: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes and random numbers are what they were.

    No weight stays gathered, so that others may be written in the place of those that were evaluated.
    """
    modes = [(module, module.training) for part in parts for module in part.modules()]
    python, legacy = random.getstate(), np.random.get_state()
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(cuda), torch.no_grad():
            for part in parts:
                part.eval()
            yield
    finally:
        for part in parts:
            reshard(part)
        for module, training in modes:
            module.training = training
        random.setstate(python)
        np.random.set_state(legacy)
