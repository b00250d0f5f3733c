"""The role of each parameter: modules declare it; initial values, optimizers and parallel plans use it."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from forge_model.error import ModelError

Role = Literal["embedding", "head", "norm", "matrix", "bias", "router", "expert"]

OF_TYPE: dict[type[nn.Module], dict[str, Role]] = {
    nn.Embedding: {"weight": "embedding"},
    nn.Linear: {"weight": "matrix", "bias": "bias"},
    nn.LayerNorm: {"weight": "norm", "bias": "bias"},
    nn.RMSNorm: {"weight": "norm"},
}
"""Roles of the parameters of torch's own layers. Any other module declares them in an attribute `roles` of
this form."""


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return roles of all parameters by name, a shared one only under its first name (tied: embedding).

    Raises:
        ModelError: modules do not declare roles for all of their parameters; the message lists all of these.
    """
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    roles: dict[str, Role] = {}
    unknown: list[str] = []
    for prefix, module in model.named_modules():
        declared = _roles_of(module)
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if first_names[parameter] != name:
                continue
            if leaf in declared:
                if declared[leaf] not in get_args(Role):
                    raise ModelError(
                        f"{name} has the role {declared[leaf]!r}; expected one of {', '.join(get_args(Role))}"
                    )
                roles[name] = declared[leaf]
            else:
                unknown.append(name)
    if unknown:
        raise ModelError(
            f"no role is known for {', '.join(unknown)}; give their modules an attribute "
            "roles = {parameter: role}, with one of the roles of forge_model.roles.Role"
        )
    return roles


def _roles_of(module: nn.Module) -> dict[str, Role]:
    declared = getattr(module, "roles", None)
    if isinstance(declared, dict):
        return declared
    return next((roles for kind, roles in OF_TYPE.items() if isinstance(module, kind)), {})
