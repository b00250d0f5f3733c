"""Imports the modules that a configuration names, so that their parts can join registries."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_config.problem import Problems


def import_modules(modules: Mapping[str, str], folders: Sequence[Path], problems: Problems) -> None:
    """Import modules; report those that fail as problems.

    Args:
        modules: dotted names, and where the configuration names them.
        folders: of the configuration, the first one to look in first. They and the working directory stay
            importable, after all other places, because a plug may import its heavy half when it is built.
        problems: takes what fails.
    """
    if not modules:
        return
    for place in (str(Path.cwd()), *(str(folder.resolve()) for folder in folders)):
        if place not in sys.path:
            sys.path.append(place)
    importlib.invalidate_caches()
    for name, place in modules.items():
        try:
            importlib.import_module(name)
        # A module may raise anything; one that ends the interpreter would pass for a job that is done.
        except (Exception, SystemExit) as error:
            problems.add(
                "imports", f"module {name} cannot be imported: {_reason(error, name)}", place=place or None
            )


def _reason(error: BaseException, name: str) -> str:
    """The error with the line of the module that raised it, unless the module was simply not found."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None and name.startswith(error.name):
        return f"{error}; looked for in the environment, the working directory and beside the configuration"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "importlib" not in one.filename]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{at}"
