"""What sites a pattern resolves to, and which shapes they would have, before any real computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.capture import capture
from forge_interp.sites import find_sites


@dataclass(frozen=True)
class Report:
    """What patterns resolve to; `str` is a table.

    Attributes:
        sites: sites by pattern, in the order of the model.
        shapes: shape and dtype by key, of the values that a dry run gave; empty without example arguments.
        problem: why there are no shapes although arguments were given, or None.
    """

    sites: dict[str, list[str]]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    problem: str | None = None

    def __str__(self) -> str:
        rows = []
        for pattern, sites in self.sites.items():
            rows.append(f"{pattern}  ({len(sites)} sites)")
            for site in sites:
                keys = [key for key in self.shapes if key.partition("#")[0] == site.partition("#")[0]]
                rows += [f"  {key}  {_describe(*self.shapes[key])}" for key in keys] or [f"  {site}"]
        return "\n".join([*rows, self.problem] if self.problem else rows)


def resolve(model: nn.Module, sites: str | Iterable[str], /, *args: Any, **kwargs: Any) -> Report:
    """Say what a capture of these sites would give.

    Args:
        model: any module.
        sites: as for `capture`.
        args: example arguments of the model; with any, a dry run on fake tensors finds the shapes: no
            arithmetic, no memory, the model is left as it was.
        kwargs: the same.

    Raises:
        InterpError: a pattern names no module.
    """
    patterns = [sites] if isinstance(sites, str) else list(sites)
    found = {p: [str(site) for site in of_pattern] for p, of_pattern in find_sites(model, patterns).items()}
    if not args and not kwargs:
        return Report(found, {})
    try:
        return Report(found, _dry_run(model, patterns, args, kwargs))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        return Report(found, {}, f"no shapes: the dry run ended with {type(error).__name__}: {first}")


def _dry_run(model: nn.Module, patterns: list[str], args: Any, kwargs: Any) -> dict:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    options = {"check_attention": False, "attention_bytes": 1 << 62}
    with torch.no_grad(), mode, capture(model, patterns, **options) as acts:
        model(*args, **kwargs)
        return {key: (tuple(value.shape), value.dtype) for key, value in acts.items()}


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
