import os
import stat
from pathlib import Path

import pytest
import torch
from forge_parallel.compile import FOLDER, cache_counts, compile_blocks, keep_compiled
from forge_parallel.compile_config import CompileConfig
from forge_parallel.mesh import Mesh, View
from torch import nn

LONE = Mesh(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _restored(monkeypatch, tmp_path_factory):
    monkeypatch.setenv(FOLDER, str(tmp_path_factory.mktemp("before")))


def test_ranks_and_layouts_have_folders_of_their_own(tmp_path):
    seen = set()
    for ranks in (1, 2):
        for rank in range(ranks):
            for pipeline in (View(), View(1, 2)):
                keep_compiled(tmp_path, Mesh(LONE.device, stage=View(rank, ranks), pipeline=pipeline))
                seen.add(os.environ[FOLDER])
    assert len(seen) == 6 and all(stat.S_IMODE(Path(path).stat().st_mode) == 0o700 for path in seen)


def test_folder_that_cannot_be_used_is_a_warning(tmp_path):
    before = os.environ[FOLDER]
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"compile.cache = '.*file' is not used: .*File exists"):
        keep_compiled(tmp_path / "file", LONE)
    keep_compiled(tmp_path / "open", LONE)
    path = Path(os.environ[FOLDER])
    for place in (path, path.parent):
        os.environ[FOLDER] = before
        place.chmod(0o777)
        with pytest.warns(UserWarning, match="can be written by others"):
            keep_compiled(tmp_path / "open", LONE)
        place.chmod(0o700)
        assert os.environ[FOLDER] == before


def test_compiled_code_is_found_again_and_damage_does_no_harm(tmp_path):
    config = CompileConfig(enabled=True, cache=str(tmp_path))
    torch.manual_seed(0)
    x = torch.randn(3, 8)

    def trained() -> tuple[torch.Tensor, dict[str, int]]:
        """A block compiled as by a new process, which knows only the folder."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(1)
        block = nn.Linear(8, 8, bias=False)
        compile_blocks([block], config, LONE)
        block(x).square().sum().backward()
        return block.weight.grad, cache_counts()

    first, second = trained(), trained()
    assert first[1]["compile_cache_misses"] > 0 == first[1]["compile_cache_hits"]
    assert second[1]["compile_cache_hits"] > 0 == second[1]["compile_cache_misses"]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    third = trained()
    assert third[1]["compile_cache_misses"] > 0
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], third[0])
