import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from forge_data.store.tokens import TokenStore, Writer

MakeStore = Callable[..., Path]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Writes a store whose ids count up from `first`, so that a token tells where it comes from."""

    def make(name: str, doc_lengths: Sequence[int], first: int = 0) -> Path:
        size = sum(doc_lengths)
        with Writer(tmp_path / name, 100_000, "bytes-256") as writer:
            writer.add(np.arange(first, first + size), doc_lengths)
        return TokenStore(tmp_path / name).folder

    return make


@pytest.fixture
def dots(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `dots.py`, which processes that prepare batches find too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("dots")
