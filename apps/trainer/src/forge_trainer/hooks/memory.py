"""Figures of the memory of a GPU, read from the allocator without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

GIB = 1 << 30


def memory_figures(device: torch.device) -> dict[str, float]:
    """Return figures as `memory/<figure>`; empty if the device is no GPU."""
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    return figures_of(torch.cuda.memory_stats(device), total)


def figures_of(stats: Mapping[str, int], total: int) -> dict[str, float]:
    """Compute figures from the counts of the allocator.

    Args:
        stats: result of `torch.cuda.memory_stats`, in bytes.
        total: memory of the device, in bytes.

    Returns:
        In GiB: memory in tensors now (`allocated`), memory that the process has reserved (`reserved`), and
        the peaks of both (`peak_allocated`, `peak_reserved`). As fractions: peak reserved memory of the
        memory of the device (`utilization`), and reserved memory that is in no tensor now
        (`fragmentation`). `retries` counts how often memory ran out and unused memory was freed.
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
