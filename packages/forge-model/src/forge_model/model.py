"""The interface of models that can be trained; `Decoder` and models around it implement it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from forge_model.declared import initial_values, joined, residual_writers
from forge_model.init import Init
from forge_model.moe.layer import expert_layers, learn_from_load
from forge_model.roles import Role, parameter_roles
from forge_model.scaling import Factors, Scaling


class Model(nn.Module):
    """A model, or the parts of a model on one rank of a pipeline.

    Attributes:
        init_std: standard deviation of the initial matrices, except in parts that declare another.
        depth: number of blocks of the full model; weights of `blocks` that write into the residual stream
            start smaller by 1/sqrt(2 depth).
        scaling: width and depth of this model relative to its base model.
    """

    init_std: float = 0.02
    depth: int = 1
    scaling: Scaling = Scaling()

    def blocks(self) -> Mapping[str, nn.Module]:
        """The blocks on this rank that share a residual stream, by name."""
        return {}

    def parameter_roles(self) -> dict[str, Role]:
        """The role of each parameter, by name."""
        return parameter_roles(self)

    def initial_values(self) -> dict[str, Init | Tensor]:
        """Return by name how each parameter starts, and each buffer whose module declares its initial value.

        A child that is itself a `Model` decides about its own parameters. For the rest, `initial` of a module
        comes first; otherwise norms start at 1, biases at 0, and matrices follow from `init_std` and `depth`.

        Raises:
            ModelError: no module declares whether a matrix in a block writes into the residual stream.
        """
        values: dict[str, Init | Tensor] = {}
        for name, part in self.named_children():
            if isinstance(part, Model):
                values |= {joined(name, inner): init for inner, init in part.initial_values().items()}
        writers = residual_writers(self, self.blocks())
        for name, role in self.parameter_roles().items():
            if name not in values:
                values[name] = self._initial_value(role, name in writers)
        return values | initial_values(self)

    def _initial_value(self, role: Role, writes_residual: bool) -> Init:
        if role in ("norm", "bias"):
            return Init("constant", float(role == "norm"))
        base_depth = self.depth / self.scaling.depth
        std = self.init_std / (2 * base_depth) ** 0.5 if writes_residual else self.init_std
        return Init("normal", std * self.scaling.factors(role, writes_residual).init)

    def learning_factors(self) -> dict[str, Factors]:
        """Return factors on learning rate and decay by parameter name, except parameters without factors."""
        found: dict[str, Factors] = {}
        for name, part in self.named_children():
            if isinstance(part, Model):
                found |= {joined(name, inner): each for inner, each in part.learning_factors().items()}
        if self.scaling == Scaling():
            return found
        writers = residual_writers(self, self.blocks())
        for name, role in self.parameter_roles().items():
            writes = name in writers or (role == "bias" and f"{name.removesuffix('bias')}weight" in writers)
            if (factors := self.scaling.factors(role, writes)).lr != 1:
                found.setdefault(name, factors)
        return found

    def before_micro_batches(self, tokens: int | Tensor) -> None:
        """Take the number of tokens of the next global batch, without padding; see `ExpertLayer`."""
        for layer in expert_layers(self).values():
            layer.step_tokens = tokens

    def before_step(self, step: int) -> None:
        """Give routers the number of the next step, counted from 0, for those that learn by a schedule."""
        for layer in expert_layers(self).values():
            if (router := getattr(layer, "router", None)) is not None:
                router.step = step

    def before_optimizer_step(self, sum_: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Let routers learn from the load of a step; see `learn_from_load`. Collective."""
        return learn_from_load(expert_layers(self), sum_)

    def active_parameters(self) -> int:
        """Return how many parameters a token uses; of the experts only those that serve it count."""
        idle = sum(layer.idle_parameters() for layer in expert_layers(self).values())
        return sum(parameter.numel() for parameter in self.parameters()) - idle
