import pytest
import torch


@pytest.fixture(autouse=True)
def _compiled_anew():
    """What one test has compiled counts for no other."""
    yield
    torch._dynamo.reset()
