"""What the console shows of each kind of record."""

import subprocess
import sys
from io import StringIO

from forge_trainer.track.console import Console
from rich.console import Console as RichConsole

RECORDS = """
import sys
from forge_trainer.track.console import Console
console = Console("a_run", 0, 3)
sys.stdin.readline()
for step in range(1, 4):
    console.log({"step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1.0})
    console.log({"step": step, "eval/loss": 1.0})
console.close()
sys.stderr.write("at the end")
"""


def test_console_goes_on_when_its_reader_is_gone():
    with subprocess.Popen(
        [sys.executable, "-c", RECORDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        process.stdin.write("go on\n")
        process.stdin.close()
        assert process.stderr.read() == "at the end"
        assert process.wait() == 0


def test_log_passes_over_what_a_hook_measured():
    text = StringIO()
    console = Console("a_run", first_step=0, steps=4, console=RichConsole(file=text, width=200))
    console.log({"step": 2, "tokens": 1, "interp/inside/rms": 1.0})
    assert "2" not in text.getvalue()
    console.log({"step": 3, "loss": 1.25, "grad_norm": 2.0, "lr": 1e-3, "tokens_per_s": 1000.0})
    console.close()
    assert "step      3/4  loss 1.2500" in text.getvalue()


def test_log_tells_of_the_device_where_it_is_known():
    text = StringIO()
    console = Console("a_run", first_step=0, steps=4, console=RichConsole(file=text, width=200))
    record = {"step": 3, "loss": 1.25, "grad_norm": 2.0, "lr": 1e-3, "tokens_per_s": 1000.0}
    of_device = {"mfu": 0.4987, "memory/utilization": 0.571, "memory/peak_reserved_gib": 45.04}
    console.log(record | of_device)
    console.log(record | {"step": 4})
    console.close()
    first, second = text.getvalue().splitlines()
    assert "1,000 tokens/s  MFU 49.9%  45.0 GiB (57%)  " in first
    assert "MFU" not in second and "GiB" not in second
