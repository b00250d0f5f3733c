import subprocess
import sys

import pytest
from forge_data.config import DataConfig


@pytest.mark.parametrize("module", ["config", "sources", "tokenize", "tokens", "cli"])
def test_import_brings_no_torch(module: str) -> None:
    code = f"import forge_data.{module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_config_knows_its_vocabulary_without_building_anything() -> None:
    from forge_data.sources import PythonStdlibConfig

    assert DataConfig(max_tokens=8, sources=[PythonStdlibConfig()]).tokenizer.vocab_size == 257


def test_config_refuses_no_sources() -> None:
    with pytest.raises(ValueError, match="python-stdlib"):
        DataConfig(max_tokens=8, sources=[])
