"""What a model of any kind answers to those who train it; `Decoder` and models around one are such."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from forge_model.decoder.declared import initial_buffers, joined
from forge_model.decoder.init import Init
from forge_model.decoder.roles import Role, parameter_roles
from forge_model.moe.layer import expert_layers, learn_from_load


class Model(nn.Module):
    """A model, or the parts of one that a rank of a pipeline has.

    Attributes:
        init_std: standard deviation of the initial matrices, but for those of parts that say their own.
    """

    init_std: float = 0.02

    def parameter_roles(self) -> dict[str, Role]:
        """What each parameter is for, by name."""
        return parameter_roles(self)

    def initial_values(self) -> dict[str, Init]:
        """How each parameter starts, by name, and each buffer of which that is said.

        A part with a method `initial_values` says it of its own; the rest follows from roles and `init_std`.
        """
        values: dict[str, Init] = {}
        for name, part in self.named_children():
            if (tell := getattr(part, "initial_values", None)) is not None:
                values |= {joined(name, inner): value for inner, value in tell().items()}
        for name, role in self.parameter_roles().items():
            if name not in values:
                values[name] = initial_value(self, name, role, self.init_std)
        return values | {name: Init("constant", value) for name, value in initial_buffers(self).items()}

    def before_micro_batches(self, tokens: int) -> None:
        """Be told of how many tokens the next global batch is: what auxiliary losses are divided by."""
        for layer in expert_layers(self).values():
            layer.step_tokens = tokens

    def before_optimizer_step(self, sum_: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Let routers learn from the load of a step; see `learn_from_load`. Collective."""
        return learn_from_load(expert_layers(self), sum_)

    def active_parameters(self) -> int:
        """Parameters that a token uses: of the experts, as many as serve it."""
        idle = sum(layer.idle_parameters() for layer in expert_layers(self).values())
        return sum(parameter.numel() for parameter in self.parameters()) - idle


def initial_value(model: nn.Module, name: str, role: Role, std: float) -> Init:
    """How a parameter starts: norms at 1 or where their module says, biases at 0, others normal."""
    if role in ("norm", "bias"):
        module = model.get_submodule(name.rpartition(".")[0])
        return Init("constant", getattr(module, "initial_weight", 1.0) if role == "norm" else 0.0)
    return Init("normal", std)
