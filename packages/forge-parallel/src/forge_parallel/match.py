"""Which modules a pattern names, and placeholders for modules of other pipeline stages."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from forge_parallel.error import ParallelError


class PassThrough(nn.Module):
    """A placeholder for a module that another stage has. No pattern matches it."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """Return the first argument."""
        return x


class PassTuple(PassThrough):
    """A placeholder for a block that another stage has and that returns a tuple."""

    def forward(self, x: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Return the first argument, in a tuple."""
        return (x,)


class Zero(PassThrough):
    """A placeholder for a module of another stage whose output is already part of the hidden state."""

    def forward(self, *args: Any, **_: Any) -> Tensor:
        """Return [] zero."""
        device = next((x.device for x in args if isinstance(x, Tensor)), None)
        return torch.zeros((), device=device)


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern; `*` stands for (part of) one component, never for several.

    `layers.*` fits `layers.0` and not `layers.0.ffn`.
    """
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(fnmatchcase(n, p) for p, n in zip(parts, names, strict=True))


def find(model: nn.Module, pattern: str, kind: str = "pattern") -> dict[str, nn.Module]:
    """Return the modules that a pattern matches, in the order of the model; the empty one matches the model.

    Args:
        model: the whole model, or a stage of it.
        pattern: see `matches`.
        kind: what the pattern is, for the message.

    Raises:
        ParallelError: no module matches; the message lists the shapes of names in the model.
    """
    if not pattern:
        return {"": model}
    found = {name: module for name, module in model.named_modules() if name and matches(pattern, name)}
    if not found and not _is_elsewhere(model, pattern):
        kinds = sorted({_without_numbers(name) for name, _ in model.named_modules() if name})
        raise ParallelError(
            f"{kind} {pattern!r} names no module of {type(model).__name__}; it has {', '.join(kinds)}"
        )
    return {name: module for name, module in found.items() if not isinstance(module, PassThrough)}


def _is_elsewhere(model: nn.Module, pattern: str) -> bool:
    """Whether a pattern is about modules inside a module that another stage has."""
    parts = pattern.split(".")
    absent = [name for name, module in model.named_modules() if isinstance(module, PassThrough)]
    return any(matches(".".join(parts[: 1 + name.count(".")]), name) for name in absent)


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
