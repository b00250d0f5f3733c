import re
import sys
from pathlib import Path
from subprocess import run

import pytest
from forge_parallel.testing import run_ranks

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def example() -> float:
    """The final loss of this rank's part in the example, whatever the number of ranks."""
    names: dict = {}
    source = BLOCKS[0].replace(
        "with process_group(env, needed=config.precision.needs_group(env.device.type)):", "if True:"
    )
    exec(compile(source, "README.md", "exec"), names)
    return names["norm"].item()


@pytest.mark.dist
def test_readme_example_trains_alike_on_one_and_two_ranks():
    [alone], ranks = run_ranks(example, 1), run_ranks(example, 2)
    assert ranks == pytest.approx([alone] * 2, rel=1e-4)


@pytest.mark.dist
def test_readme_test_passes(tmp_path):
    test = tmp_path / "test_example.py"
    test.write_text(BLOCKS[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout


def test_readme_example_runs_alone(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[0] + "\nassert step == 19 and torch.isfinite(norm)\n")
    done = run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
