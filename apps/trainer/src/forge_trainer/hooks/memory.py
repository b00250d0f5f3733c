"""What the memory of a GPU holds, as figures; asked of the allocator, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

GIB = 1 << 30


def memory_figures(device: torch.device) -> dict[str, float]:
    """Figures by name, as `memory/<figure>`; none where the device is no GPU."""
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    return figures_of(torch.cuda.memory_stats(device), total)


def figures_of(stats: Mapping[str, int], total: int) -> dict[str, float]:
    """Figures from the counts of the allocator.

    Args:
        stats: from `torch.cuda.memory_stats`, in bytes.
        total: bytes of the device.

    Returns:
        In GiB: what tensors hold now (`allocated`), what the process has taken from the device (`reserved`),
        and the most of each so far (`peak_allocated`, `peak_reserved`). As parts of 1: the most that was
        taken of all that the device has (`utilization`), and how much of what is taken now is in no tensor
        (`fragmentation`). `retries` counts how often memory ran out and unused memory was given back.
    """

    def bytes_of(name: str) -> int:
        return stats.get(name, 0)

    allocated, reserved = bytes_of("allocated_bytes.all.current"), bytes_of("reserved_bytes.all.current")
    most = bytes_of("reserved_bytes.all.peak")
    return {
        "memory/allocated_gib": allocated / GIB,
        "memory/reserved_gib": reserved / GIB,
        "memory/peak_allocated_gib": bytes_of("allocated_bytes.all.peak") / GIB,
        "memory/peak_reserved_gib": most / GIB,
        "memory/utilization": most / total,
        "memory/fragmentation": 1 - allocated / reserved if reserved else 0.0,
        "memory/retries": float(stats.get("num_alloc_retries", 0)),
    }
