"""Cutting a model into the stages of a pipeline: which rank has which stage, and what each stage keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from math import inf

from torch import nn

from forge_parallel.config import PipelineConfig
from forge_parallel.error import ParallelError
from forge_parallel.match import PassThrough, PassTuple, Zero, find
from forge_parallel.plan import Plan, StagePlan


def stages_of(rank: int, ranks: int, config: PipelineConfig) -> list[int]:
    """Return the stages of a rank of the pipeline; `[0]` without a pipeline."""
    if ranks == 1:
        return [0]
    if config.is_v:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(config.held())]


def rank_of(stage: int, ranks: int, config: PipelineConfig) -> int:
    """Return the pipeline rank that has a stage."""
    return 2 * ranks - 1 - stage if config.is_v and stage >= ranks else stage % ranks


def keep_stage(model: nn.Module, plan: Plan, stage: int, ranks: int, config: PipelineConfig) -> None:
    """Remove the modules of other stages from a model, in place. Names do not change.

    Args:
        model: the whole model, best on the meta device.
        plan: the plan of the whole model; uses `stages` and, where `stages` names no blocks, `blocks`.
        stage: the stage to keep.
        ranks: number of ranks of the pipeline; with one, everything is kept.
        config: the section `[pipeline]`.

    Raises:
        ParallelError: the model cannot be cut, has fewer blocks than there are stages, or shares a parameter
            between stages; `stages` names nothing; or `pipeline.layers` does not fit.
    """
    if ranks == 1:
        return
    if plan.stages is None:
        raise ParallelError(
            f"the plan of {type(model).__name__} does not say how to cut it (`stages`); use mesh.pp = 1"
        )
    count = ranks * config.held()
    for name in [*plan.stages.first, *plan.stages.last]:
        find(model, name, "module")
    blocks = find(model, _blocks_of(plan, plan.stages))
    lengths = config.layers or _cut(model, blocks, plan.stages, count, config.max_parameters)
    _require_lengths(lengths, len(blocks), count)
    ends = [index for index, length in enumerate(lengths) for _ in range(length)]
    owners = (
        dict(zip(blocks, ends, strict=True))
        | {name: 0 for name in plan.stages.first}
        | {name: count - 1 for name in plan.stages.last}
    )
    kept = _kept_by_the_last(plan.stages, ranks, config)
    _refuse_ties(model, owners, kept, count - 1)
    in_blocks = PassTuple if plan.stages.blocks_return_tuples else PassThrough
    for name, owner in owners.items():
        if owner != stage and not (stage == count - 1 and name in kept):
            stand_in = Zero if name in plan.stages.zero else in_blocks if name in blocks else PassThrough
            _remove(model, name, plan.stages.pass_through, stand_in)


def _blocks_of(plan: Plan, stages: StagePlan) -> str:
    """The pattern of the blocks that stages share."""
    if stages.blocks is not None:
        return stages.blocks
    if len(plan.block_patterns) != 1:
        raise ParallelError(
            f"the plan's own `blocks` are {plan.block_patterns}, which is not one pattern; say in "
            "`stages.blocks` which blocks a pipeline cuts"
        )
    return plan.block_patterns[0]


def _require_lengths(lengths: Sequence[int], blocks: int, stages: int) -> None:
    if len(lengths) != stages or sum(lengths) != blocks:
        raise ParallelError(
            f"pipeline.layers = {list(lengths)} is not a number for each of {stages} stages that add up to "
            f"the {blocks} layers of the model"
        )


def _kept_by_the_last(stages: StagePlan, ranks: int, config: PipelineConfig) -> list[str]:
    """Return the modules of the first stage that the last stage keeps too.

    Raises:
        ParallelError: one rank has both stages.
    """
    if stages.tied and config.is_v:
        raise ParallelError(
            f'pipeline.schedule = "{config.schedule}" has the first and the last stage on one rank, which '
            f"would hold {', '.join(stages.tied)} twice; choose another schedule, or untie them"
        )
    return stages.tied


def _refuse_ties(model: nn.Module, owners: dict[str, int], kept: list[str], last: int) -> None:
    """Check that stages share no parameters, except in modules that the first and the last both keep."""
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next((owner for key, owner in owners.items() if f"{name}.".startswith(f"{key}.")), None)
        if stage is None:
            raise ParallelError(f"the plan does not say which stage has {name}; name its module in `stages`")
        first, where = seen.setdefault(id(parameter), (name, stage))
        may = where == 0 and stage == last and any(f"{first}.".startswith(f"{key}.") for key in kept)
        if where != stage and not may:
            raise ParallelError(
                f"{first} (stage {where}) and {name} (stage {stage}) are one parameter, which two stages "
                "cannot share; untie them (model.tie_embeddings = false) or use mesh.pp = 1"
            )


def _cut(
    model: nn.Module, blocks: dict[str, nn.Module], stages: StagePlan, count: int, max_parameters: int
) -> list[int]:
    """Return the number of blocks of each stage, balanced by cost; the bound counts all parameters."""

    def num_parameters(modules: Iterable[nn.Module]) -> int:
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    ends = [
        num_parameters(model.get_submodule(name) for name in names) for names in (stages.first, stages.last)
    ]
    sizes = [num_parameters([block]) for block in blocks.values()]
    sizes[0] += ends[0]
    sizes[-1] += ends[1]
    costs, last, first = _costs(model, blocks, stages)
    return balanced(costs, last, count, sizes, max_parameters, first)


def _costs(
    model: nn.Module, blocks: dict[str, nn.Module], stages: StagePlan
) -> tuple[list[float], float, float]:
    """FLOPs a token of each block, of the last and of the first modules; or elements of their matrices."""
    if stages.costs:
        return stages.costs, stages.last_cost, stages.first_cost

    def cost(module: nn.Module) -> int:
        """Return the number of elements of all matrices; an embedding is a lookup and counts nothing."""
        inner = [one for one in module.modules() if not isinstance(one, nn.Embedding)]
        return sum(p.numel() for one in inner for p in one.parameters(recurse=False) if p.ndim > 1)

    last, first = (
        sum(cost(model.get_submodule(name)) for name in names) for names in (stages.last, stages.first)
    )
    return [cost(block) for block in blocks.values()], last, stages.first_cost or first


def balanced(
    costs: Sequence[float],
    last: float,
    stages: int,
    sizes: Sequence[int] = (),
    most: int = 0,
    first: float = 0,
) -> list[int]:
    """Return the number of blocks of each stage that makes the most costly stage as cheap as possible.

    Args:
        costs: cost of each block.
        last: cost of the further modules of the last stage.
        stages: number of stages; each gets at least one block.
        sizes: size of each block, for the bound; the first and the last include the other modules there.
        most: upper bound on the sum of sizes of a stage; 0 means no bound.
        first: cost of the further modules of the first stage.

    Raises:
        ParallelError: there are fewer blocks than stages, or no cut keeps the bound.
    """
    if len(costs) < stages:
        raise ParallelError(
            f"{len(costs)} layers cannot be cut into {stages} stages; use fewer ranks in mesh.pp or fewer "
            "stages_per_rank"
        )

    def cost_of(start: int, end: int) -> float:
        """Return the cost of a stage, without `last`; infinite if its size is above the bound."""
        fits = not most or sum(sizes[start:end]) <= most
        return sum(costs[start:end]) + (0 if start else first) if fits else inf

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return cost_of(start, len(costs)) + last, (len(costs) - start,)
        options = []
        for end in range(start + 1, len(costs) - left + 2):
            rest, lengths = best(end, left - 1)
            options.append((max(cost_of(start, end), rest), (end - start, *lengths)))
        return min(options)

    cost, lengths = best(0, stages)
    if cost == inf:
        needed = max(map(sum, _parts(sizes, balanced(sizes, 0, stages))))
        raise ParallelError(
            f"pipeline.max_parameters = {most} cannot be kept by {stages} stages: the largest has {needed} "
            "at best; raise it, or use more stages (mesh.pp, pipeline.stages_per_rank)"
        )
    return list(lengths)


def _parts(values: Sequence[int], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    rest = iter(values)
    return ([next(rest) for _ in range(length)] for length in lengths)


def _remove(model: nn.Module, name: str, pass_through: bool, stand_in: type[PassThrough]) -> None:
    path, _, key = name.rpartition(".")
    parent = model.get_submodule(path)
    if pass_through:
        setattr(parent, key, stand_in())
    elif isinstance(parent, nn.ModuleDict):
        del parent[key]
    else:
        setattr(parent, key, None)
