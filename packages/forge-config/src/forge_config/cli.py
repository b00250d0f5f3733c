"""The command `forge-config`: show, check, diff and schema."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import tomli_w

from forge_config.describe import schema
from forge_config.diff import diff
from forge_config.load import Loaded, load
from forge_config.plain import digest
from forge_config.struct import ConfigError

EX_CONFIG = 78
DEFAULT_STRUCT = "forge_trainer.job:Job"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 78 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="forge-config", description="What a configuration means.")
    parser.add_argument("--struct", default=DEFAULT_STRUCT, help="module:Name of the whole file's struct")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("show", "the resolved TOML, with the origin of each value"),
        ("check", "is it valid?"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("config")
    command = commands.add_parser("diff", help="the keys that two files differ in")
    command.add_argument("a")
    command.add_argument("b")
    commands.add_parser("schema", help="JSON schema for editors")
    options, overrides = parser.parse_known_args(arguments)
    try:
        return _run(options, overrides)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    module_name, _, name = options.struct.partition(":")
    try:
        module = importlib.import_module(module_name)
        struct = getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--struct {options.struct}: {error}; give module:Name of a Config struct"
        ) from None
    checks = getattr(module, "checks", ())

    def loaded(path: str) -> Loaded[Any]:
        return load(struct, path, overrides, checks)

    if options.command == "show":
        sys.stdout.write(with_origins(loaded(options.config)))
    elif options.command == "check":
        sys.stdout.write(f"{options.config}: good, digest {digest(loaded(options.config).value)}\n")
    elif options.command == "diff":
        changes = diff(loaded(options.a).value, loaded(options.b).value)
        sys.stdout.write("".join(f"{change}\n" for change in changes))
        return int(bool(changes))
    else:
        sys.stdout.write(json.dumps(schema(struct), indent=2) + "\n")
    return 0


def with_origins(loaded: Loaded[Any]) -> str:
    """The resolved TOML; behind each key a comment says where its value comes from."""
    lines: list[str] = []
    table = ""
    for line in tomli_w.dumps(loaded.tree).splitlines():
        name, equals, value = line.partition(" = ")
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif equals and not line.startswith(" ") and value not in ("[", "{"):
            line += f"  # {loaded.origins.get(table + name, 'default')}"
        lines.append(line)
    return "\n".join(lines) + "\n"
