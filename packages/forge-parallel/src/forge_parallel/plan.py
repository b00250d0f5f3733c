"""What a model allows to be done to it in parallel: plain data that names roles, not layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from forge_config import Config
from msgspec import Meta
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
    "gather_colwise",
    "rowwise",
    "head",
    "unsharded",
    "merge",
    "experts",
]
Entry = TypeVar("Entry")


class StagePlan(Config):
    """How a model is cut into stages of a pipeline.

    Attributes:
        first: modules that only the first stage keeps, by full name, which may lie in a mount.
        last: modules that only the last stage keeps, by full name.
        hidden: the argument of the model that passes the hidden state [B, T + extra_tokens, D] to a later
            stage.
        instead_of: arguments that `hidden` replaces in later stages, though their ranks have them.
        first_inputs: arguments that only the first stage takes, such as image patches: other ranks need not
            have them.
        dim: D.
        extra_tokens: rows after the tokens in which the first stage passes on further results to all later
            stages, such as image features. The model appends these rows and removes them.
        blocks: the pattern of the blocks that the stages share; None uses `Plan.blocks`, if it is one
            pattern.
        costs: FLOPs a token of each block in order, in any unit; empty uses the size of its matrices.
        last_cost: the cost of the modules of the last stage, in the unit of `costs`.
        first_cost: the cost of the modules of the first stage, in the unit of `costs` or, without `costs`, in
            elements of matrices; 0 for an embedding, which is a lookup.
        zero: modules of the first stage whose output the model adds to the hidden state, such as position
            embeddings. With pass_through, later stages call a replacement that returns 0.
        tied: modules of the first stage that the last stage keeps too, because it shares their parameters;
            the model must not call them there. Gradients of both copies are summed.
        pass_through: replace modules of other stages by modules that return their first argument, for a model
            that calls them anyway. Otherwise they become None, and blocks are deleted.
        blocks_return_tuples: blocks return a tuple whose first item is the hidden state; with pass_through.
    """

    first: list[str]
    last: list[str]
    hidden: str
    dim: int
    costs: list[float] = []
    last_cost: float = 0
    first_cost: float = 0
    blocks: str | None = None
    instead_of: list[str] = []
    first_inputs: list[str] = []
    extra_tokens: Annotated[int, Meta(ge=0)] = 0
    zero: list[str] = []
    tied: list[str] = []
    pass_through: bool = False
    blocks_return_tuples: bool = False


class Plan(Config):
    """What a model allows. Patterns are dotted names in which `*` stands for one component.

    A composed model mounts the plans of its sub-models. Patterns of a mounted plan are relative to its
    prefix; the empty pattern names the mounted module itself.

    Attributes:
        blocks: the repeated modules that are checkpointed, compiled and sharded as one unit each: one pattern
            or several, in the order in which they are executed.
        units: groups of further modules, each sharded as one unit. All other modules belong to the root.
            Modules that share a parameter must be in one unit.
        tensor: the role under tensor parallelism of each module that has parameters or takes the residual
            stream; see `forge_parallel.tensor_roles`.
        divisible: further sizes by name that tensor parallelism must divide, such as the number of heads.
        output_units: for `colwise` layers and a `cut_norm`, the number of units that must stay whole (such as
            heads) in each part of their outputs: [8] for keys, [32, 8, 8] for queries, keys and values in one
            layer, [F, F] for a gate and the values it gates. With several parts, or fewer units than ranks,
            all ranks hold the whole weight and use their units of each part; ranks may share a unit.
        counts: attributes of modules that count what tensor parallelism divides, such as `num_heads` of an
            attention that reshapes by it; they are divided by the number of ranks.
        attention: the attention modules, by one pattern or several, that work on the tokens that context
            parallelism cuts; it replaces their attribute `attend`.
        sequence_inputs: arguments of the model of shape [B, ..., T] that context parallelism cuts; the first
            one is always passed. Context parallelism adds `positions` [T] where they are missing.
        experts: the layers of experts, whose `dispatch` is replaced by expert parallelism; see
            `forge_parallel.expert_parallel`. Their attribute `sum_over_sequence`, if any, becomes a function
            that sums a tensor in place over the ranks that have other tokens of the same sequences;
            `sum_over_batch` one over all ranks that have other tokens; `tokens_here` one that cuts [B, T] as
            the residual stream is cut.
        cut_experts: roles that replace entries of `tensor` where `tensor_parallel.experts` is "cut", such as
            `experts` for the module of stacked parameters, whose `cut_dims` names the dim of its width. The
            attribute `spread` of each layer of experts becomes the ranks that the width is cut over.
        stages: how a pipeline cuts the model; None if it cannot.
        no_fp8: linear layers that are not computed in 8 bits.
        mounts: plans of sub-modules by name, in the order in which they are executed; all of them run before
            the modules that this plan names itself. `stages`, `sequence_inputs` and `host_inputs` of a
            mounted plan hold for its module alone; the composed model has its own.
        host_inputs: arguments that stay in host memory, such as sizes that are read there.
        fed_by: for patterns of modules that only some arguments of the model reach, these arguments. Nothing
            in this package reads them; a caller without such data can see which modules are not trained.
    """

    blocks: str | list[str]
    units: list[list[str]] = []
    tensor: dict[str, Role] = {}
    divisible: dict[str, int] = {}
    output_units: dict[str, Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1)]] = {}
    counts: dict[str, list[str]] = {}
    attention: str | list[str] | None = None
    sequence_inputs: list[str] = []
    experts: list[str] = []
    cut_experts: dict[str, Role] = {}
    stages: StagePlan | None = None
    no_fp8: list[str] = []
    mounts: dict[str, Plan] = {}
    host_inputs: list[str] = []
    fed_by: dict[str, list[str]] = {}

    @classmethod
    def of(cls, source: nn.Module | dict[str, Any]) -> Plan:
        """Return the plan that a model publishes by `parallel_plan()`, or the plan given as plain data.

        Raises:
            ParallelError: the model publishes none, or the data is not a plan.
        """
        if isinstance(source, nn.Module):
            publish = getattr(source, "parallel_plan", None)
            if publish is None:
                raise ParallelError(
                    f"{type(source).__name__} has no parallel_plan(); give the plan as a dict, "
                    "at least {'blocks': 'layers.*'}"
                )
            source = publish()
        return _convert(source, "")

    def check(self, model: nn.Module) -> None:
        """Check that every mount and every pattern matches a module.

        Raises:
            ParallelError: a mount or a pattern matches none.
        """
        for prefix, _ in self._mounted():
            find(model, prefix, "mount")
        flat = self.flat()
        patterns = [*flat.block_patterns, *(p for group in flat.units for p in group), *flat.tensor]
        for pattern in [
            *patterns,
            *flat.no_fp8,
            *flat.experts,
            *flat.cut_experts,
            *flat.attention_patterns,
            *flat.fed_by,
            *flat.output_units,
            *flat.counts,
        ]:
            find(model, pattern)

    def flat(self) -> Plan:
        """Return the plan without mounts: entries of mounts under full names, then the entries of this plan.

        All other modules work on the flat plan. FSDP2 does not free the last block and the last group of
        `units` after the forward pass, so a decoder is mounted last.

        Raises:
            ParallelError: two plans give one pattern a role, or one name a size.
        """
        plans = [*self._mounted(), ("", self)]

        def full(patterns: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
            return [_join(prefix, pattern) for prefix, own in patterns for pattern in own]

        return msgspec.structs.replace(
            self,
            mounts={},
            blocks=full((prefix, plan.block_patterns) for prefix, plan in plans),
            units=[full([(prefix, group)]) for prefix, plan in plans for group in plan.units],
            tensor=_merge("tensor", ((prefix, plan.tensor) for prefix, plan in plans)),
            divisible=_merge("divisible", ((prefix, plan.divisible) for prefix, plan in plans)),
            output_units=_merge("output_units", ((prefix, plan.output_units) for prefix, plan in plans)),
            counts=_merge("counts", ((prefix, plan.counts) for prefix, plan in plans)),
            attention=full((prefix, plan.attention_patterns) for prefix, plan in plans),
            experts=full((prefix, plan.experts) for prefix, plan in plans),
            cut_experts=_merge("cut_experts", ((prefix, plan.cut_experts) for prefix, plan in plans)),
            no_fp8=full((prefix, plan.no_fp8) for prefix, plan in plans),
            fed_by=_merge("fed_by", ((prefix, plan.fed_by) for prefix, plan in plans)),
        )

    def _mounted(self) -> Iterator[tuple[str, Plan]]:
        """Every mount, nested ones too, with its full prefix, in order of execution."""
        for name, plan in self.mounts.items():
            yield from ((_join(name, inner), nested) for inner, nested in plan._mounted())
            yield name, plan

    @property
    def block_patterns(self) -> list[str]:
        """The patterns in `blocks`, as a list."""
        return [self.blocks] if isinstance(self.blocks, str) else self.blocks

    @property
    def attention_patterns(self) -> list[str]:
        """The patterns in `attention`, as a list."""
        return [self.attention] if isinstance(self.attention, str) else self.attention or []


def _convert(source: Any, where: str) -> Plan:
    """Make a plan of plain data. Mounts are converted one by one, so that an error names the mount."""
    if isinstance(source, dict) and isinstance(source.get("tensor"), dict):
        for name, role in source["tensor"].items():
            if role not in get_args(Role):
                raise ParallelError(
                    f"{_join(where, name)} has the tensor role {role!r}; expected one of "
                    f"{', '.join(get_args(Role))}"
                )
    try:
        if isinstance(source, dict) and isinstance(source.get("mounts"), dict):
            mounts = {name: _convert(plan, _join(where, name)) for name, plan in source["mounts"].items()}
            source = source | {"mounts": mounts}
        return msgspec.convert(source, Plan)
    except msgspec.ValidationError as error:
        raise ParallelError(f"not a plan{where and f' of mount {where}'}: {error}") from None


def _join(prefix: str, pattern: str) -> str:
    return f"{prefix}.{pattern}" if prefix and pattern else prefix or pattern


def _merge(key: str, parts: Iterable[tuple[str, dict[str, Entry]]]) -> dict[str, Entry]:
    """Return the entries of several plans under full names."""
    merged: dict[str, Entry] = {}
    for prefix, entries in parts:
        for name, value in entries.items():
            full = _join(prefix, name)
            if full in merged:
                raise ParallelError(
                    f"{full!r} is in `{key}` of a mount and of the plan that mounts it; say it in one of them"
                )
            merged[full] = value
    return merged
