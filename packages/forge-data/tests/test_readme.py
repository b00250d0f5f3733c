import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_readme_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path))
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(block, str(README), "exec"), {})
    assert "torch.Size([4, 256])" in capsys.readouterr().out


def test_readme_lists_every_module() -> None:
    listed = set(re.findall(r"^\| `([\w/]+)` \|", README.read_text(), flags=re.MULTILINE))
    source = README.parent / "src" / "forge_data"
    found = {str(f.relative_to(source).with_suffix("")) for f in source.rglob("*.py") if f.stem != "__init__"}
    assert listed == found - {"error"}
