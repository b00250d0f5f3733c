import re
import subprocess
import sys
from pathlib import Path

import pytest
from forge_config import Config, load
from forge_model.config import ModelConfig

README = Path(__file__).parents[1] / "README.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]):
    exec(compile(block("python"), str(README), "exec"), {})
    written, flops = capsys.readouterr().out.splitlines()
    assert [len(row) for row in eval(written)] == [8, 8]
    assert "FLOPs a token" in flops


def test_readme_configuration_loads(tmp_path: Path):
    class Whole(Config):
        model: ModelConfig

    path = tmp_path / "model.toml"
    path.write_text(block("toml"))
    model = load(Whole, path).value.model
    assert model.attention.kv_heads == 4
    assert (model.max_tokens, model.ffn.dim) == (1024, 2048)


def test_config_imports_no_torch():
    code = "import sys, forge_model.config, forge_model.hf.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
