"""Where is a tensor in nested arguments and outputs, and how is it replaced?"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.sites import Site, spell, unwrapped


def read(tree: Any, path: tuple[str, ...], site: Site) -> Tensor:
    """Return the tensor at a path of an output; without a path, the output or a tuple's first item."""
    found = tree
    for key in path or _first(tree):
        try:
            found = _child(found, key)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            found = None
    if isinstance(found, Tensor):
        return found
    paths = []
    for to in tensor_paths(tree):  # as the grammar of sites has it
        part, to = ("out", to) if site.part == "out" else ("in" if to[0] == "args" else "kw", to[1:])
        paths.append(f"{site.module}:{part}{spell(to)}")
    have = f"it has {', '.join(paths[:8])}" if paths else "it holds no tensor"
    raise InterpError(f"site {str(site)!r} is {type(found).__name__}, expected a tensor; {have}")


def write(tree: Any, path: tuple[str, ...], value: Tensor) -> Any:
    """Return the tree with another tensor at that path; the argument is not changed."""
    keys = path or _first(tree)
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    return _with_child(tree, key, write(_child(tree, key), rest, value) if rest else value)


def tensor_paths(tree: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all tensors in nested tuples, mappings and dataclasses."""
    if isinstance(tree, Tensor):
        return [prefix]
    return [path for key in _keys(tree) for path in tensor_paths(_child(tree, key), (*prefix, key))]


def argument(module: nn.Module, args: tuple, kwargs: dict, site: Site) -> tuple[str, ...]:
    """Find a site's argument: ("args", "0", ...) or ("kwargs", name, ...); InterpError if there is none."""
    if site.part == "kw":
        name, *rest = site.path
        if name in kwargs:
            return ("kwargs", name, *rest)
        positions = list(inspect.signature(unwrapped(module).forward).parameters)[: len(args)]
        if name in positions:
            return ("args", str(positions.index(name)), *rest)
        names = ", ".join([*positions, *kwargs])
        raise InterpError(f"site {str(site)!r}: the call had no argument {name!r}, but {names or 'none'}")
    if site.path or args:
        return ("args", *(site.path or "0"))
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return ("kwargs", name)
    raise InterpError(f"site {str(site)!r}: the module was called without a tensor")


def _first(tree: Any) -> tuple[str, ...]:
    is_sequence = isinstance(tree, (tuple, list))
    return ("0",) if is_sequence and isinstance(next(iter(tree), None), Tensor) else ()


def _keys(tree: Any) -> list[str]:
    if isinstance(tree, (tuple, list)):
        return [str(i) for i in range(len(tree))]
    if isinstance(tree, Mapping):
        return [str(key) for key in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [field.name for field in fields(tree)]
    return []


def _child(tree: Any, key: str) -> Any:
    if isinstance(tree, Tensor):
        raise TypeError(f"a tensor is the end of a path; {key!r} goes on")
    if isinstance(tree, (tuple, list)) and key.isdigit():
        return tree[int(key)]
    if isinstance(tree, Mapping):
        return tree[_same_key(tree, key)]
    return getattr(tree, key)


def _same_key(tree: Mapping, key: str) -> Any:
    return key if key in tree else next((k for k in tree if str(k) == key), key)


def _with_child(tree: Any, key: str, value: Any) -> Any:
    if isinstance(tree, tuple):
        names = getattr(tree, "_fields", ()) or getattr(tree, "__match_args__", ())
        position = names.index(key) if key in names else int(key)
        items = [*tree[:position], value, *tree[position + 1 :]]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items) if names else tuple(items)  # torch.return_types, such as that of max()
    changed = copy.copy(tree)
    if isinstance(tree, list):
        changed[int(key)] = value
    elif isinstance(tree, Mapping):
        changed[_same_key(tree, key)] = value  # type: ignore[index]
    else:
        object.__setattr__(changed, key, value)
    return changed
