"""The command `forge`, also `python -m forge_trainer` for torchrun: signals first, then everything else."""

import signal
import sys

from forge_resilience.exit_codes import ExitCode
from forge_resilience.signals import Signals, Stopped, stopped_by

from forge_trainer.say import has_reader, say, settle

READER_GONE = 128 + 13
"""What a shell says of a command whose reader went away, as in `forge status runs | head -1`."""


def main() -> int:
    """Run one command; `forge train` handles signals from here to the end of the process.

    Returns:
        The exit code: see `forge_resilience.exit_codes`.
    """
    if sys.argv[1:2] != ["train"]:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is partial is removed
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
            settle()
    signals = Signals(starting=True)
    try:
        signals.install()
        from forge_trainer.cli import main as command

        return command(signals=signals)
    except (Stopped, Exception) as error:
        # Of two ranks that are stopped, one may see the other go before it comes to its own signal.
        if not isinstance(error, Stopped) and not (signals.starting and signals.received):
            raise
        cause = signals.received.name if signals.received else "a signal to another rank"
        say(stopped_by(cause), sys.stderr)
        return ExitCode.PREEMPTED
    finally:
        signals.ignore()
        settle()


if __name__ == "__main__":
    sys.exit(main())
