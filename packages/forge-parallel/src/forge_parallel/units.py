"""Which modules are sharded together, and whether that can be done."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.plan import Plan

ROOT = "the root"


@dataclass(frozen=True)
class Units:
    """The modules of a model that a plan names.

    Attributes:
        blocks: one unit each, in the order of the model.
        solo: groups of modules, one unit each.
    """

    blocks: list[nn.Module]
    solo: list[list[nn.Module]]


def find_units(model: nn.Module, plan: Plan) -> Units:
    """Resolve the units of a plan; what is in none of them belongs to the root.

    Raises:
        ParallelError: a pattern names nothing, a module is in two units, or two units share a parameter.
    """
    named = {f"block {name}": [module] for name, module in find(model, plan.blocks).items()}
    num_blocks = len(named)
    for group in plan.solo:
        named[f"solo {group}"] = [module for pattern in group for module in find(model, pattern).values()]
    owners = _owners(named)
    _refuse_ties(model, owners)
    units = list(named.values())
    return Units([unit[0] for unit in units[:num_blocks]], units[num_blocks:])


def _owners(named: dict[str, list[nn.Module]]) -> dict[nn.Module, str]:
    """The unit of each module inside a unit."""
    owners: dict[nn.Module, str] = {}
    for unit, modules in named.items():
        for module in (inner for outer in modules for inner in outer.modules()):
            if owners.setdefault(module, unit) != unit:
                raise ParallelError(
                    f"{type(module).__name__} is in {owners[module]} and in {unit}; name it in one unit"
                )
    return owners


def _refuse_ties(model: nn.Module, owners: dict[nn.Module, str]) -> None:
    """A parameter that two units share would be gathered by one and missing in the other."""
    seen: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.get(model.get_submodule(name.rpartition(".")[0]), ROOT)
        first, first_owner = seen.setdefault(id(parameter), (name, owner))
        if first_owner != owner:
            raise ParallelError(
                f"{first} ({first_owner}) and {name} ({owner}) are one parameter; put both modules into one "
                "group of `solo`, or both into none"
            )
