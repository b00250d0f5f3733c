"""What tests of a GPU run on: the first GPU, or what takes its place where there is none."""

import os

import pytest
import torch

VARIABLE = "FORGE_GPU_TESTS_ON"
"""Set to `cpu`, tests of a GPU run there, but for those of what only CUDA has."""

DEVICE = torch.device(os.environ.get(VARIABLE, "cuda:0"))
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="only CUDA has it")
BACKEND = "inductor" if DEVICE.type == "cuda" else "aot_eager"
"""Of `torch.compile`."""
