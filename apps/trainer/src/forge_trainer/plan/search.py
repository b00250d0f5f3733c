"""What would fit: meshes, micro-batches, recomputation and gradient sums around a job, each run on paper."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

from forge_parallel.error import ParallelError
from msgspec import structs

from forge_trainer.config.checks import checks_on_paper
from forge_trainer.config.job import Job
from forge_trainer.plan.devices import Table
from forge_trainer.plan.record import sized
from forge_trainer.plan.report import Plan, plan_of

BEST = 5
"""So many are listed."""

MODES = ("none", "selective", "full")
"""Recomputation, each slower than the one before, and with less memory."""

MOST = {"tp": 8, "pp": 16, "cp": 8, "ep": 64}
"""The largest size of an axis that is tried."""

MOST_CHANGES = 2
"""So many axes of the mesh, the size of the micro-batch among them, differ at most from the job."""

LIMIT_S = 300.0
"""After so long no other candidate is begun."""

Keys = dict[str, Any]
"""Dotted keys and what they become."""


class Candidate(NamedTuple):
    """A planned variant of the job.

    Attributes:
        keys: that differ from it.
        plan: of it.
    """

    keys: Keys
    plan: Plan

    def line(self) -> str:
        """In words; the keys are flags, to be pasted."""
        said = " ".join(f"--{key}={_flag(value)}" for key, value in self.keys.items()) or "the job as it is"
        time = "" if self.plan.time is None else f"{self.plan.time.likely:8.3g} s a step  "
        return f"{time}{sized(self.plan.memory_bytes):>9}  {said}"


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        base: the plan of the job itself.
        best: those that fit, the fastest first, the job itself among them.
        changes: single changes of the job, if it does not fit: those with which it does, the fastest first.
        tried: how many jobs were planned beside the one that was base for.
        left: how many layouts were not looked at when time was up.
    """

    base: Plan
    best: list[Candidate]
    changes: list[Candidate]
    tried: int
    left: int

    def lines(self) -> Iterator[str]:
        """The lines that `forge plan --search` prints."""
        left = f"; time was up before {self.left} other layouts: --search-limit" if self.left else ""
        yield f"  search     {self.tried} other jobs planned{left}"
        if self.changes:
            yield "  what would make it fit"
            for one in self.changes:
                saved = self.base.memory_bytes - one.plan.memory_bytes
                yield f"    {one.line()}  saves {sized(saved)}"
        yield "  what fits and is fastest" if self.best else "  nothing around the job fits; use more ranks"
        yield from (f"    {one.line()}" for one in self.best)

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        found: dict[str, Any] = {
            name: [_data(one) for one in getattr(self, name)] for name in ("best", "changes")
        }
        return found | {"tried": self.tried, "left": self.left}


def search(
    base: Plan, table: Table, on_plan: Callable[[str], None] = lambda _: None, limit_s: float = LIMIT_S
) -> SearchResult:
    """Plan the layouts near a job.

    Meshes differ in `tp`, `pp`, `cp`, `ep` and `dp_replicate`, and in what these leave to `dp_shard`;
    micro-batches are half and twice as large. What differs least comes first. Of each, the least
    recomputation that fits is taken. Number formats are changed only where the job itself does not fit, for
    they change what is trained.

    Args:
        base: the plan of the job.
        table: of devices.
        on_plan: called with a line for each that was planned.
        limit_s: see `LIMIT_S`.
    """
    as_it_is = Candidate({}, base)
    planned: dict[str, Candidate | None] = {_name({}): as_it_is}
    until = time.monotonic() + limit_s

    def plan(keys: Keys) -> Candidate | None:
        name = _name(keys)
        if name not in planned and time.monotonic() < until:
            planned[name] = _planned(base, keys, table)
            if (made := planned[name]) is not None:
                on_plan(made.line())
        return planned.get(name)

    changes = [] if base.fits else [one for keys in _single(base.job) if (one := plan(keys)) is not None]
    best = [as_it_is] if base.fits else []
    layouts = _around(base.job, base.site.ranks, base.site.node_ranks)
    looked_at = 0
    for keys in layouts:
        if time.monotonic() >= until:
            break
        looked_at += 1
        for mode in MODES:
            one = plan(_differing(base.job, keys | {"activation_checkpointing.mode": mode}))
            if one is not None and one.plan.fits:
                best += [one] if one.keys else []
                break
    return SearchResult(
        base,
        sorted(best, key=_slowness)[:BEST],
        sorted((one for one in changes if one.plan.fits), key=_slowness),
        sum(one is not None for one in planned.values()) - 1,
        len(layouts) - looked_at,
    )


