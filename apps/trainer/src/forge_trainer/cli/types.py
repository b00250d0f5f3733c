"""Parses arguments of the command line into values, and adds commands to it."""

import argparse
from collections.abc import Callable
from typing import Any

Parser = argparse.ArgumentParser


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> Parser:
    """Add a command; return the parser for its flags.

    Args:
        commands: the subparsers to which the command is added.
        name: name of the command.
        run: called with the options; returns an exit code.
        help: one line of help.
    """
    parser = commands.add_parser(name, help=help, allow_abbrev=False)
    parser.set_defaults(run=run, takes_keys=False)
    return parser


def count(text: str, least: int = 1) -> int:
    """Parse a whole number that is at least `least`."""
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"given {text}; expected at least {least}")
    return int(text)


def count_or_none(text: str) -> int:
    """Parse a whole number, including 0."""
    return count(text, least=0)


def steps(text: str) -> str:
    """Parse `--step`: a step, `all`, or a range."""
    if text != "all" and not all(part.isdigit() for part in text.split("-", 1)):
        raise argparse.ArgumentTypeError(f"given {text!r}; expected a step, all, or a range such as 100-500")
    return text


def seed(text: str) -> int:
    """Parse a seed for random generators."""
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"given {text}; expected 0 to 2^63 - 1")
    return int(text)
