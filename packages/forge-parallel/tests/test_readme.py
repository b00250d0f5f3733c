import re
import sys
from pathlib import Path
from subprocess import run

import pytest
from forge_parallel.testing import run_ranks

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


OWN, LLAMA, GPT2, TEST = range(4)


def example(block: int) -> float:
    """The last gradient norm of this rank in an example, whatever the number of ranks."""
    names: dict = {}
    group = "with process_group(env, needed=config.needs_group(env.device.type)):"
    assert group in BLOCKS[block]
    exec(compile(BLOCKS[block].replace(group, "if True:"), "README.md", "exec"), names)
    return names["norm"].item()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("block", "ranks"),
    [
        pytest.param(OWN, 2, marks=pytest.mark.slow),
        pytest.param(OWN, 4, marks=pytest.mark.slow),
        pytest.param(LLAMA, 4, marks=pytest.mark.slow),
        pytest.param(LLAMA, 8, marks=pytest.mark.slow),
        pytest.param(GPT2, 2, marks=pytest.mark.slow),
    ],
    ids=["own-fsdp2", "own-fsdp2-tp2", "llama-pp2-tp2", "llama-pp2-tp2-fsdp2", "gpt2-fsdp2"],
)
def test_readme_example_trains_like_one_process(block, ranks):
    if block != OWN:
        pytest.importorskip("transformers")
    [alone] = run_ranks(example, 1, block)
    assert run_ranks(example, ranks, block, timeout_s=120) == pytest.approx([alone] * ranks, rel=1e-4)


@pytest.mark.dist
def test_readme_test_passes(tmp_path):
    test = tmp_path / "test_example.py"
    test.write_text(BLOCKS[TEST])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_readme_example_runs_alone(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[OWN] + "\nassert step == 19 and torch.isfinite(norm)\n")
    done = run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
