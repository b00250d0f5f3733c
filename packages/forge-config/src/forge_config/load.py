"""From a TOML file and command-line flags to a typed value: defaults, `extends`, file, overrides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from msgspec import inspect as shapes

from forge_config.checks import Check, run
from forge_config.decode import Decoder
from forge_config.imports import import_modules
from forge_config.override import parse
from forge_config.plain import plain
from forge_config.problem import Problems
from forge_config.source import Layer, Tree, read
from forge_config.struct import Config, ConfigError, sentences_of
from forge_config.trace import trace

T = TypeVar("T", bound=Config)


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A loaded configuration.

    Attributes:
        value: the typed value.
        tree: the same as plain data, every default filled in.
        origins: where each dotted key of `tree` was set: `file:line`, the flag, `preset NAME` or `default`.
        files: the files that were read, the lowest layer first.
        imports: the modules that were imported; `to_toml` writes them, so that the text can be loaded again.
        unused: what a lower layer set of an open section, and another `type` above it does not take over,
            though it has such a key: `optimizer.lr = 0.1 (base.toml:7)`.
    """

    value: T
    tree: Tree
    origins: dict[str, str]
    files: tuple[Path, ...]
    imports: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def load(
    struct: type[T],
    path: Path | str,
    overrides: Sequence[str] = (),
    checks: Sequence[Check] = (),
    import_folders: Sequence[Path] = (),
    prepare: Callable[[Tree], None] = lambda tree: None,
    hints: Mapping[str, str] | None = None,
) -> Loaded[T]:
    """Read a configuration.

    Args:
        struct: the struct of the whole file; its fields are the sections.
        path: a TOML file. `extends` names files that it builds on, `imports` modules to import first.
        overrides: `--section.key=value`, the value in TOML; a bare word is a string.
        checks: each runs when all the sections that its parameters name are valid.
        import_folders: where modules are looked for last, after the working directory and beside the file.
        prepare: changes what all layers say together, in place, before it is decoded.
        hints: what unknown keys, by dotted key or by name, are called here.

    Raises:
        ConfigError: with every problem found.
    """
    origins: dict[str, str] = {}
    problems = Problems(origins, str(path), hints)
    chain = _Chain(problems)
    chain.add(Path(path), ())
    chain.report()
    flags, raw = parse(overrides, problems)
    layers = [*(layer for _, layer in chain.layers), flags]
    imports = _imports(layers, problems)
    import_modules(imports, [Path(path).parent, *import_folders], problems)
    layer = _merged(layers, struct)
    origins.update(layer.origins)
    prepare(layer.tree)
    decoder = Decoder(problems, origins, raw, complete=chain.complete)
    sections = decoder.fields(layer.tree, struct, "")
    for check in checks:
        run(check, sections, problems)
    problems.raise_if_any()
    value = _whole(struct, sections, problems)
    tree = plain(value)
    files = tuple(file for file, _ in chain.layers)
    unused = tuple(message for key, message in layer.unused.items() if key not in origins)
    return Loaded(value, tree, trace(tree, origins), files, tuple(imports), unused)


def load_sections(struct: type[T], path: Path | str) -> T:
    """Read some sections of one file, and import nothing: a file of others is read, not run.

    Args:
        struct: its fields are the sections that are wanted; all others are passed over.
        path: a TOML file. What it extends is passed over too, so it is one that `to_toml` wrote.

    Raises:
        ConfigError: with every problem found; a type that only an imported module knows is one.
    """
    layer = read(Path(path))
    tree = {name: layer.tree[name] for name in struct.__struct_fields__ if name in layer.tree}
    problems = Problems(layer.origins, str(path))
    sections = Decoder(problems, layer.origins, {}, complete=True).fields(tree, struct, "")
    problems.raise_if_any()
    return _whole(struct, sections, problems)


def _whole(struct: type[T], sections: Tree, problems: Problems) -> T:
    try:
        return struct(**sections)
    except ValueError as error:
        for sentence in sentences_of(error):
            problems.add_sentence("", sentence)
        problems.raise_if_any()
        raise


MAX_CHAIN = 100
"""Files that may extend one another, one after the other."""


class _Chain:
    """A file and all that it extends, each with its folder; `complete` tells whether all could be read.

    The layers of a file come before its own, each file once, where it stands last: a layer that is laid over
    itself again changes nothing in between that it does not set.
    """

    def __init__(self, problems: Problems) -> None:
        self.complete = True
        self._problems = problems
        self._highest_first: list[tuple[Path, Layer]] = []
        self._seen: set[Path] = set()
        self._failed: list[tuple[str | None, str]] = []

    @property
    def layers(self) -> list[tuple[Path, Layer]]:
        """The lowest layer first."""
        return self._highest_first[::-1]

    def add(self, path: Path, chain: tuple[Path, ...], named_at: str | None = None) -> None:
        """Add the layers of a file: its own, and below it what it extends."""
        here = path.resolve()
        if here in chain:
            circle = " -> ".join(str(one) for one in (*chain[chain.index(here) :], here))
            return self._fail(named_at, f"the files extend each other in a circle: {circle}")
        if here in self._seen:
            return None
        self._seen.add(here)
        if len(chain) > MAX_CHAIN:
            return self._fail(named_at, f"{path}: more than {MAX_CHAIN} files extend one another; use fewer")
        try:
            own = read(path)
        except ConfigError as error:
            counted = (
                f"; names count from the folder of the file that extends, {chain[-1].parent}" if chain else ""
            )
            return self._fail(named_at, f"{error}{'' if path.exists() else counted}")
        below = own.tree.pop("extends", [])
        place = own.origins.pop("extends", str(path))
        self._highest_first.append((path, own))
        names = cast(list[Any], below if isinstance(below, list) else [below])
        for name in reversed(names):
            if isinstance(name, str):
                self.add(_short(path.parent / name), (*chain, here), place)
            else:
                self._fail(place, f"given {name!r}; expected the name of a file, or an array of names")
        return None

    def _fail(self, named_at: str | None, text: str) -> None:
        self.complete = False
        self._failed.append((named_at, text))

    def report(self) -> None:
        """Report the failed imports as problems, in order."""
        for named_at, text in reversed(self._failed):
            if named_at is None:
                # the text begins with the file that failed
                place, _, text = text.partition(": ")
                self._problems.add("", text, place=place)
            else:
                self._problems.add("extends", text, place=named_at)


def _short(path: Path) -> Path:
    """The path without `..`, when that is the same file."""
    short = Path(os.path.normpath(path))
    return short if short.resolve() == path.resolve() else path


def _imports(layers: Sequence[Layer], problems: Problems) -> dict[str, str]:
    """The modules that all layers want imported, and where each is named."""
    modules: dict[str, str] = {}
    for layer in layers:
        names = layer.tree.pop("imports", [])
        place = layer.origins.get("imports", "")
        if not isinstance(names, list):
            problems.add(
                "imports",
                f"given {names!r}; expected an array of module names, as in ['my_lab']",
                place=place,
            )
            continue
        for name in cast(list[Any], names):
            if isinstance(name, str) and all(part.isidentifier() for part in name.split(".")):
                modules.setdefault(name, place)
            else:
                problems.add("imports", f"given {name!r}; expected the dotted name of a module", place=place)
    return modules


def _merged(layers: Sequence[Layer], struct: type[Config]) -> Layer:
    shape = shapes.type_info(struct)
    merged = Layer()
    for layer in layers:
        merged.put(layer, shape)
    return merged
