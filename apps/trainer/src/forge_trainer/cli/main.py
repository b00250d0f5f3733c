"""The command `forge`. Nothing heavy is imported before the configuration is known to be good."""

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
        arguments: of the command line; those of this process if None.
        signals: entered, for `forge train`; without it the run makes its own.

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
    """What to do with a file of another stack that was taken for one of ours."""
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
