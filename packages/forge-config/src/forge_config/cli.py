"""The command `forge-config`: show, check, diff and schema."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_config.change import MayChange, changeable
from forge_config.diff import diff
from forge_config.load import Loaded, load
from forge_config.plain import digest
from forge_config.schema import schema
from forge_config.struct import Config, ConfigError
from forge_config.toml import to_toml

EX_CONFIG = 78
"""The exit code of a configuration that cannot be used (EX_CONFIG of sysexits.h)."""

DEFAULT_STRUCT = "forge_trainer.config.job:Job"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, for `diff` 1 when the files differ, 78 for a configuration that cannot be used.
    """
    options, overrides = _parser().parse_known_args(argv)
    try:
        return _run(options, overrides)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument(
        "--struct",
        default=DEFAULT_STRUCT,
        metavar="MODULE:NAME",
        help="the struct of the whole file; `checks` of its module are run (default: %(default)s)",
    )
    parser = argparse.ArgumentParser(
        prog="forge-config",
        description="What a configuration means. Keys are overridden with --section.key=value.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, parents=[shared], allow_abbrev=False)

    command("show", "the resolved TOML, with the origin of each value").add_argument("config")
    command("check", "is it valid? all problems at once").add_argument("config")
    both = command("diff", "the keys that two files differ in; exit code 1 if there are any")
    both.add_argument("a")
    both.add_argument("b")
    schema_command = command("schema", "JSON schema for editors")
    schema_command.add_argument(
        "--resolved", action="store_true", help="of a resolved file: required keys are demanded"
    )
    return parser


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    struct, checks = _struct(options.struct)

    def loaded(path: str) -> Loaded[Any]:
        return load(struct, path, overrides, checks)

    if options.command == "show":
        result = loaded(options.config)
        sys.stdout.write(to_toml(result.value, _comments(result), result.imports))
    elif options.command == "check":
        sys.stdout.write(f"{options.config}: good, digest {digest(loaded(options.config).value)}\n")
    elif options.command == "diff":
        changes = diff(loaded(options.a).value, loaded(options.b).value)
        sys.stdout.write("".join(f"{change}\n" for change in changes))
        return int(bool(changes))
    elif overrides:
        raise ConfigError(f"given {' '.join(overrides)}; schema takes no configuration")
    else:
        sys.stdout.write(json.dumps(schema(struct, partial=not options.resolved), indent=2) + "\n")
    return 0


def _comments(result: Loaded[Any]) -> dict[str, str]:
    """Where each value comes from, and whether it may change later."""
    words = {MayChange.FREELY: " (may change)", MayChange.RECORDED: " (may change, recorded)"}
    rules = changeable(result.value)
    return {
        key: origin + words.get(rules.get(key, MayChange.NEVER), "") for key, origin in result.origins.items()
    }


def _struct(spec: str) -> tuple[type[Config], Sequence[Any]]:
    """The struct that `module:Name` names, and the checks of its module."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"--struct {spec}: {error}; give module:Name of a Config struct") from None
    struct = getattr(module, name, None)
    if not (isinstance(struct, type) and issubclass(struct, Config)):
        raise ConfigError(f"--struct {spec}: {name!r} is no Config struct in {module_name}")
    return struct, getattr(module, "checks", ())
