"""Parameters with the names and roles that optimizers need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from forge_config import ConfigError

if TYPE_CHECKING:
    from torch import nn


class NamedParameter(NamedTuple):
    """A parameter that is trained.

    Attributes:
        name: name in the whole model, also if this rank holds only a part of the model.
        parameter: the parameter, plain or sharded; its local shape may be a small part of the whole.
        role: role of the parameter, from the model.
        lr: factor of its learning rate, from the model.
        decay: factor of its weight decay, from the model.
    """

    name: str
    parameter: nn.Parameter
    role: str
    lr: float = 1.0
    decay: float = 1.0


def trainable(parts: Iterable[nn.Module]) -> list[NamedParameter]:
    """Return the trained parameters of a model with their roles; a tied parameter occurs once.

    A pipeline stage may have none.

    Raises:
        ConfigError: a part gives no role for a parameter.
    """
    found: list[NamedParameter] = []
    for part in parts:
        roles: dict[str, str] = part.parameter_roles()  # type: ignore[operator]
        factors: dict[str, tuple[float, float, float]] = getattr(part, "learning_factors", dict)()
        for name, parameter in part.named_parameters():
            if name not in roles:
                raise ConfigError(f"{type(part).__name__}.parameter_roles() says nothing of {name}; add it")
            if parameter.requires_grad:
                _, lr, decay = factors.get(name, (1.0, 1.0, 1.0))
                found.append(NamedParameter(name, parameter, roles[name], lr, decay))
    return found
