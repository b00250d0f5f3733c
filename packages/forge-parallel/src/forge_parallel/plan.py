"""What a model allows to be done to it in parallel: plain data that names roles, not layouts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from forge_config import Config
from torch import nn

from forge_parallel.error import ParallelError
from forge_parallel.match import find

Role = Literal[
    "embed",
    "norm",
    "tokenwise",
    "head_norm",
    "cut_norm",
    "heads",
    "replicated",
    "gather",
    "colwise",
    "rowwise",
    "head",
]


class StagePlan(Config):
    """How a model is cut into stages of a pipeline.

    Attributes:
        first: modules that only the first stage has.
        last: modules that only the last stage has.
        hidden: the argument of the model by which a later stage is given the hidden state [B, T, D].
        instead_of: arguments that a later stage is then not given.
        dim: D.
        costs: FLOPs a token of each block in order, or anything in proportion; empty counts its matrices.
        last_cost: the same of the modules of the last stage.
        pass_through: modules of other stages become ones that return their first argument, for models that
            call them anyway; otherwise they become None, and blocks are deleted.
    """

    first: list[str]
    last: list[str]
    hidden: str
    dim: int
    costs: list[float] = []
    last_cost: float = 0
    instead_of: list[str] = []
    pass_through: bool = False


class Plan(Config):
    """What a model allows. Patterns are dotted names in which `*` stands for one component.

    Attributes:
        blocks: the repeated module that is checkpointed, compiled and sharded as one unit each.
        units: groups of further modules that are sharded as one unit each; what is in no unit belongs to the
            root. Modules that share a parameter must be in one unit.
        tensor: the role of each module that has parameters, and of those that take the residual stream, under
            tensor parallelism; see `forge_parallel.tensor_parallel`.
        divisible: sizes by name that tensor parallelism must divide, beside those of matrices: heads, say.
        attention: the attention modules, by one pattern or several; their attribute `attend` is replaced by
            context parallelism.
        sequence_inputs: arguments of the model of the shape [B, ..., T], which context parallelism cuts; the
            first is always given. It adds `positions` [T] where they are missing.
        experts: the layers of experts, whose `dispatch` is replaced by expert parallelism; see
            `forge_parallel.expert_parallel`. An attribute `sum_over_sequence` of theirs becomes what sums a
            tensor, in place, over the ranks that have other tokens of the same sequences.
        stages: how a pipeline cuts it; None if it cannot.
        no_fp8: linear layers that stay out of 8-bit matmuls.
    """

    blocks: str
    units: list[list[str]] = []
    tensor: dict[str, Role] = {}
    divisible: dict[str, int] = {}
    attention: str | list[str] | None = None
    sequence_inputs: list[str] = []
    experts: list[str] = []
    stages: StagePlan | None = None
    no_fp8: list[str] = []

    @classmethod
    def of(cls, source: nn.Module | dict[str, Any]) -> Plan:
        """The plan that a model publishes by `parallel_plan()`, or that is given as plain data.

        Raises:
            ParallelError: the model publishes none, or the data are no plan.
        """
        if isinstance(source, nn.Module):
            publish = getattr(source, "parallel_plan", None)
            if publish is None:
                raise ParallelError(
                    f"{type(source).__name__} has no parallel_plan(); give the plan as a dict, "
                    "at least {'blocks': 'layers.*'}"
                )
            source = publish()
        try:
            return msgspec.convert(source, cls)
        except msgspec.ValidationError as error:
            raise ParallelError(f"not a plan: {error}") from None

    def check(self, model: nn.Module) -> None:
        """See that every pattern names something.

        Raises:
            ParallelError: a pattern names no module.
        """
        patterns = [self.blocks, *(p for group in self.units for p in group), *self.tensor, *self.no_fp8]
        for pattern in [*patterns, *self.experts, *self.attention_patterns]:
            find(model, pattern)

    @property
    def attention_patterns(self) -> list[str]:
        """Those of `attention`."""
        return [self.attention] if isinstance(self.attention, str) else self.attention or []
