"""What stands on the command line, as values; and how a command is added to it."""

import argparse
from collections.abc import Callable
from typing import Any

Parser = argparse.ArgumentParser


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> Parser:
    """A parser for the flags of a command.

    Args:
        commands: to which it is added.
        name: as it is typed.
        run: called with the options; returns an exit code.
        help: a line.
    """
    parser = commands.add_parser(name, help=help, allow_abbrev=False)
    parser.set_defaults(run=run, takes_keys=False)
    return parser


def count(text: str, least: int = 1) -> int:
    """A whole number above 0."""
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"given {text}; expected at least {least}")
    return int(text)


def count_or_none(text: str) -> int:
    """A whole number, 0 too."""
    return count(text, least=0)


def steps(text: str) -> str:
    """Parse `--step`: a step, `all`, or a range."""
    if text != "all" and not all(part.isdigit() for part in text.split("-", 1)):
        raise argparse.ArgumentTypeError(f"given {text!r}; expected a step, all, or a range such as 100-500")
    return text


def seed(text: str) -> int:
    """A seed that random generators take."""
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"given {text}; expected 0 to 2^63 - 1")
    return int(text)
