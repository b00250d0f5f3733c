"""What a person sees: one live line on a terminal, plain lines in a log file."""

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from forge_trainer.track.base import Record


class Console:
    """Shows records. Evaluations stay on the screen; training steps move the live line."""

    def __init__(self, name: str, first_step: int, steps: int, console: RichConsole | None = None) -> None:
        self._console = console or RichConsole(highlight=False)
        self._live = self._console.is_terminal
        self._steps = steps
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task(name, total=steps, completed=first_step, numbers="")
        self._bar.start()

    def log(self, record: Record) -> None:
        """See `Tracker.log`."""
        step = int(record["step"])
        if "eval/loss" in record:
            self._console.print(f"step {step:>6}  validation loss {record['eval/loss']:.4f} nats a token")
            return
        if "loss" not in record:  # what a hook measured, for the other trackers
            return
        numbers = (
            f"loss {record['loss']:.4f}  |g| {record['grad_norm']:.2f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s"
        )
        if record.get("skipped"):
            numbers += "  (not finite: step skipped)"
        self._bar.update(self._task, completed=step, numbers=numbers)
        if not self._live:
            self._console.print(f"step {step:>6}/{self._steps}  {numbers}", soft_wrap=True)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._bar.stop()
