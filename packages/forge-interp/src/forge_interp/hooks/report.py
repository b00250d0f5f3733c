"""What sites a pattern resolves to, and which shapes they would have, before any real computation."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forge_interp.hooks.capture import capture
from forge_interp.hooks.sites import find_sites
from forge_interp.hooks.torch_private import fake_tensors


@dataclass(frozen=True)
class Report:
    """What patterns resolve to; `str` is a table.

    `sites` are by pattern, in the order of the model; `shapes` have shape and dtype by key, of the values
    that a dry run gave; `problem` is why shapes are missing although arguments were given, or None.
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
                rows += [f"  {key}  {_text(*self.shapes[key])}" for key in keys] or [f"  {site}"]
        return "\n".join([*rows, self.problem] if self.problem else rows)


def resolve(model: nn.Module, sites: str | Iterable[str], /, *args: Any, **kwargs: Any) -> Report:
    """Say what a capture of these sites would give; InterpError where a pattern names no module.

    With `args` or `kwargs`, example arguments of the model, a dry run on fake tensors finds the shapes: no
    arithmetic, no memory, the model is left as it was.
    """
    patterns = [sites] if isinstance(sites, str) else list(sites)
    found = {p: [str(site) for site in of_pattern] for p, of_pattern in find_sites(model, patterns).items()}
    if not args and not kwargs:
        return Report(found, {})
    return Report(found, *_dry_run(model, patterns, args, kwargs))


def _dry_run(model: nn.Module, patterns: list[str], args: Any, kwargs: Any) -> tuple[dict, str | None]:
    """Shapes by key as far as the run came, and why it came no further."""
    from torch.utils._pytree import tree_map_only

    mode = fake_tensors()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state, args, kwargs = tree_map_only(Tensor, mode.from_tensor, (state, args, kwargs))
    acts: Mapping[str, Tensor] = {}
    problem = None
    options: dict[str, Any] = {"check_attention": False, "attention_bytes": 1 << 62}
    try:
        with _unchanged(model), torch.no_grad(), mode, capture(model, patterns, **options) as acts:
            functional_call(model, state, args, kwargs)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        problem = f"dry run ended by {type(error).__name__}: {reason}; for the rest capture a small batch"
    return {key: (tuple(value.shape), value.dtype) for key, value in acts.items()}, problem


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back what a forward pass keeps on modules, such as tables of positions: a dry run's are fake."""
    kinds = (dict, OrderedDict, list, set)  # tables by length, hooks, buffers
    inside = [value for module in model.modules() for value in vars(module).values() if type(value) in kinds]
    kept = [(content, copy(content)) for content in [*map(vars, model.modules()), *inside]]
    try:
        yield
    finally:
        for content, before in kept:
            content.clear()
            content.extend(before) if isinstance(content, list) else content.update(before)


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
