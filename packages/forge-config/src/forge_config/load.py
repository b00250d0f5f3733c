"""From a TOML file and command-line flags to a typed value: defaults, `extends`, file, overrides."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli

from forge_config.decode import FAILED, Decoder
from forge_config.plain import plain
from forge_config.problem import Problems
from forge_config.source import Layer, Tree, read
from forge_config.struct import Config, ConfigError

T = TypeVar("T", bound=Config)

Check = Callable[..., Iterable[str] | None]
"""A check over several sections, named by its parameters; raises ValueError or yields sentences."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What a configuration means.

    Attributes:
        value: the typed value.
        tree: the same as plain data, every default filled in.
        origins: where each dotted key was set; a key that is not there has its default.
    """

    value: T
    tree: Tree
    origins: dict[str, str]


def load(
    struct: type[T], path: Path | str, overrides: Sequence[str] = (), checks: Sequence[Check] = ()
) -> Loaded[T]:
    """Read a configuration.

    Args:
        struct: the struct of the whole file; its fields are the sections.
        path: a TOML file. `extends` names files that it builds on, `imports` modules to import before decoding.
        overrides: `--section.key=value`, the value in TOML; a bare word is a string.
        checks: each runs when all the sections that its parameters name are valid.

    Raises:
        ConfigError: with every problem found.
    """
    layer = _with_extends(Path(path), ())
    problems = Problems(layer.origins, str(path))
    raw = _override(layer, overrides, problems)
    _import(layer.tree.pop("imports", []), Path(path).parent, problems)
    decoder = Decoder(problems, layer.origins, raw)
    sections = decoder.fields(layer.tree, struct, "")
    for check in checks:
        _run(check, sections, problems)
    problems.raise_if_any()
    try:
        value = struct(**sections)
    except ValueError as error:
        problems.add("", str(error))
        problems.raise_if_any()
        raise
    return Loaded(value, plain(value), layer.origins)


def _with_extends(path: Path, chain: tuple[Path, ...]) -> Layer:
    here = path.resolve()
    if here in chain:
        raise ConfigError(f"{path}: extends itself: {' -> '.join(str(p) for p in (*chain, here))}")
    own = read(path)
    below = own.tree.pop("extends", [])
    below = [below] if isinstance(below, str) else below
    if not isinstance(below, list) or not all(isinstance(name, str) for name in below):
        raise ConfigError(
            f"{own.origins.get('extends', path)}: extends: given {below!r}; expected file names"
        )
    imports = own.tree.pop("imports", [])
    layer = Layer()
    for name in below:
        layer.put(_with_extends(path.parent / name, (*chain, here)))
    inherited = layer.tree.get("imports", [])
    layer.put(own)
    if isinstance(imports, list) and (merged := list(dict.fromkeys([*inherited, *imports]))):
        layer.tree["imports"] = merged
    elif imports:
        layer.tree["imports"] = imports
    return layer


def _override(layer: Layer, overrides: Sequence[str], problems: Problems) -> dict[str, str]:
    """Lay the flags over the file; returns their literal text by key."""
    raw: dict[str, str] = {}
    for flag in overrides:
        name, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not equals or not all(name.split(".")):
            problems.add("", f"given {flag!r}; expected --section.key=value", place="command line")
            continue
        try:
            value = tomli.loads(f"value = {text}")["value"]
        except tomli.TOMLDecodeError:
            value = text
        tree: Tree = {}
        inner = tree
        *sections, key = name.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
        layer.put(Layer(tree, {name: f"--{name}"}))
        raw[name] = text
    return raw


def _import(names: Any, folder: Path, problems: Problems) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.add("imports", f"given {names!r}; expected a list of module names")
        return
    with _importable(str(Path.cwd()), str(folder.resolve())):
        for name in names:
            try:
                importlib.import_module(name)
            except (ImportError, ConfigError) as error:
                problems.add("imports", f"{name} cannot be imported: {error}")


@contextmanager
def _importable(*folders: str) -> Iterator[None]:
    """Let modules be found in `folders` after all other places."""
    added = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def _run(check: Check, sections: dict[str, Any], problems: Problems) -> None:
    names = list(inspect.signature(check).parameters)
    if any(sections.get(name, FAILED) is FAILED for name in names):
        return
    try:
        for sentence in check(**{name: sections[name] for name in names}) or ():
            problems.add("", sentence, place=problems.place(names[0]))
    except ValueError as error:
        problems.add("", str(error), place=problems.place(names[0]))
