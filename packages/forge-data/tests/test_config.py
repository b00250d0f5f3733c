import subprocess
import sys

import pytest
from forge_config import ConfigError, load
from forge_data.config import DataConfig


@pytest.mark.parametrize("module", ["config", "sources.config", "store.tokenize", "store.tokens", "cli"])
def test_import_brings_no_torch(module: str) -> None:
    code = f"import forge_data.{module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_config_knows_its_vocabulary_without_building_anything() -> None:
    from forge_data.sources.config import PythonStdlibConfig

    assert DataConfig(max_tokens=8, sources=[PythonStdlibConfig()]).tokenizer.vocab_size == 257


def test_config_refuses_no_sources() -> None:
    with pytest.raises(ValueError, match="python-stdlib"):
        DataConfig(max_tokens=8, sources=[])


@pytest.mark.parametrize("weight", ["inf", "nan", "-1"])
def test_weight_is_a_number_from_zero(tmp_path, weight):
    source = f'[[sources]]\ntype = "tokens"\npath = "x"\nweight = {weight}\n'
    (tmp_path / "d.toml").write_text(f"max_tokens = 8\n{source}")
    with pytest.raises(ConfigError, match=r"sources\[0\].weight: given"):
        load(DataConfig, tmp_path / "d.toml")
