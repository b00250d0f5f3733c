"""A run whose data workers are alive ends within seconds, with the error, whatever goes wrong."""

from pathlib import Path

import pytest

HOOKS = """
import os, signal, subprocess
from pathlib import Path
from forge_trainer.hooks import Hook, HookConfig, hooks

@hooks.register("harm")
class HarmConfig(HookConfig):
    how: str = ""
    def build(self, run):
        return Harm(self, run)

class Harm(Hook):
    every = 1
    def __init__(self, config, run):
        self.how, self.rank = config.how, run.env.rank
    def on_step(self, progress, out):
        if progress.step != 3 or self.rank:
            return
        line = ["pgrep", "-P", str(os.getpid()), "-f", "forge_data.loading.workers"]
        children = subprocess.check_output(line, text=True).split()
        Path(os.environ["HARM_PIDS"]).write_text(" ".join(children))
        if self.how == "raise":
            raise ZeroDivisionError("on purpose")
        os.kill(int(children[0]), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "ranks", "says"),
    [
        ("raise", 1, "on purpose"),
        ("kill", 1, "killed by SIGKILL"),
        pytest.param("raise", 2, "on purpose", marks=[pytest.mark.dist, pytest.mark.slow]),
        pytest.param("kill", 2, "killed by SIGKILL", marks=pytest.mark.dist),
    ],
)
def test_run_with_workers_ends_with_the_error(forge, tiny, tmp_path, monkeypatch, how, ranks, says):
    (tmp_path / "harm_hooks.py").write_text(HOOKS)
    path = tiny(steps=100_000, extra=f'\n[hooks.harm]\ntype = "harm"\nhow = "{how}"\n')
    path.write_text('imports = ["harm_hooks"]\n' + path.read_text())
    monkeypatch.setitem(forge.environment, "HARM_PIDS", str(tmp_path / "pids"))
    done = forge("train", path, "--data.workers=2", ranks=ranks, check=False)
    assert done.returncode not in (0, 78, 85)
    assert says in done.stderr
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(Path("/proc", pid).exists() for pid in pids)
