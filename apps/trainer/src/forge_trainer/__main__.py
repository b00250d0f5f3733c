"""The command `forge`, also `python -m forge_trainer` for torchrun: signals first, then everything else."""

import signal
import sys
import traceback

from forge_resilience.exit_codes import ExitCode
from forge_resilience.signals import Signals, Stopped, stopped_by

from forge_trainer.console import emit, flush_both, has_reader, open_closed
from forge_trainer.console_queue import queued_console

READER_GONE = 128 + 13
"""The exit code that a shell gives a command whose reader is gone, as in `forge status runs | head -1`."""


def main() -> int:
    """Run one command; `forge train` handles signals from here to the end of the process.

    Returns:
        The exit code: see `forge_resilience.exit_codes`.
    """
    open_closed()
    return _train() if sys.argv[1:2] == ["train"] else _other()


def _other() -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # partial files are removed
    from forge_trainer.cli import main as command

    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if has_reader(sys.stdout):  # it was another pipe
            raise
        return READER_GONE
    finally:
        flush_both()


def _train() -> int:
    signals = Signals(starting=True)
    try:
        signals.install()
        with queued_console():
            return _train_with(signals)
    except Stopped:
        return ExitCode.PREEMPTED  # of a start that had already said how it ends
    finally:
        signals.ignore()
        flush_both()


def _train_with(signals: Signals) -> int:
    from forge_trainer.cli import main as command

    try:
        return command(signals=signals)
    except (Stopped, Exception) as error:
        # Of two ranks that are stopped, one may see the other go before it comes to its own signal.
        if not isinstance(error, Stopped) and not (signals.starting and signals.received):
            traceback.print_exc()  # here, where no reader can hold it up
            return ExitCode.FAILED
        cause = signals.received.name if signals.received else "a signal to another rank"
        emit(stopped_by(cause), sys.stderr)
        return ExitCode.PREEMPTED


if __name__ == "__main__":
    sys.exit(main())
