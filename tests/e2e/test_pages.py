"""What docs/profile.md and docs/compare.md tell to type runs in order and says what the pages show."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("test_docs", ROOT / "tests" / "contracts" / "test_docs.py")
docs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(docs)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [("profile.md", 2), ("compare.md", 6)])
def test_commands_of_a_page_do_what_it_shows(forge, tmp_path, page, count):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands = docs.typed(page)
    assert len(commands) == count
    for words, shown in commands:
        if words[:3] == ["uv", "run", "forge"]:
            said = forge(*words[3:], cwd=tmp_path).stdout
        else:
            said = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
        assert re.search(loose(shown), said), f"{shlex.join(words)}\nshows\n{shown}\nbut says\n{said}"


def loose(shown):
    """Any number of spaces stands for any other: the width of a column is that of its widest number."""
    return re.sub(r"(\\ )+", " +", docs.pattern(shown))


@pytest.mark.parametrize("page", ["profile.md", "compare.md"])
def test_hooks_of_a_page_are_what_a_configuration_takes(page, tmp_path):
    from forge_trainer.config.job import load_job

    text = (ROOT / "docs" / page).read_text()
    blocks = [part.partition("```")[0] for part in text.split("```toml\n")[1:]]
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(f'extends = ["{ROOT}/configs/runs/debug.toml"]\n{block}')
        assert load_job(path).value.hooks
    assert len(blocks) == {"profile.md": 3, "compare.md": 0}[page]
