"""Shows records to a person: one live line on a terminal, plain lines in a log file."""

import sys
import time
from collections import deque

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forge_trainer.config.eval import losses_of
from forge_trainer.console import emit
from forge_trainer.track.base import Record

WINDOW = 20
"""The number of records from whose speed the time left is computed."""

TASKS = 8
"""The most numbers of tasks in a line."""


class _Terminal(RichConsole):
    """A console whose reader may close: later lines are lost, and the run continues."""

    def on_broken_pipe(self) -> None:
        """See `rich.console.Console`, which ends the process here."""
        self.quiet = True
        emit("", sys.stdout)


class Console:
    """A tracker that shows records. Evaluations stay on the screen; training steps update the live line."""

    def __init__(self, name: str, first_step: int, steps: int, console: RichConsole | None = None) -> None:
        self._console = console or _Terminal(highlight=False)
        self._live = self._console.is_terminal
        self._steps = steps
        self._times = deque([(time.monotonic(), first_step)], maxlen=WINDOW)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task(name, total=steps, completed=first_step, numbers="")
        self._bar.start()

    def log(self, record: Record) -> None:
        """See `Tracker.log`."""
        step = int(record["step"])
        if losses := losses_of(record):
            text = ", ".join(f"{name} loss {loss:.4f} nats a token" for name, loss in losses.items())
            self._console.print(f"step {step:>6}  {text}", soft_wrap=True)
            return
        if tasks := {k: v for k, v in record.items() if k.startswith("eval/tasks/")}:
            named = [f"{k.removeprefix('eval/tasks/')} {v:.4f}" for k, v in tasks.items()]
            shown = "  ".join(named[:TASKS])
            more = f"  and {len(tasks) - TASKS} more in metrics.jsonl" if len(tasks) > TASKS else ""
            self._console.print(f"step {step:>6}  {shown}{more}", soft_wrap=True)
            return
        if "loss" not in record:  # what a hook measured, for the other trackers
            return
        numbers = (
            f"loss {record['loss']:.4f}  |g| {record['grad_norm']:.2f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s  {_of_device(record)}{self._left(step)}"
        )
        if record.get("skipped"):
            numbers += f"  ({record['skipped']:.0f} steps not finite: skipped)"
        self._bar.update(self._task, completed=step, numbers=numbers)
        if not self._live:
            self._console.print(f"step {step:>6}/{self._steps}  {numbers}", soft_wrap=True)

    def _left(self, step: int) -> str:
        """Return the time left at the recent speed, which includes evaluations and checkpoints."""
        now = time.monotonic()
        start_s, start_step = self._times[0]
        self._times.append((now, step))
        per_step_s = (now - start_s) / max(1, step - start_step)
        return f"{duration(per_step_s * (self._steps - step))} left"

    def close(self) -> None:
        """See `Tracker.close`."""
        self._bar.stop()


def _of_device(record: Record) -> str:
    """Return MFU and peak memory of the device as text; empty if unknown."""
    texts = [f"MFU {record['mfu']:.1%}"] if "mfu" in record else []
    if "memory/utilization" in record:
        texts.append(f"{record['memory/peak_reserved_gib']:.1f} GiB ({record['memory/utilization']:.0%})")
    return "".join(f"{one}  " for one in texts)


def duration(seconds: float) -> str:
    """Format a time span with its two largest units, such as `2 d 3 h` or `4 min 5 s`."""
    total = round(seconds)
    parts = {"d": total // 86400, "h": total // 3600 % 24, "min": total // 60 % 60, "s": total % 60}
    first = next((i for i, count in enumerate(parts.values()) if count), 3)
    return " ".join(f"{count} {unit}" for unit, count in list(parts.items())[first : first + 2])
