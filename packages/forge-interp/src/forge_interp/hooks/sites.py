"""Which places of a model a name stands for.

A site is `module[:part][#call]`: `layers.3.attention:out`, `layers.*:in`, `**.attn:attn.pattern`,
`head:out#1`; keys of outputs that hold dots, colons or hashes stand in brackets: `head:out[a.b].0`. #k is the
k-th time that the value arises since the `with` began, from 0. A module whose name holds a colon or a hash
needs its part: `a:b:out`.
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
        """The site that a text names; InterpError where it does not follow the grammar."""
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
        """The same place at one call; the first is written without a number."""
        return self if self.call == (call or None) else replace(self, call=call or None)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        name = f"{self.module}:{self.part}{spell(self.path)}"
        return name if self.call is None else f"{name}#{self.call}"


def spell(path: Iterable[str]) -> str:
    """A path as the grammar has it: `.key`, or `[key]` for a key with dots, colons or hashes in it."""
    return "".join(f"[{key}]" if not key or re.search(r"[.:#\[]", key) else f".{key}" for key in path)


def canonical(text: str) -> str:
    """The key under which a site is stored: part written out, the first call without its number."""
    site = Site.parse(text)
    return str(site.numbered(site.call or 0))


def key_of(site: str, keys: Collection[str]) -> str:
    """The one of the keys that a site is, however it is spelled; KeyError names near ones."""
    key = site if site in keys else canonical(site)
    if key in keys:
        return key
    near = get_close_matches(key, keys, n=4, cutoff=0.3) or list(keys)[:8]
    raise KeyError(f"{key}: no such value; there are {', '.join(near) or 'none yet'}")


class BySite(Mapping[str, Any]):
    """Values by site, found under any spelling of it."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(values or {})

    def put(self, key: str, value: Any) -> None:
        """Keep the value of a site, whose key is spelled as `canonical` does."""
        self._values[key] = value

    def __getitem__(self, site: str) -> Any:
        return self._values[key_of(site, self._values)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name without wrappers, shared ones under each of their names.

    A checkpoint wrapper stands for what it wraps (it is called once, the inside again in the backward pass);
    what `torch.compile` wrapped stands for itself, for it is that which runs.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        clean = _WRAPPERS.sub("", name).removeprefix(".")
        if clean not in found or name.endswith("_orig_mod"):
            found[clean] = module
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """What a checkpoint wrapper wraps; any other module itself."""
    while hasattr(module, "_checkpoint_wrapped_module"):
        module = module._checkpoint_wrapped_module  # type: ignore[assignment]
    return module


def find_sites(
    model: nn.Module, patterns: str | nn.Module | Iterable[str | nn.Module]
) -> dict[str, list[Site]]:
    """The sites that each pattern names, in the order of the model.

    Raises InterpError: a pattern names no module; lists near misses.
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
    """The sites that each pattern names, without a run; InterpError where one names no module."""
    return {pattern: [str(site) for site in found] for pattern, found in find_sites(model, sites).items()}


def _name_of(modules: Mapping[str, nn.Module], given: nn.Module) -> str:
    """The output of a module as text; InterpError if it is none of these."""
    check_kind("a site", given, nn.Module, "a text such as 'layers.*:out', or a module")
    for name, module in modules.items():
        if module is given or unwrapped(module) is given:
            return f"{name}:out"
    owner = type(modules[""]).__name__
    raise InterpError(f"a {type(given).__name__} is no module of this {owner}; expected one")


def _parts(name: str) -> list[str]:
    return name.split(".") if name else []


def _fits(pattern: list[str], name: list[str]) -> bool:
    """`*` is (part of) one component, `**` any number of them."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_fits(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(pattern[1:], name[1:])


def _near(module: str, modules: Iterable[str]) -> str:
    """The most similar names, numbers folded to `*`."""
    kinds = sorted({re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules if name})
    last = module.rpartition(".")[2]
    near = get_close_matches(module, kinds, n=4, cutoff=0.5)
    near += [kind for kind in kinds if last and last in kind.rpartition(".")[2] and kind not in near][:4]
    return ", ".join(near or kinds[:20])
