"""What would fit: meshes, micro-batches, recomputation and gradient sums around a job, each run on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from forge_parallel.error import ParallelError
from msgspec import structs

from forge_trainer.config.checks import axes_divide_the_model, sections_fit_together
from forge_trainer.config.job import Job
from forge_trainer.plan.devices import Table
from forge_trainer.plan.report import GIB, Plan, plan_of

BEST = 5
"""So many are listed."""

MODES = ("none", "selective", "full")
"""Recomputation, each slower than the one before, and with less memory."""

MOST_TP = 8

Keys = dict[str, Any]
"""Dotted keys and what they become."""


class Tried(NamedTuple):
    """A job around the one that was asked for.

    Attributes:
        keys: that differ from it.
        plan: of it.
    """

    keys: Keys
    plan: Plan

    def line(self) -> str:
        """In words."""
        said = ", ".join(f"{key} = {_toml(value)}" for key, value in self.keys.items()) or "the job as it is"
        time = "" if self.plan.time is None else f"{self.plan.time.likely:8.3g} s a step  "
        return f"{time}{self.plan.memory_bytes / GIB:7.1f} GiB  {said}"


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        asked: the plan of the job itself.
        best: those that fit, the fastest first.
        changes: single changes of the job, if it does not fit: those with which it does, the fastest first.
    """

    asked: Plan
    best: list[Tried]
    changes: list[Tried]

    def lines(self) -> Iterator[str]:
        """What is printed."""
        if self.changes:
            yield "  what would make it fit"
            for one in self.changes:
                saved = (self.asked.memory_bytes - one.plan.memory_bytes) / GIB
                yield f"    {one.line()}  saves {saved:.1f} GiB"
        yield "  what fits and is fastest" if self.best else "  nothing around the job fits; use more ranks"
        yield from (f"    {one.line()}" for one in self.best)

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        return {name: [_data(one) for one in getattr(self, name)] for name in ("best", "changes")}


def search(asked: Plan, table: Table, told: Callable[[str], None] = lambda _: None) -> Found:
    """Plan what lies around a job.

    Meshes differ in `tp` and in what it leaves to `dp_shard`; micro-batches are half and twice as large. Of
    each, the least recomputation that fits is taken. Number formats are changed only where the job itself
    does not fit, for they change what is trained.

    Args:
        asked: the plan of the job.
        table: of devices.
        told: called with a line for each that was planned.
    """
    planned: dict[str, Tried] = {}

    def plan(keys: Keys) -> Tried | None:
        name = repr(sorted(keys.items()))
        if name not in planned:
            try:
                made = _changed(asked.job, keys)
                found = plan_of(made, asked.site.ranks, asked.site.node_ranks, asked.device_name, table)
            except (ValueError, ParallelError):
                return None
            planned[name] = Tried(keys, found)
            told(planned[name].line())
        return planned[name]

    best: list[Tried] = []
    for keys in _around(asked.job):
        for mode in MODES:
            one = plan(_differing(asked.job, keys | {"activation_checkpointing.mode": mode}))
            if one is not None and one.plan.fits:
                best.append(one)
                break
    changes = [] if asked.fits else [one for keys in _single(asked.job) if (one := plan(keys)) is not None]
    return Found(
        asked,
        sorted(best, key=_slowness)[:BEST],
        sorted((one for one in changes if one.plan.fits), key=_slowness),
    )


def _around(job: Job) -> Iterator[Keys]:
    micro = job.train.micro_batch
    sizes = dict.fromkeys([micro, *([micro // 2] if micro > 1 else []), 2 * micro])
    shares = [2**power for power in range(MOST_TP.bit_length())]
    for tp in dict.fromkeys([job.mesh.tp, *(shares if job.mesh.pp == 1 else [])]):
        mesh: Keys = {} if tp == job.mesh.tp else {"mesh.tp": tp, "mesh.dp_shard": -1}
        yield from (mesh | {"train.micro_batch": size} for size in sizes)


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
    """Those that the job does not have already."""
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
    axes_divide_the_model(made.model, made.data, made.mesh, made.tensor_parallel, made.context_parallel)
    sections_fit_together(
        made.tensor_parallel, made.fsdp, made.fp8, made.activation_checkpointing, made.compile
    )
    return made


def _slowness(one: Tried) -> float:
    return one.plan.time.likely if one.plan.time is not None else one.plan.memory_bytes


def _toml(value: Any) -> str:
    return (
        {True: "true", False: "false"}.get(value, "")
        if isinstance(value, bool)
        else (f'"{value}"' if isinstance(value, str) else str(value))
    )


def _data(one: Tried) -> dict[str, Any]:
    time = one.plan.time
    return {
        "keys": one.keys,
        "memory_bytes": one.plan.memory_bytes,
        "step_s": None if time is None else time.likely,
        "tokens_per_s": one.plan.tokens_per_s,
    }
