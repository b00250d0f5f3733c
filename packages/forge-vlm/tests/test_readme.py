"""The README runs; configuration needs no torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_readme_runs(tmp_path):
    code = README.read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "example.py").write_text(code)
    subprocess.run([sys.executable, tmp_path / "example.py"], check=True, timeout=120)


@pytest.mark.parametrize("module", ["config", "images.reader", "images.prompt", "encoders.config"])
def test_configuration_imports_no_torch(module):
    code = f"import sys, forge_vlm.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_readme_names_all_that_can_be_configured():
    text = README.read_text()
    for file in sorted((README.parent / "src").rglob("*.py")):
        for kind, name in re.findall(r'@(\w+)\.register\("(.+)"\)', file.read_text()):
            if kind in ("encoders", "connectors", "fusions", "sources"):
                assert f"`{name}`" in text, f"{name} of {kind}"
