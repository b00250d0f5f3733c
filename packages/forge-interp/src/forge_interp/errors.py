"""Which error does this package raise?"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


class InterpError(ValueError):
    """A user error; the text names the input, what was expected, and a remedy."""


def optional(package: str, caller: str, extra: str) -> Any:
    """Import an optional package; InterpError says how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        text = f"{caller} needs {package}; install it: pip install 'forge-interp[{extra}]'"
        raise InterpError(text) from error


def check_kind(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raise InterpError, which names `expected`, unless an argument has one of these types.

    True and False do not count as `Integral`.
    """
    is_bool = isinstance(value, bool) and bool not in (kinds if isinstance(kinds, tuple) else (kinds,))
    if not isinstance(value, kinds) or is_bool:
        raise InterpError(f"{name} is {value!r:.80}; expected {expected}")


def kind_of(value: Any) -> str:
    """Return the shape of a tensor, else the name of the type, for messages."""
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def fitting(value: Tensor, what: str) -> Iterator[None]:
    """Turn torch's errors about shapes and indices in the `with` into an InterpError that names `what`."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, InterpError):
        raise
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InterpError(f"{what} does not fit a value {list(value.shape)}: {error}") from error
