"""What the console shows of each kind of record."""

from io import StringIO

from forge_trainer.track.console import Console
from rich.console import Console as RichConsole


def test_log_passes_over_what_a_hook_measured():
    text = StringIO()
    console = Console("a_run", first_step=0, steps=4, console=RichConsole(file=text, width=200))
    console.log({"step": 2, "tokens": 1, "interp/inside/rms": 1.0})
    assert "2" not in text.getvalue()
    console.log({"step": 3, "loss": 1.25, "grad_norm": 2.0, "lr": 1e-3, "tokens_per_s": 1000.0})
    console.close()
    assert "step      3/4  loss 1.2500" in text.getvalue()
