"""The soak of benchmarks/soak.py in short: each fault once, and a run that is left alone."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", [("--ranks=1",), ("--clean", "--minutes=0.5")], ids=["faults", "clean"])
def test_run_survives_each_fault_and_ends_as_one_that_was_left_alone(tmp_path, flags):
    line = [sys.executable, str(SCRIPT), "--quick", f"--folder={tmp_path}", *flags]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
