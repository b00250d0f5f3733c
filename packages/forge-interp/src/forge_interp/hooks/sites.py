"""Which places of a model does a name stand for?

A site is `module[:part][#call]`: `layers.3.attention:out`, `layers.*:in`, `**.attn:attn.pattern`,
`head:out#1`. Output keys with dots, colons or hashes stand in brackets: `head:out[a.b].0`. #k is the k-th
time that the value arises since the `with` began, from 0. A module whose name has a colon or a hash needs
its part: `a:b:out`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import nn

from forge_interp.errors import InterpError, check_kind

ATTENTION_TENSORS = ("q", "k", "v", "raw", "scores", "pattern", "z")
ATTENTION_STATISTICS = ("entropy", "sink", "previous")
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_SITE = re.compile(r"(.*?)(?::((?:out|in|kw|attn)(?:[.\[].*?)?))?(?:#(\d+))?", re.DOTALL)
_PART = re.compile(r"(out|in|kw|attn)(.*)", re.DOTALL)
_KEY = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")
_GRAMMAR = "module[:out|in|out.PATH|in.PATH|kw.NAME|attn.NAME][#call]"


@dataclass(frozen=True)
class Site:
    """A place of a model, or with `*` a family of places."""

    module: str  # dotted name as in `named_modules()`, without wrappers of compile, checkpoint and FSDP1
    part: str = "out"  # or `in`, `kw`, `attn`
    path: tuple[str, ...] = ()  # in that part: keys of a nested output, the keyword, the attention tensor
    call: int | None = None  # which call of the module since the `with` began, from 0; None for all

    @classmethod
    def parse(cls, text: str) -> Site:
        """Parse a site; InterpError where the text does not follow the grammar."""
        module, part, call = _SITE.fullmatch(text).groups()  # type: ignore[union-attr]
        if part is None and "#" in module:
            wrong = module.partition("#")[2]
            raise InterpError(f"site {text!r}: the call {wrong!r} is no number; sites read {_GRAMMAR}")
        if part is None and ":" in module:
            raise InterpError(f"site {text!r}: no part {module.rpartition(':')[2]!r}; sites read {_GRAMMAR}")
        kind, rest = _PART.fullmatch(part or "out").groups()  # type: ignore[union-attr]
        path = tuple(plain or bracketed for plain, bracketed in _KEY.findall(rest))
        if spell(path) != rest or (not path and kind in ("kw", "attn")):
            raise InterpError(f"site {text!r}: no part {part!r}; sites read {_GRAMMAR}")
        names, name = ATTENTION_TENSORS + ATTENTION_STATISTICS, ".".join(path)
        if kind == "attn" and name not in names and not re.fullmatch(r"lag\.\d+", name):
            raise InterpError(f"site {text!r}: attention has no {name!r}, but {', '.join(names)}, lag.K")
        return cls(module, kind, path, int(call) if call else None)

    def numbered(self, call: int) -> Site:
        """Return the same place at one call; the first call has no number."""
        return self if self.call == (call or None) else replace(self, call=call or None)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        name = f"{self.module}:{self.part}{spell(self.path)}"
        return name if self.call is None else f"{name}#{self.call}"


def spell(path: Iterable[str]) -> str:
    """Write a path in the grammar: `.key`, or `[key]` for a key with dots, colons or hashes."""
    return "".join(f"[{key}]" if not key or re.search(r"[.:#\[]", key) else f".{key}" for key in path)


def canonical(text: str) -> str:
    """Return the key of a site: the part written out, the first call without its number."""
    site = Site.parse(text)
    return str(site.numbered(site.call or 0))


def key_of(site: str, keys: Collection[str]) -> str:
    """Return the key of a site in any spelling, among `keys`; KeyError names similar keys."""
    key = site if site in keys else canonical(site)
    if key in keys:
        return key
    near = get_close_matches(key, keys, n=4, cutoff=0.3) or list(keys)[:8]
    raise KeyError(f"{key}: no such value; there are {', '.join(near) or 'none yet'}")


class BySite(Mapping[str, Any]):
    """Values by site, in any spelling of the site."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(values or {})

    def put(self, key: str, value: Any) -> None:
        """Keep the value of a site; `key` is spelled as by `canonical`."""
        self._values[key] = value

    def __getitem__(self, site: str) -> Any:
        return self._values[key_of(site, self._values)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by name without wrappers, shared modules under each of their names.

    A checkpoint wrapper stands for its module: it is called once, the module again in the backward pass. A
    module inside a `torch.compile` wrapper stands for itself, because it is the one that runs.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        clean = _WRAPPERS.sub("", name).removeprefix(".")
        if clean not in found or name.endswith("_orig_mod"):
            found[clean] = module
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a checkpoint wrapper; any other module itself."""
    while hasattr(module, "_checkpoint_wrapped_module"):
        module = module._checkpoint_wrapped_module  # type: ignore[assignment]
    return module


def find_sites(
    model: nn.Module, patterns: str | nn.Module | Iterable[str | nn.Module]
) -> dict[str, list[Site]]:
    """Return the sites that each pattern names, in the order of the model.

    InterpError, which lists similar names: a pattern names no module.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    check_kind("sites", patterns, (str, nn.Module, Iterable), "texts such as 'layers.*:out', or modules")
    modules, found = named_modules(model), {}
    for given in [patterns] if isinstance(patterns, str | nn.Module) else patterns:
        pattern = given if isinstance(given, str) else _name_of(modules, given)
        site = Site.parse(pattern)
        names = [site.module] if site.module in modules else []
        names = names or [name for name in modules if _fits(_parts(site.module), _parts(name))]
        if not names:
            near = _near(site.module, modules)
            raise InterpError(
                f"site {pattern!r} names no module of {type(model).__name__}; did you mean {near}?"
            )
        found[pattern] = [replace(site, module=name) for name in names]
    if not found:
        raise InterpError("no sites were given; expected at least one, such as 'layers.*:out'")
    return found


def resolve(model: nn.Module, sites: str | nn.Module | Iterable[str | nn.Module]) -> dict[str, list[str]]:
    """Return the sites that each pattern names, without a run; InterpError where one names no module."""
    return {pattern: [str(site) for site in found] for pattern, found in find_sites(model, sites).items()}


def _name_of(modules: Mapping[str, nn.Module], given: nn.Module) -> str:
    """Return the site of a module's output; InterpError if the model has no such module."""
    check_kind("a site", given, nn.Module, "a text such as 'layers.*:out', or a module")
    for name, module in modules.items():
        if module is given or unwrapped(module) is given:
            return f"{name}:out"
    owner = type(modules[""]).__name__
    raise InterpError(f"a {type(given).__name__} is no module of this {owner}; expected one")


def _parts(name: str) -> list[str]:
    return name.split(".") if name else []


def _fits(pattern: list[str], name: list[str]) -> bool:
    """Match names: `*` is (part of) one component, `**` any number of components."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_fits(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(pattern[1:], name[1:])


def _near(module: str, modules: Iterable[str]) -> str:
    """Return the most similar names, with numbers written as `*`."""
    kinds = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules if name})
    last = module.rpartition(".")[2]
    near = get_close_matches(module, kinds, n=4, cutoff=0.5)
    near += [kind for kind in kinds if last and last in kind.rpartition(".")[2] and kind not in near][:4]
    return ", ".join(near or kinds[:20])
