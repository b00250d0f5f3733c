"""Searches variants of a job that fit: plans other meshes, micro-batches, recomputation and gradient sums."""

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
"""The number of listed candidates."""

MODES = ("none", "selective", "full")
"""Modes of recomputation; each is slower than the previous one and needs less memory."""

MOST = {"tp": 8, "pp": 16, "cp": 8, "ep": 64}
"""The largest size of an axis that is tried."""

MOST_CHANGES = 2
"""The most changes of a candidate: axes of the mesh, and the size of the micro-batch."""

LIMIT_S = 300.0
"""The time after which no further candidate is planned."""

Keys = dict[str, Any]
"""Dotted keys and their new values."""


class Candidate(NamedTuple):
    """A planned variant of the job.

    Attributes:
        keys: the keys that differ from the job.
        plan: the plan of the variant.
    """

    keys: Keys
    plan: Plan

    def line(self) -> str:
        """Describe the candidate in one line; the keys are flags that can be pasted."""
        flags = " ".join(f"--{key}={_flag(value)}" for key, value in self.keys.items()) or "the job as it is"
        time = "" if self.plan.time is None else f"{self.plan.time.likely:8.3g} s a step  "
        return f"{time}{sized(self.plan.memory_bytes):>9}  {flags}"


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        base: the plan of the job itself.
        best: candidates that fit, including the job itself, the fastest first.
        changes: single changes that make the job fit, the fastest first; empty if it fits already.
        tried: number of other jobs that were planned.
        left: number of layouts not planned when the time was over.
    """

    base: Plan
    best: list[Candidate]
    changes: list[Candidate]
    tried: int
    left: int

    def lines(self) -> Iterator[str]:
        """Yield the lines of `forge plan --search`."""
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
        """Return the result as data for programs."""
        found: dict[str, Any] = {
            name: [_data(one) for one in getattr(self, name)] for name in ("best", "changes")
        }
        return found | {"tried": self.tried, "left": self.left}


def search(
    base: Plan, table: Table, on_plan: Callable[[str], None] = lambda _: None, limit_s: float = LIMIT_S
) -> SearchResult:
    """Plan the layouts near a job.

    Meshes differ in `tp`, `pp`, `cp`, `ep` and `dp_replicate`, and so in `dp_shard`; micro-batches are half
    and twice as large. Layouts with the fewest changes come first, each with the least recomputation that
    fits. Number formats are changed only if the job itself does not fit, because they change the training.

    Args:
        base: the plan of the job.
        table: table of devices.
        on_plan: called with a line for each planned candidate.
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
    """Plan the job with other values; None if they contradict each other."""
    try:
        made = _changed(base.job, keys)
        found = plan_of(made, base.site.ranks, base.site.node_ranks, base.device_name, table)
    except (ValueError, ParallelError):
        return None
    return Candidate(keys, found)


def _around(job: Job, ranks: int, node_ranks: int) -> list[Keys]:
    """Return valid layouts with sizes of micro-batches, the fewest changes of the job first."""
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
    """Yield changes of one key that need less memory."""
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
    """Return the keys whose values differ from the job."""
    return {key: value for key, value in keys.items() if _value(job, key) != value}


def _value(job: Job, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(job, section), name)


def _changed(job: Job, keys: Keys) -> Job:
    """Return the job with other values.

    Raises:
        ValueError: the values contradict each other.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    made = structs.replace(
        job, **{name: structs.replace(getattr(job, name), **values) for name, values in sections.items()}
    )
    for check in checks_on_paper:
        for problem in check(**{name: getattr(made, name) for name in signature(check).parameters}) or ():
            raise ValueError(problem)
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
