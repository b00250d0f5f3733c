"""Which sites patterns resolve to, before anything runs."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from forge_interp.hooks.sites import find_sites


@dataclass(frozen=True)
class Report:
    """What patterns resolve to; `str` is a list."""

    sites: dict[str, list[str]]  # by pattern, in the order of the model

    def __str__(self) -> str:
        rows = []
        for pattern, sites in self.sites.items():
            rows += [f"{pattern}  ({len(sites)} sites)", *(f"  {site}" for site in sites)]
        return "\n".join(rows)


def resolve(model: nn.Module, sites: str | Iterable[str]) -> Report:
    """Say which sites patterns name; InterpError where one names no module. `record` shows shapes."""
    return Report({p: [str(site) for site in found] for p, found in find_sites(model, sites).items()})
