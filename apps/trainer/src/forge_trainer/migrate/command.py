"""`forge convert`: converts a configuration of another stack to our keys, and lists omitted keys."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode

from forge_trainer.config.job import load_job
from forge_trainer.migrate.convert import Converted, Drop, Move, convert
from forge_trainer.migrate.kempnerforge import KEMPNERFORGE
from forge_trainer.migrate.torchtitan import TORCHTITAN

STACKS = {"kempnerforge": KEMPNERFORGE, "torchtitan": TORCHTITAN}


def convert_file(options: argparse.Namespace) -> ExitCode:
    """Write the TOML to `--out` or the console; notes and problems go to stderr.

    Raises:
        ConfigError: the file cannot be converted as it is, or the result is no valid job.
    """
    converted = convert(Path(options.config), STACKS[options.stack], options.ranks, options.overrides)
    for note in converted.notes:
        sys.stderr.write(f"left out: {note}\n")
    if converted.problems:
        listed = "\n".join(f"  {problem}" for problem in converted.problems)
        raise ConfigError(f"{options.config} cannot be converted as it is:\n{listed}")
    require_job(converted)
    if options.out is None:
        sys.stdout.write(converted.toml())
    else:
        try:
            with Path(options.out).open("x") as file:
                file.write(converted.toml())
        except OSError as error:
            raise ConfigError(f"{options.out} cannot be written: {error}") from None
    return ExitCode.DONE


def require_job(made: Converted) -> None:
    """Check that the result is a valid job for `forge train`; its tokenizer may be on another machine.

    Raises:
        ConfigError: the result is not valid; lists every problem.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "converted.toml"
        path.write_text(made.toml())
        try:
            load_job(path, on_paper=True)
        except ConfigError as error:
            raise ConfigError(f"what was converted is no valid job: {error}\n\n{made.toml()}") from None


def keys_markdown() -> str:
    """Return the keys of all stacks as tables for docs/migrate.md."""
    lines: list[str] = []
    for stack in STACKS.values():
        lines += [f"### {stack.name}", "", "| key | here |", "|---|---|"]
        for key, rule in stack.keys.items():
            if isinstance(rule, Move):
                lines.append(f"| `{key}` | `{rule.to}` |")
            elif isinstance(rule, Drop):
                lines.append(f"| `{key}` | left out: {rule.why} |")
        read = ", ".join(f"`{key}`" for key, rule in stack.keys.items() if rule is None)
        lines += ["", f"Read together with others: {read}.", ""]
    return "\n".join(lines)
