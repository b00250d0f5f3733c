"""Which error does this package raise?"""

from importlib import import_module
from typing import Any


class InterpError(ValueError):
    """A request that cannot be met: the text says what was given, what was expected, what to do."""


def optional(package: str, caller: str, extra: str) -> Any:
    """Import a package that few functions need; InterpError says how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        text = f"{caller} needs {package}; install it: pip install 'forge-interp[{extra}]'"
        raise InterpError(text) from error
