"""Groups parameters that share learning rate, weight decay and the steps in which they are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from forge_config import Config, ConfigError, Meta, sentences_from
from msgspec import structs

from forge_trainer.optim.stages import Stage, StageRule, frozen_steps, require_rising, trained_stages

if TYPE_CHECKING:
    from forge_data.sources.config import SourceConfig
    from torch import nn
    from torch.optim import Optimizer

    from forge_trainer.optim.parameters import NamedParameter

Role = Literal["embedding", "head", "norm", "matrix", "bias", "router", "expert"]
"""The roles of `forge_model.roles`, repeated here because that module imports torch."""

Stages = tuple[tuple[int, int | None], ...]
"""Steps in which parameters are frozen: pairs of the first step and the step after the last, None if none."""

FOREVER: tuple[int, int | None] = (0, None)


class GroupRule(Config):
    """One entry of `[[optimizer.groups]]`: settings of selected parameters.

    Every rule that matches a parameter applies to it: factors multiply, frozen steps are united.

    Attributes:
        match: patterns of names; `*` stands for (part of) one component. The pattern of a module matches all
            parameters inside it: `layers.0`, `layers.*.attention`. Every pattern must match something.
        roles: roles of the parameters; default all.
        lr: factor of the learning rate.
        decay: factor of the weight decay.
        freeze_from: first step, counted from 0, in which the parameters are frozen.
        freeze_until: first step in which they train again; default never. Only parameters that are frozen
            from step 0 to the end have no optimizer state and no gradients.
        stages: stages of training or freezing, in place of the two keys above.
    """

    match: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ()
    lr: Annotated[float, Meta(ge=0)] = 1.0
    decay: Annotated[float, Meta(ge=0)] = 1.0
    freeze_from: Annotated[int, Meta(ge=0)] | None = None
    freeze_until: Annotated[int, Meta(ge=1)] | None = None
    stages: tuple[StageRule, ...] = ()

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not self.match and not self.roles:
            yield "a group names nothing; give match, roles, or both"
        yield from sentences_from(require_rising, self.stages)
        if self.stages and (self.freeze_from is not None or self.freeze_until is not None):
            yield (
                f"given freeze_from = {self.freeze_from} and freeze_until = {self.freeze_until} beside "
                "stages; say it in stages"
            )
        if self.freeze_until is not None and self.freeze_until <= (self.freeze_from or 0):
            yield (
                f"freeze_until = {self.freeze_until} is not after freeze_from = {self.freeze_from or 0}; "
                "leave out freeze_until to freeze to the end"
            )

    @property
    def frozen(self) -> Stages:
        """The steps in which this rule freezes parameters."""
        if self.freeze_from is None and self.freeze_until is None:
            return tuple(frozen_steps(self.stages))
        return ((self.freeze_from or 0, self.freeze_until),)

    def in_steps(self, step_of: Callable[[int], int]) -> GroupRule:
        """Return the same rule with stages that begin at steps; see `StageRule.in_steps`."""
        return structs.replace(self, stages=tuple(stage.in_steps(step_of) for stage in self.stages))

    def names(self, name: str, role: str) -> bool:
        """Return whether the rule applies to a parameter."""
        return self.matches(name) and (not self.roles or role in self.roles)

    def matches(self, name: str) -> bool:
        """Return whether a pattern matches a parameter, or there is no pattern."""
        return not self.match or any(inside(pattern, name) for pattern in self.match)


class Treatment(NamedTuple):
    """The combined effect of all group rules on a parameter.

    Attributes:
        lr: factor of the learning rate.
        decay: factor of the weight decay.
        frozen: steps in which the parameter is frozen, in order of their start.
        curves: for each rule, the stages in which the parameter trains; factors of rules multiply.
    """

    lr: float = 1.0
    decay: float = 1.0
    frozen: Stages = ()
    curves: tuple[tuple[Stage, ...], ...] = ()


class Group(NamedTuple):
    """Parameters with the same treatment.

    Attributes:
        kind: kind of update in the optimizer, such as its algorithm for them.
        treatment: treatment of all of them.
        parameters: the parameters, in the order of the model.
    """

    kind: str
    treatment: Treatment
    parameters: list[NamedParameter]


def treatment(name: str, role: str, rules: Iterable[GroupRule], no_decay: Sequence[str] = ()) -> Treatment:
    """Combine the rules for one parameter; roles in `no_decay` never decay."""
    lr, decay, frozen = 1.0, 0.0 if role in no_decay else 1.0, set[tuple[int, int | None]]()
    curves = list[tuple[Stage, ...]]()
    for rule in rules:
        if rule.names(name, role):
            lr, decay = lr * rule.lr, decay * rule.decay
            frozen.update(rule.frozen)
            curves += [curve] if (curve := trained_stages(rule.stages)) else []
    steps = tuple(sorted(frozen, key=lambda stage: (stage[0], stage[1] or 0)))
    return Treatment(lr, decay, steps, tuple(curves))


def group(
    parameters: Iterable[NamedParameter],
    rules: Sequence[GroupRule] = (),
    no_decay: Sequence[str] = (),
    kind: Any = lambda parameter: "",
) -> list[Group]:
    """Put every parameter into exactly one group; parameters that no rule matches come first.

    Args:
        parameters: the trained parameters.
        rules: rules of the configuration.
        no_decay: roles that do not decay.
        kind: returns the kind of a parameter; different kinds are in different groups.
    """
    found: dict[tuple[str, Treatment], list[NamedParameter]] = {}
    for parameter in parameters:
        treated = treatment(parameter.name, parameter.role, rules, no_decay)
        treated = treated._replace(lr=treated.lr * parameter.lr, decay=treated.decay * parameter.decay)
        found.setdefault((kind(parameter), treated), []).append(parameter)
    groups = [Group(of, treated, members) for (of, treated), members in found.items()]
    return sorted(
        groups, key=lambda g: (g.treatment.lr != 1, bool(g.treatment.frozen), not g.treatment.decay)
    )


def is_frozen(stages: Stages, step: int) -> bool:
    """Return whether parameters with these stages are frozen in a step (from 0)."""
    return any(start <= step and (end is None or step < end) for start, end in stages)


def freeze(model: nn.Module, rules: Sequence[GroupRule], sources: Sequence[SourceConfig] = ()) -> None:
    """Disable gradients of parameters that never train; call it before the model is cut or parallelized.

    Args:
        model: the whole model.
        rules: rules of the configuration, with stages in steps.
        sources: sources of the data; modules whose inputs no source has are never trained.

    Raises:
        ConfigError: a pattern of a rule names no parameter, or nothing is left to train.
    """
    roles: dict[str, str] = model.parameter_roles()  # type: ignore[operator]
    require_names(rules, roles)
    if idle := unfed(model, sources):
        rules = [*rules, GroupRule(match=tuple(idle), freeze_from=0)]
    for name, parameter in model.named_parameters():
        if FOREVER in treatment(name, roles.get(name, ""), rules).frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("optimizer.groups freezes every parameter; leave something to train")


def unfed(model: nn.Module, sources: Sequence[SourceConfig]) -> list[str]:
    """Return patterns of modules whose inputs no source has, such as a vision tower without images."""
    from forge_parallel.plan import Plan

    if not sources or not all(source.has_tokens_only() for source in sources):
        return []
    return [pattern for pattern, inputs in Plan.of(model).flat().fed_by.items() if inputs]


def require_names(rules: Sequence[GroupRule], roles: Mapping[str, str]) -> None:
    """Check that every pattern matches a parameter, and every rule a parameter with one of its roles.

    Args:
        rules: rules of the configuration.
        roles: roles of all parameters of the model, by name.

    Raises:
        ConfigError: a pattern or rule matches nothing; lists the names or roles of the model.
    """
    names = list(roles)
    for index, rule in enumerate(rules):
        for pattern in rule.match:
            if not any(inside(pattern, name) for name in names):
                kinds = ", ".join(dict.fromkeys(shape_of(name) for name in names))
                raise ConfigError(
                    f"optimizer.groups[{index}]: {pattern!r} names no parameter; the model has {kinds}"
                )
        if not any(rule.names(name, role) for name, role in roles.items()):
            present_roles = dict.fromkeys(r for n, r in roles.items() if rule.matches(n))
            raise ConfigError(
                f"optimizer.groups[{index}]: no parameter that it matches has a role of "
                f"{', '.join(rule.roles)}; they have {', '.join(present_roles)}"
            )


def drop_frozen_gradients(optimizer: Optimizer, step: int) -> None:
    """Delete the gradients of parameters that are frozen in this step, so that nothing moves them.

    The attribute `frozen` of the optimizer, one bool for each group, informs our own optimizers.
    """
    frozen = [is_frozen(entry.get("frozen", ()), step) for entry in optimizer.param_groups]
    optimizer.frozen = frozen  # type: ignore[attr-defined]
    for entry, is_ in zip(optimizer.param_groups, frozen, strict=True):
        for parameter in entry["params"] if is_ else ():
            parameter.grad = None


def shape_of(name: str) -> str:
    """Return a name with its numbers replaced by `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def listed(names: Iterable[str]) -> list[str]:
    """List names in few lines; names that differ in numbers share one: `layers.0-3,7.ffn.w_up.weight`."""
    alike: dict[str, list[list[str]]] = {}
    for name in names:
        alike.setdefault(shape_of(name), []).append(name.split("."))
    return [".".join(map(_ranges, zip(*members, strict=True))) for members in alike.values()]


def _ranges(parts: tuple[str, ...]) -> str:
    """Join numbers to ranges; return a word as it is."""
    if not parts[0].isdigit():
        return parts[0]
    numbers = sorted({int(part) for part in parts})
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def inside(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter or a module around it."""
    from forge_parallel.match import matches

    depth = pattern.count(".") + 1
    return matches(pattern, ".".join(name.split(".")[:depth]))
