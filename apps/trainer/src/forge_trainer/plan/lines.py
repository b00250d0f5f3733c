"""Prints the plan of a job as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forge_trainer.plan import kinds
from forge_trainer.plan.collectives import Collective, Traffic
from forge_trainer.plan.places import Place
from forge_trainer.plan.record import DAY_S, sized, where
from forge_trainer.plan.report import Plan, checkpoint_bytes
from forge_trainer.plan.sources import source_lines
from forge_trainer.plan.stage import Stage
from forge_trainer.report.announce import scaled


def plan_lines_of(plan: Plan) -> Iterator[str]:
    """Yield the lines of the full plan."""
    job, counted = plan.job, plan.parameters
    axes = " x ".join(f"{name} {size}" for name, size in plan.sizes.items())
    axes += f", of which ep {job.mesh.ep}" if job.mesh.ep > 1 else ""
    nodes = -(-plan.site.ranks // plan.site.node_ranks)
    ranks, places = plan.site.ranks, f"{nodes} node{'s' * (nodes > 1)}"
    yield f"{job.job.name} on {ranks} rank{'s' * (ranks > 1)} of {plan.device_name}, {places}: {axes}"
    yield f"  parameters {_number(counted.total)} ({counted.total:,}), {_number(counted.active)} active, " + (
        f"{_number(counted.trained)} trained"
    )
    for role, number in counted.by_role.items():
        yield f"    {role:<12} {_number(number):>9}  {100 * number / counted.total:5.1f} %"
    tokens = job.train.micro_batch * job.data.max_tokens
    yield (
        f"  step       {job.train.global_batch:,} sequences of {job.data.max_tokens:,} tokens: "
        f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)} of {tokens:,} tokens a rank; "
        f"{_number(plan.flops)}FLOPs, {_number(plan.flops_full)}FLOPs with all pairs of tokens"
    )
    for stage, (place, sizes), host in zip(plan.stages, plan.peaks, plan.host, strict=True):
        yield from _memory_lines(plan, stage, place, sizes, host)
    yield from _collective_lines(plan.stages[0])
    if plan.skewed is not None:
        yield from _skew_lines(plan)
    yield from _time_lines(plan)
    yield from source_lines(job)
    size = checkpoint_bytes(plan)
    took = (
        "" if plan.device is None else f", {size / 1e9 / (plan.device.storage_gbs * nodes):,.0f} s to write"
    )
    yield f"  checkpoint {sized(size)}{took}"
    yield from _start_lines(plan)


def _memory_lines(
    plan: Plan, stage: Stage, place: Place, sizes: Mapping[str, float], host: float
) -> Iterator[str]:
    total = sum(sizes.values())
    name = "a rank" if plan.sizes["pp"] == 1 else f"stage rank {stage.number} of {plan.sizes['pp']}"
    room = ""
    if plan.device is not None:
        room = f" of {plan.device.memory_gib:.1f} GiB: {'fits' if plan.fits else 'DOES NOT FIT'}"
    ran = "all run" if stage.ran >= stage.blocks else f"{stage.ran} run, the others extrapolated"
    yield f"  memory     {name}: {sized(total)}{room}, at {where(*place)}; {stage.blocks} blocks, {ran}"
    for kind in kinds.KINDS:
        if size := sizes.get(kind, 0.0):
            yield f"    {kind:<14} {sized(size):>12}  {100 * size / total:5.1f} %"
    if host:
        yield f"    on the host    {sized(host):>12}"


def _collective_lines(stage: Stage) -> Iterator[str]:
    merged: dict[Collective, Traffic] = {}
    for collective, traffic in stage.step.collectives.items():
        key = collective._replace(phase="")
        before = merged.get(key, Traffic(0, 0))
        merged[key] = Traffic(before.count + traffic.count, before.bytes + traffic.bytes)
    if not merged:
        return
    yield f"  network    of rank {stage.rank}, in a step"
    for collective, traffic in sorted(merged.items(), key=lambda item: -item[1].bytes):
        nodes = "inside a node" if collective.nodes == 1 else f"over {collective.nodes} nodes"
        yield (
            f"    {collective.axis:<12} {collective.kind:<14} {traffic.count:>8,.0f} x  "
            f"{sized(traffic.bytes):>12}  {collective.ranks} ranks {nodes}"
        )


def _skew_lines(plan: Plan) -> Iterator[str]:
    assert plan.skewed is not None
    _, sizes = kinds.highest(plan.skewed.step.peaks)
    more = sum(sizes.values()) - plan.memory_bytes
    sent = [
        sum(t.bytes for s, t in stage.step.collectives.items() if s.axis == "ep" and s.kind == "all-to-all")
        for stage in (plan.stages[0], plan.skewed)
    ]
    yield (
        f"  experts    a rank sends {sized(sent[0])} a step under even routing; one that serves twice as "
        f"many rows {sized(sent[1])}, and holds {sized(more)} more"
    )


def _time_lines(plan: Plan) -> Iterator[str]:
    time = plan.time
    if time is None or plan.device is None:
        return
    yield (
        f"  time       {time.low:.3g} to {time.high:.3g} s a step, likely {time.likely:.3g}: computes "
        f"{time.compute:.3g}, waits for the network {time.exposed:.3g}, FSDP2's {time.hidden:.3g} may hide"
        + (f", the bubble {time.bubble:.3g}" if time.bubble else "")
        + (f", the host starts kernels for {time.launch:.3g}" if time.launch > time.compute else "")
    )
    yield (
        f"    {_number(plan.tokens_per_s or 0)} tokens/s, MFU {100 * (plan.mfu() or 0):.1f} % "
        f"({100 * (plan.mfu(full=True) or 0):.1f} % with all pairs of tokens), {_days(plan)}"
    )


def _days(plan: Plan) -> str:
    assert plan.time is not None and plan.device is not None
    days = plan.time.likely * plan.job.train.steps / DAY_S
    energy = days * 24 * plan.site.ranks * plan.device.watts / 1e6
    return f"{days:.3g} days" + (f" and {energy:.3g} MWh of devices" if energy else "") + " to the end"


def _start_lines(plan: Plan) -> Iterator[str]:
    job = plan.job
    weights = " and ".join(job.train.origins.values())
    begins = f"the weights of {weights}" if weights else f"weights of seed {job.job.seed}"
    compiles = f", compiles {job.model.block_kinds()} kinds of blocks" if job.compile.enabled else ""
    yield f"  start      writes to {job.job.directory}, begins with {begins}{compiles}"


def _number(value: float) -> str:
    return scaled(value).strip()
