"""Estimates the time of a step: computation, communication, and the bubble of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

from forge_trainer.config.job import Job
from forge_trainer.plan.collectives import Collective, Traffic
from forge_trainer.plan.devices import Device, Efficiency
from forge_trainer.plan.trace import Traced

SHARDED = ("fsdp", "dp_replicate", "efsdp")
"""Axes whose collectives overlap with computation."""


class Seconds(NamedTuple):
    """The times of a step in seconds.

    Attributes:
        compute: time of matmuls, attention, and memory traffic.
        exposed: time of collectives inside blocks, which cannot overlap with computation.
        hidden: time of collectives of FSDP2, which may overlap with computation.
        launch: time in which the host starts all kernels, if blocks are not compiled.
        bubble: time in which a rank of a pipeline waits.
        low: time of the step with full overlap.
        high: time of the step without overlap.
        likely: time of the step in between, calibrated by measured steps.
    """

    compute: float
    exposed: float
    hidden: float
    launch: float
    bubble: float
    low: float
    high: float
    likely: float


def seconds(
    step: Traced, job: Job, device: Device, reached: Efficiency, stages: int, micro_batches: int
) -> Seconds:
    """Estimate the time of a rank's step.

    Args:
        step: the traced step.
        job: the configuration.
        device: device of the rank.
        reached: fractions of the device's peak rates that are reached.
        stages: number of ranks of the pipeline.
        micro_batches: number of micro-batches of a step.
    """
    peak = device.tflops[job.precision.compute_dtype("cuda")] * 1e12
    matmul = step.flops.get("matmul", 0.0) / (peak * reached.matmul)
    attention = step.flops.get("attention", 0.0) / (peak * reached.attention)
    fused = reached.fused if job.compile.enabled else 1.0
    moved = sum(size * (1.0 if phase == "update" else fused) for phase, size in step.moved.items())
    compute = matmul + attention + moved / (device.memory_gbs * 1e9 * reached.memory)
    launch = 0.0 if job.compile.enabled else step.kernels * device.launch_us * 1e-6
    times = {
        collective: collective_s(collective, traffic, device, reached)
        for collective, traffic in step.collectives.items()
    }
    hidden = sum(time for collective, time in times.items() if collective.axis in SHARDED)
    exposed = sum(times.values()) - hidden
    busy = max(compute + exposed, launch)
    waits = bubble_share(job.pipeline.schedule, job.pipeline.held(), stages, micro_batches)
    low = max(busy, hidden) * (1 + waits)
    high = (busy + hidden) * (1 + waits)
    beside = min(reached.overlap * hidden, compute)
    likely = (busy + hidden - beside) * (1 + waits)
    return Seconds(compute, exposed, hidden, launch, busy * waits, low, high, max(low, likely))


def collective_s(collective: Collective, traffic: Traffic, device: Device, reached: Efficiency) -> float:
    """Estimate the seconds of all collectives of a kind, by rings that enter and leave each node once."""
    inside = collective.nodes == 1
    local = collective.ranks / collective.nodes
    links = device.inside_gbs
    if not device.switched and local > 1:
        links *= min(1.0, (local - 1) / (device.node_ranks - 1))
    speed = links if inside else min(links, device.between_gbs * local)
    sent = traffic.bytes * (1 - 1 / collective.ranks)
    if collective.kind == "all-reduce":
        sent *= 2
    elif collective.kind in ("send", "receive"):
        sent = traffic.bytes
    elif collective.kind == "all-to-all" and not inside:
        speed = device.between_gbs / (1 - local / collective.ranks)
    return sent / (speed * 1e9 * reached.network) + traffic.count * device.latency_us[not inside] * 1e-6


def bubble_share(schedule: str, stages_per_rank: int, stages: int, micro_batches: int) -> float:
    """Return the waiting time of a rank as a fraction of its working time.

    For `gpipe` and `1f1b` it is (p - 1) / m (Narayanan et al. 2021, arXiv:2104.04473 section 2.2), for
    interleaved schedules 1/v of that. Schedules that split the backward pass in two wait at most a third as
    long (Qi et al. 2023, arXiv:2401.10241 section 2.3).
    """
    share = (stages - 1) / max(1, micro_batches)
    if schedule.startswith("interleaved"):
        share /= stages_per_rank
    if "zero_bubble" in schedule or schedule == "dualpipe_v":
        share /= 3
    return share
