"""A hook of the user by the path of its class, without a config class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from forge_config import ConfigError, Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("class")
class ClassHookConfig(HookConfig):
    """Builds `Class(run, **options)`, a subclass of `forge_trainer.hooks.Hook`.

    Attributes:
        path: path of the class, `module:Class`; the module is looked for like the modules of `imports`.
        options: further arguments of the class.
    """

    path: Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    options: dict[str, Any] = {}

    def found(self) -> type[Hook]:
        """Import the class.

        Raises:
            ConfigError: there is no such class, or it is no hook.
        """
        module, _, name = self.path.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except (Exception, SystemExit) as error:  # a module may raise anything
            raise ConfigError(
                f"{self.path}: {module} cannot be imported: {type(error).__name__}: {error}; modules are "
                "looked for in the environment, the working directory and beside the configuration"
            ) from None
        if not (isinstance(found, type) and issubclass(found, Hook)):
            what = "no such name" if found is None else "no subclass of forge_trainer.hooks.Hook"
            raise ConfigError(f"{self.path}: {name} is {what} in {module}; give module:Class of a hook")
        return found

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`.

        Raises:
            ConfigError: the class cannot be found, or does not take the options.
        """
        kind = self.found()
        try:
            hook = kind(run, **self.options)  # type: ignore[call-arg]
        except TypeError as error:
            given = ", ".join(["run", *self.options])
            raise ConfigError(
                f"{self.path}: {kind.__name__}({given}) cannot be built: {error}; write "
                f"def __init__(self, {given}), the keys of `options` after the run"
            ) from error
        hook.every = self.every_steps
        return hook


def classes_in(folders: Sequence[Path]) -> Callable[..., Iterator[str]]:
    """Return a check that all classes of hooks exist; the check makes the folders importable."""

    def hooks_name_classes(hooks: Mapping[str, HookConfig]) -> Iterator[str]:
        mine = {name: one for name, one in hooks.items() if isinstance(one, ClassHookConfig)}
        for folder in (Path.cwd(), *folders) if mine else ():
            if (place := str(folder.resolve())) not in sys.path:
                sys.path.append(place)
        importlib.invalidate_caches()
        for name, config in mine.items():
            try:
                config.found()
            except ConfigError as error:
                yield f"hooks.{name}.path = {error}"

    return hooks_name_classes
