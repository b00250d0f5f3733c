"""Makes the short form of a plan: a record for the run, and a few lines. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_trainer.report.scaled import scaled

GIB = 1 << 30
DAY_S = 86400


def record_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a run's `plan.json`; a quantity that the run logs has the name of its metric.

    Args:
        data: result of `forge_trainer.plan.report.as_data`.
    """
    stage = max(data["stages"], key=lambda one: one["peak"]["total"])
    time, room = data["time"], data["device_bytes"]
    record = {
        "ranks": data["ranks"],
        "device": data["device"],
        "layout": {name: size for name, size in data["layout"].items() if size > 1},
        "parameters": data["parameters"]["total"],
        "memory_gib": data["memory_bytes"] / GIB,
        "device_gib": None if room is None else room / GIB,
        "fits": data["fits"],
        "memory_at": where(**stage["peak"]["place"]),
        "memory_gib_of": {kind: size / GIB for kind, size in stage["peak"]["bytes"].items() if size},
    }
    if time is None:
        return record
    return record | {
        "step_s": time["likely"],
        "step_s_range": [time["low"], time["high"]],
        "tokens_per_s": data["tokens_per_s"],
        "mfu": data["mfu"],
        "mfu_full_attention": data["mfu_full_attention"],
        "days": time["likely"] * data["steps"] / DAY_S,
    }


def short_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with parameters, memory and, if known, speed, for a start or a submission."""
    room = "" if record["device_gib"] is None else f" of {sized(record['device_gib'] * GIB)}"
    yield (
        f"  planned    {scaled(record['parameters'])} parameters, {sized(record['memory_gib'] * GIB)}{room} "
        f"a rank of {record['device']}, at {record['memory_at']}"
    )
    if record["fits"] is False:
        yield "  WARNING    the job does not fit as planned; forge plan --search looks for what does"
    if "step_s" in record:
        low, high = record["step_s_range"]
        yield (
            f"  planned    {low:.3g} to {high:.3g} s a step, {scaled(record['tokens_per_s']).strip()} "
            f"tokens/s, MFU {100 * record['mfu']:.0f} %, {record['days']:.3g} days to the end"
        )


def does_not_fit(record: Mapping[str, Any]) -> str:
    """Return a message if a job does not fit; empty if it fits, or if that is unknown."""
    if record.get("fits") is not False:
        return ""
    return (
        f"the job needs {sized(record['memory_gib'] * GIB)} a rank as planned, and {record['device']} has "
        f"{sized(record['device_gib'] * GIB)}; forge plan --search looks for what fits"
    )


def where(phase: str, micro: str, module: str) -> str:
    """Describe a place of a step in words."""
    of = f" of the {micro} micro-batch" if micro else ""
    return f"{module or 'the model'} in the {phase}{' pass' if phase != 'update' else ''}{of}"


def sized(size: float) -> str:
    """Format bytes with a binary prefix, such as `5.17 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.{1 if size >= 10 else 2}f} GiB"
