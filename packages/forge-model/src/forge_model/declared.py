"""Declarations of modules about themselves: roles and initial values follow from them, not from names.

A module declares them in attributes, each optional, with names relative to the module itself:

    tensor_roles: {module: role} under tensor parallelism; "" is the module itself. An outer module overrides
        an inner one; the role None removes a role. A name is skipped if the attribute of that name is None.
    cut_roles: {module: role} that replaces `tensor_roles` where the experts of a layer are sharded, too.
    output_units: {module: [number, ...]}, the numbers of heads in its output, which tensor parallelism must
        not split; see `forge_parallel.plan`.
    residual_writers: (parameter, ...) that write into the residual stream; they start smaller.
    initial: {parameter or buffer: Init or Tensor} where the initial value does not follow from the role.
    holds_experts: True; see `forge_model.moe.layer.ExpertLayer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from forge_model.error import ModelError
from forge_model.init import Init

Said = TypeVar("Said")


def tensor_roles(model: nn.Module, attribute: str = "tensor_roles") -> dict[str, str]:
    """Return the role of each module under tensor parallelism, by name.

    Args:
        model: the model whose modules declare roles.
        attribute: name of the declaring attribute; `cut_roles` has the roles for sharded experts.

    Raises:
        ModelError: a module gives a role to a name that it does not have.
    """
    roles: dict[str, str | None] = {}
    for prefix, module in model.named_modules():
        for name, role in _declared(module, attribute, {}).items():
            if _is_there(module, name, prefix, attribute):
                roles.setdefault(joined(prefix, name), role)
    return {name: role for name, role in roles.items() if role is not None}


def output_units(model: nn.Module) -> dict[str, list[int]]:
    """Return by module name how many units its output has that tensor parallelism must not split.

    Raises:
        ModelError: a module names something that it does not have.
    """
    return {
        joined(prefix, name): units
        for prefix, module in model.named_modules()
        for name, units in _declared(module, "output_units", {}).items()
        if _is_there(module, name, prefix, "output_units")
    }


def residual_writers(model: nn.Module, blocks: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the weights that write into the residual stream.

    Args:
        model: the model whose modules declare them.
        blocks: the blocks of the model by name. For each matrix in a block, a module must declare whether it
            writes: the module that owns the matrix or one around it within the block. A block itself can
            declare this only for its own parameters and for layers directly inside it.

    Raises:
        ModelError: no module declares it for a matrix, or a module names a weight that it does not have.
    """
    declared = {
        prefix: names
        for prefix, module in model.named_modules()
        if (names := _declared(module, "residual_writers", None)) is not None
    }
    writers = {
        joined(prefix, name)
        for prefix, names in declared.items()
        for name in names
        if _is_there(model.get_submodule(prefix), name, prefix, "residual_writers")
    }
    for name, block in blocks.items():
        if left := [leaf for leaf in _matrices(block) if not _is_covered(name, leaf, declared, block)]:
            raise ModelError(
                f"nothing says whether {', '.join(f'{name}.{leaf}' for leaf in left)} write into the "
                "residual stream, and so start smaller; give the module that has them an attribute "
                'residual_writers = ("out_proj.weight",), or () if none does'
            )
    return writers


def _matrices(block: nn.Module) -> list[str]:
    return [name for name, parameter in block.named_parameters() if parameter.ndim > 1]


def _is_covered(prefix: str, leaf: str, declared: Mapping[str, Iterable[str]], block: nn.Module) -> bool:
    """Whether the declaration of a module within the block covers a parameter."""
    inner = leaf.split(".")[:-1]
    if any(joined(prefix, ".".join(inner[:end])) in declared for end in range(1, len(inner) + 1)):
        return True
    layers = {name for name, child in block.named_children() if not list(child.children())}
    return prefix in declared and (
        leaf in declared[prefix] or not inner or (len(inner) == 1 and inner[0] in layers)
    )


def initial_values(model: nn.Module) -> dict[str, Init | Tensor]:
    """Return how parameters and buffers start, by name, where their modules declare it.

    Raises:
        ModelError: a module names something that it does not have.
    """
    return {
        joined(prefix, name): value
        for prefix, module in model.named_modules()
        for name, value in _declared(module, "initial", {}).items()
        if _is_there(module, name, prefix, "initial")
    }


def as_patterns(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return names of modules as few patterns: `*` replaces numbers if all modules of that form are named."""
    return list(_patterns(model, dict.fromkeys(names, "")))


def by_pattern(model: nn.Module, roles: Mapping[str, Said]) -> dict[str, Said]:
    """Return values by pattern: `*` replaces numbers in names if all modules of that form share a value."""
    return _patterns(model, roles)


def _patterns(model: nn.Module, roles: Mapping[str, Said]) -> dict[str, Said]:
    names = [name.split(".") for name, _ in model.named_modules()]
    shared: dict[str, bool] = {}
    for name, role in roles.items():
        form = _form(name).split(".")
        key = ".".join(form)
        if key not in shared:
            alike = [one for one in names if _fits(form, one)]
            shared[key] = all(roles.get(".".join(one)) == role for one in alike)
    return {_form(name) if shared[_form(name)] else name: role for name, role in roles.items()}


def _fits(form: list[str], name: list[str]) -> bool:
    """Whether a pattern names a module: `*` stands for any component."""
    return len(form) == len(name) and all(a in ("*", b) for a, b in zip(form, name, strict=True))


def _form(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def joined(prefix: str, name: str) -> str:
    """Return a dotted name below a prefix; both may be empty."""
    return ".".join(part for part in (prefix, name) if part)


def _declared(module: nn.Module, attribute: str, default: Any) -> Any:
    return getattr(module, attribute, default)


def _is_there(module: nn.Module, name: str, prefix: str, attribute: str) -> bool:
    """Whether an attribute that a module names exists; its value may be None.

    Raises:
        ModelError: it has no such attribute, or one of another kind.
    """
    found: Any = module
    for part in name.split(".") if name else ():
        if not hasattr(found, part):
            raise ModelError(
                f"{attribute} of {prefix or 'the model'}, a {type(module).__name__}, names {name!r}, which "
                "it does not have"
            )
        if (found := getattr(found, part)) is None:
            return False
    wanted = nn.Module if attribute in ("tensor_roles", "cut_roles", "output_units") else Tensor
    if not isinstance(found, wanted):
        raise ModelError(
            f"{attribute} of {prefix or 'the model'}, a {type(module).__name__}, names {name!r}, a "
            f"{type(found).__name__}; expected a {'module' if wanted is nn.Module else 'parameter or buffer'}"
        )
    return True
