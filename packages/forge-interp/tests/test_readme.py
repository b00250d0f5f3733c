import re
import subprocess
import sys
from pathlib import Path

import forge_interp

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_example_runs_with_forge_interp_alone(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(_ALONE + block)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "acts" / "index.json").exists()


def test_readme_lists_every_public_name_and_no_other():
    listed = [
        name
        for row in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", row)
    ]
    assert sorted(listed) == sorted(forge_interp.__all__)


_ALONE = """
import sys


class OnlyWhatItNeeds:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        others = ("transformers", "sklearn", "scipy", "matplotlib", "datasets", "tqdm", "pandas")
        if top in others or (top.startswith("forge_") and top != "forge_interp"):
            raise ModuleNotFoundError(f"{name}: not a dependency of forge-interp", name=name)


sys.meta_path.insert(0, OnlyWhatItNeeds())
"""
