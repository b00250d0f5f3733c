"""Which modules are sharded together, over which ranks, and whether that can be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from forge_parallel.error import ParallelError
from forge_parallel.match import find
from forge_parallel.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_parallel.mesh import Mesh

ROOT = "the root"


@dataclass(frozen=True)
class Unit:
    """An FSDP2 unit: modules whose parameters are gathered and freed together.

    Attributes:
        name: name for messages.
        modules: the modules, disjoint from those of other units.
        mesh: the ranks they are sharded over; None where nothing is sharded.
    """

    name: str
    modules: list[nn.Module]
    mesh: DeviceMesh | None


@dataclass(frozen=True)
class Units:
    """The units that a plan names in a model; all other modules belong to the root.

    Attributes:
        blocks: one unit a block, in the order of the patterns of the plan, then of the model.
        groups: the units of `Plan.units`, in the order of the plan.
        experts: one unit for each layer of experts inside a block that is sharded over a mesh of its own.
    """

    blocks: list[Unit]
    groups: list[Unit]
    experts: list[Unit]

    @property
    def block_modules(self) -> list[nn.Module]:
        """The modules of the blocks."""
        return [module for unit in self.blocks for module in unit.modules]


def find_units(model: nn.Module, plan: Plan, mesh: Mesh) -> Units:
    """Resolve the units of a plan.

    Args:
        model: the whole model, or a stage of it.
        plan: the flat plan (`Plan.flat`); uses `blocks`, `units` and `experts`.
        mesh: the grid of ranks.

    Raises:
        ParallelError: a pattern matches nothing, a module is in two units, two units share a parameter, or a
            unit is the model itself.
    """
    repeated = {
        name: module for pattern in plan.block_patterns for name, module in find(model, pattern).items()
    }
    blocks = [Unit(f"block {name}", [module], mesh.fsdp) for name, module in repeated.items()]
    named = {
        f"unit {group}": [m for pattern in group for m in find(model, pattern).values()]
        for group in plan.units
    }
    groups = [Unit(name, modules, mesh.fsdp) for name, modules in named.items() if modules]
    _refuse_ties(model, _owners(model, [*blocks, *groups]))
    layers = [layer for pattern in plan.experts for layer in find(model, pattern).items()]
    inner = [
        Unit(f"experts of {name}", [layer.get_submodule("experts")], mesh.efsdp)
        for name, layer in layers
        if mesh.efsdp is not None
    ]
    return Units(blocks, groups, inner)


def _owners(model: nn.Module, units: list[Unit]) -> dict[nn.Module, str]:
    """Return the unit of each module inside a unit."""
    owners: dict[nn.Module, str] = {}
    for unit in units:
        if model in unit.modules:
            raise ParallelError(
                f"{unit.name} is the model itself, which is the root; leave it out of the plan"
            )
        for module in (inner for outer in unit.modules for inner in outer.modules()):
            if owners.setdefault(module, unit.name) != unit.name:
                raise ParallelError(
                    f"{type(module).__name__} is in {owners[module]} and in {unit.name}; name it in one unit"
                )
    return owners


def _refuse_ties(model: nn.Module, owners: dict[nn.Module, str]) -> None:
    """Refuse a parameter that two units share: one would gather it, and it would be missing in the other."""
    seen: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.get(model.get_submodule(name.rpartition(".")[0]), ROOT)
        first, first_owner = seen.setdefault(id(parameter), (name, owner))
        if first_owner != owner:
            raise ParallelError(
                f"{first} ({first_owner}) and {name} ({owner}) are one parameter; put both modules into one "
                "group of `units`, or both into none"
            )