def _name(keys: Keys) -> str:
    return repr(sorted(keys.items()))


def _planned(base: Plan, keys: Keys, table: Table) -> Candidate | None:
    """The plan of a job with other values; None if they do not go together."""
    try:
        made = _changed(base.job, keys)
        found = plan_of(made, base.site.ranks, base.site.node_ranks, base.device_name, table)
    except (ValueError, ParallelError):
        return None
    return Candidate(keys, found)


def _around(job: Job, ranks: int, node_ranks: int) -> list[Keys]:
    """Layouts and micro-batches that can be laid out, those that differ least from the job first."""
    micro, mesh = job.train.micro_batch, job.mesh
    most = MOST | {"ep": min(MOST["ep"], max(job.model.expert_counts().values(), default=1))}
    axes = {axis: [n for n in range(1, size + 1) if ranks % n == 0] for axis, size in most.items()}
    axes["dp_replicate"] = [1, max(1, ranks // node_ranks)]
    choices = {axis: dict.fromkeys([getattr(mesh, axis), *sizes]) for axis, sizes in axes.items()}
    choices["micro_batch"] = dict.fromkeys([micro, *([micro // 2] if micro > 1 else []), 2 * micro])
    found: list[tuple[int, Keys]] = []
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        size = chosen.pop("micro_batch")
        changed: Keys = {f"mesh.{axis}": one for axis, one in chosen.items() if one != getattr(mesh, axis)}
        changes = len(changed) + (size != micro)
        keys = changed | ({"mesh.dp_shard": -1} if changed else {}) | {"train.micro_batch": size}
        if changes <= MOST_CHANGES and _can_be_laid_out(job, keys, ranks):
            found.append((changes, keys))
    return [keys for _, keys in sorted(found, key=lambda one: one[0])]


def _can_be_laid_out(job: Job, keys: Keys, ranks: int) -> bool:
    try:
        _changed(job, keys).require_layout(ranks)
    except (ValueError, ParallelError):
        return False
    return True


def _single(job: Job) -> Iterator[Keys]:
    """Changes of one key that take less memory."""
    candidates: list[Keys] = [{"activation_checkpointing.mode": mode} for mode in MODES[1:]]
    candidates.append({"train.micro_batch": max(1, job.train.micro_batch // 2)})
    candidates.append({"fsdp.reduce_gradients": "every_micro_batch"})
    candidates.append({"fsdp.reshard": "after_forward"})
    candidates.append({"fsdp.offload": True})
    candidates.append({"precision.pure_bf16": True})
    if hasattr(job.optimizer, "moments"):
        candidates.append({"optimizer.moments": "bfloat16"})
    return (keys for keys in candidates if _differing(job, keys))


def _differing(job: Job, keys: Keys) -> Keys:
    """The keys whose values the job does not have already."""
    return {key: value for key, value in keys.items() if _value(job, key) != value}


def _value(job: Job, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(job, section), name)


def _changed(job: Job, keys: Keys) -> Job:
    """The job with other values.

    Raises:
        ValueError: they do not go together.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    made = structs.replace(
        job, **{name: structs.replace(getattr(job, name), **values) for name, values in sections.items()}
    )
    for check in checks_on_paper:
        for said in check(**{name: getattr(made, name) for name in signature(check).parameters}) or ():
            raise ValueError(said)
    return made


def _slowness(one: Candidate) -> float:
    return one.plan.time.likely if one.plan.time is not None else one.plan.memory_bytes


def _flag(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _data(one: Candidate) -> dict[str, Any]:
    time = one.plan.time
    return {
        "keys": one.keys,
        "memory_bytes": one.plan.memory_bytes,
        "step_s": None if time is None else time.likely,
        "tokens_per_s": one.plan.tokens_per_s,
    }
