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
        first: modules that only the first stage has.
        last: modules that only the last stage has. Names of both are full ones, which may lie in mounts.
        hidden: the argument of the model by which a later stage is given the hidden state
            [B, T + extra_tokens, D].
        instead_of: arguments that a later stage is then not given, though its ranks have them.
        first_inputs: arguments that only the first stage takes, such as patches of images: ranks without it
            need not have them.
        dim: D.
        extra_tokens: rows behind those of the tokens in which the first stage passes on what it computed for
            all later ones, such as image features. The model appends them and takes them off.
        blocks: the pattern of the blocks that the stages share; None for `Plan.blocks`, if it is one pattern.
        costs: FLOPs a token of each block in order, or anything in proportion; empty counts its matrices.
        last_cost: the same of the modules of the last stage.
        first_cost: the same of the modules of the first stage, in the unit of `costs` or, without them, in
            elements of matrices; 0 for an embedding, from which rows are only read.
        zero: modules of the first stage whose output the model adds to the hidden state, as positions are:
            in later stages, which pass_through lets call them, they become ones that return 0.
        tied: modules of the first stage that the last one keeps as well, for it has their parameters too; the
            model must not call them there. Gradients of both are summed.
        pass_through: modules of other stages become ones that return their first argument, for models that
            call them anyway; otherwise they become None, and blocks are deleted.
        blocks_return_tuples: the hidden state is the first of what a block returns; with pass_through.
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

    A model that is composed of others mounts their plans, whose patterns are relative to their prefix; the
    empty pattern is the module that is mounted.

    Attributes:
        blocks: the repeated modules that are checkpointed, compiled and sharded as one unit each: one pattern
            or several, in the order in which they are executed.
        units: groups of further modules that are sharded as one unit each; what is in no unit belongs to the
            root. Modules that share a parameter must be in one unit.
        tensor: the role of each module that has parameters, and of those that take the residual stream, under
            tensor parallelism; see `forge_parallel.tensor_roles`.
        divisible: sizes by name that tensor parallelism must divide, beside those of matrices: heads, say.
        output_units: of `colwise` layers and of a `cut_norm`, how many units that must not be cut (heads,
            say) each part of their outputs has: [8] of keys, [32, 8, 8] of queries, keys and values in one
            layer, [F, F] of a gate and what it gates. If there are several parts, or fewer units than ranks,
            all ranks hold the whole weight and use their units of every part; several may use the same one.
        counts: attributes of modules that count what a rank of tensor parallelism has a part of, as
            `num_heads` of an attention that shapes by it; they are divided by the number of ranks.
        attention: the attention modules, by one pattern or several; their attribute `attend` is replaced by
            context parallelism. Only those that work on tokens which it cuts.
        sequence_inputs: arguments of the model of the shape [B, ..., T], which context parallelism cuts; the
            first is always given. It adds `positions` [T] where they are missing.
        experts: the layers of experts, whose `dispatch` is replaced by expert parallelism; see
            `forge_parallel.expert_parallel`. An attribute `sum_over_sequence` of theirs becomes what sums a
            tensor, in place, over the ranks that have other tokens of the same sequences; `sum_over_batch`
            over all that have other tokens; `tokens_here` cuts [B, T] as the residual stream is cut.
        cut_experts: roles in the place of those of `tensor` where `tensor_parallel.experts` is "cut", such as
            `experts` of the module of stacked parameters, whose `cut_dims` says where its width is. Layers of
            experts have an attribute `spread`, which becomes the ranks that the width is cut over.
        stages: how a pipeline cuts it; None if it cannot.
        no_fp8: linear layers that stay out of 8-bit matmuls.
        mounts: plans of sub-modules by name, in the order in which they are executed; all run before what
            this plan names itself. `stages`, `sequence_inputs` and `host_inputs` of a mounted plan are for
            its module alone: a composite says its own.
        host_inputs: arguments that stay in the memory of the host, such as sizes that are read there.
        fed_by: patterns of modules that only some arguments of the whole model reach, and these arguments.
            Nothing here reads them; who has no data for them can see that the modules are not trained.
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
        return _convert(source, "")

    def check(self, model: nn.Module) -> None:
        """See that every mount and every pattern names something.

        Raises:
            ParallelError: one names no module.
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
        """The plan without mounts: their entries under full names, before the entries of this plan.

        All that is done to a model works on this. The last block, and the last group of `units`, are those
        that FSDP2 does not free after the forward pass, so a decoder is mounted last.

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
    """A plan from plain data. Mounts are converted one by one, so that an error names theirs."""
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
    """The entries of several plans under full names."""
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
