"""The command `forge`. Heavy modules are imported only after the configuration is checked."""

import argparse
import sys
from collections.abc import Sequence

from forge_ckpt.error import LockedError
from forge_config import ForgeError
from forge_resilience.exit_codes import ExitCode
from forge_resilience.signals import Signals

from forge_trainer.cli import jobs, machine, runs, several


def main(arguments: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Run one command.

    Args:
        arguments: arguments of the command line; default the arguments of this process.
        signals: the signal handlers, entered, for `forge train`; by default the run makes its own.

    Returns:
        The exit code: see `forge_resilience.exit_codes`.
    """
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.takes_keys:
        parser.error(f"unknown arguments: {' '.join(overrides)}")
    options.overrides, options.signals = overrides, signals
    try:
        return options.run(options)
    except LockedError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.LOCKED
    except ForgeError as error:
        sys.stderr.write(f"{error}\n{_remedy(options)}")
        return ExitCode.CONFIG


def _remedy(options: argparse.Namespace) -> str:
    """Return advice for a file of another stack that was given as a Forge configuration."""
    if getattr(options, "config", None) is None:
        return ""
    from forge_trainer.migrate.recognize import remedy

    return remedy(options.config, getattr(options, "stack", None))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge", description="Train language models and look at what they learnt."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for group in (jobs, runs, several, machine):
        group.add_commands(commands)
    return parser
