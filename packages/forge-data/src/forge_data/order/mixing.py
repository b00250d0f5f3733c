"""From a configuration to the order of samples, and the plan of what a run reads. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.order.order import Order
from forge_data.order.skips import build_skips


class Run(NamedTuple):
    """How much of the order a run reads.

    Attributes:
        global_batch: sequences a step.
        steps: steps of the whole run.
    """

    global_batch: int
    steps: int | None = None

    def tokens(self, max_tokens: int) -> int:
        """Tokens a step."""
        return self.global_batch * max_tokens


def phase_starts(config: DataConfig, run: Run) -> list[int]:
    """Return the first step of each phase.

    Raises:
        DataError: they do not rise, or one is a fraction of an unknown number of steps.
    """
    if run.steps is None and any(phase.start_fraction is not None for phase in config.phases):
        raise DataError("a phase with start_fraction needs to know the steps of the run; say `steps`")
    starts = [p.first_step(run.steps or 0, run.tokens(config.max_tokens)) for p in config.phases]
    if any(later <= before for before, later in zip([0, *starts], starts, strict=False)):
        raise DataError(
            f"the phases begin at steps {', '.join(map(str, starts))}; each must begin after step 0 and "
            "after the one before: change their order or their starts"
        )
    return starts


def build_order(config: DataConfig, sizes: Sequence[int], run: Run) -> Order:
    """Build the order of samples of all sources.

    Args:
        config: the section `[data]`.
        sizes: number of samples of each source.
        run: how much of it the run reads.

    Raises:
        DataError: a source is empty or too rare, phases do not rise, or the run reads a source more often
            than its `max_epochs`.
    """
    weights = [source.weight for source in config.sources]
    if config.temperature is not None:
        # Rounded, so that machines whose powers differ in the last bit agree on the order.
        powers = (w * size ** (1 / config.temperature) for w, size in zip(weights, sizes, strict=True))
        weights = [float(f"{value:.6g}") for value in powers]
    names, skips = config.source_names(), build_skips(config.skip, run.global_batch)
    phases = [
        (skips.ordinal(start * run.global_batch), [phase.weights.get(name, 0.0) for name in names])
        for start, phase in zip(phase_starts(config, run), config.phases, strict=True)
    ]
    caps = [
        None if source.max_epochs is None else int(source.max_epochs * size)
        for source, size in zip(config.sources, sizes, strict=True)
    ]
    for name, source, size, cap in zip(names, config.sources, sizes, caps, strict=True):
        if cap == 0 and size:
            raise DataError(
                f"source {name} has {size} sequences, given max_epochs = {source.max_epochs:g}; that is not "
                f"one of them: give at least 1/{size}, or drop the source"
            )
    order = Order(config.seed, sizes, weights, phases, caps, skips)
    if config.when_exhausted != "reweight":
        order.end = min([s.start for s in order.segments if s.exhausted] + [order.end or 1 << 62])
        order.end = None if order.end == 1 << 62 else order.end
    last = last_step(order, run)
    if last == 0:
        raise DataError(
            f"max_epochs and skip leave {order.num_samples} sequences, a step reads {run.global_batch}; "
            "raise max_epochs, leave out less, or add text"
        )
    if last is not None and run.steps is not None and last < run.steps and config.when_exhausted != "stop":
        raise DataError(_too_long(config, order, run, last))
    return order


def last_step(order: Order, run: Run) -> int | None:
    """Return the number of whole steps there are samples for; None for any number."""
    return None if order.num_samples is None else order.num_samples // run.global_batch


def _too_long(config: DataConfig, order: Order, run: Run, last: int) -> str:
    first = next((s for s in order.segments if s.start == order.end), None)
    names = config.source_names()
    gone = ", ".join(names[s] for s in sorted(first.exhausted)) if first else "all sources"
    other = "'stop'" if config.when_exhausted == "reweight" else "'stop' or 'reweight'"
    return (
        f"{gone} will have been read as often as max_epochs allows after step {last} of {run.steps}; "
        f"set train.steps to at most {last}, raise max_epochs, or set data.when_exhausted to {other}"
    )


def num_joined(config: DataConfig, run: Run, samples: int | None) -> int:
    """Return the number of sources that the first `samples` samples may come from; later ones are unread.

    A source with weight 0 may be added at the end of the list, for a phase that begins later.

    Args:
        config: the section `[data]`.
        run: how much of it the run reads.
        samples: number of samples of the run; None means all.
    """
    if samples is None:
        return len(config.sources)
    begun = [
        phase.weights
        for step, phase in zip(phase_starts(config, run), config.phases, strict=True)
        if step * run.global_batch < samples
    ]
    named = enumerate(zip(config.source_names(), config.sources, strict=True), 1)
    return max(n for n, (name, s) in named if s.weight or any(weights.get(name) for weights in begun))


def fingerprint_parts(config: DataConfig, order: Order, run: Run, samples: int | None = None) -> list[str]:
    """Return the parts of a fingerprint that the mixture adds to seed and weights; empty by default.

    Args:
        config: the section `[data]`.
        order: built from it.
        run: how much of it the run reads.
        samples: number of samples of the run; later phases and skips do not count. Absent: all.
    """
    parts: list[str] = []
    joined = num_joined(config, run, samples)
    if config.temperature is not None:
        parts.append(f"temperature {config.temperature!r}")
    starts = {segment.phase: segment.start for segment in reversed(order.segments)}
    for number, (step, phase) in enumerate(zip(phase_starts(config, run), config.phases, strict=True), 1):
        if samples is None or step * run.global_batch < samples:
            weights = [phase.weights.get(name, 0.0) for name in config.source_names()[:joined]]
            parts.append(f"phase {starts.get(number)} {weights!r}")
    epochs = [source.max_epochs for source in config.sources[:joined]]
    if any(each is not None for each in epochs):
        parts.append(f"max_epochs {epochs!r} {_policy(config)}")
    skips = order.skips
    return parts + [
        f"skip {a} {b}"
        for n, (a, b) in enumerate(skips.intervals)
        if samples is None or skips.first_place(n) < samples
    ]


def _policy(config: DataConfig) -> str:
    """Return the policy at the end of a source; an error and a stop there make the same stream."""
    return "error" if config.when_exhausted == "stop" else config.when_exhausted


class Planned(NamedTuple):
    """The share of a source in a phase.

    Attributes:
        phase: number of the phase; 0 is the start of the run.
        first_step: first step of the phase.
        source: the name of the source.
        sequences: sequences read in this phase.
        tokens: tokens read in this phase.
        epochs: passes over the source from the start of the run to the end of the phase.
        exhausted_at_step: the step at which it runs out in this phase; None if it does not.
    """

    phase: int
    first_step: int
    source: str
    sequences: int
    tokens: int
    epochs: float
    exhausted_at_step: int | None


def plan(config: DataConfig, order: Order, run: Run) -> list[Planned]:
    """Return what a run will read, by phase and source. `run.steps` is known."""
    assert run.steps is not None
    last = last_step(order, run)
    last = run.steps if last is None else min(run.steps, last)
    steps = [step for step in (0, *phase_starts(config, run)) if step < last]
    found: list[Planned] = []
    for number, (begin, end) in enumerate(zip(steps, [*steps[1:], last], strict=True)):
        before, after = (order.counts(step * run.global_batch) for step in (begin, end))
        for source, name in enumerate(config.source_names()):
            sequences = int(after[source] - before[source])
            found.append(
                Planned(
                    number,
                    begin,
                    name,
                    sequences,
                    sequences * config.max_tokens,
                    float(after[source]) / order.sizes[source],
                    _exhausted(order, source, number, run),
                )
            )
    return found


def _exhausted(order: Order, source: int, phase: int, run: Run) -> int | None:
    assert run.steps is not None
    before: frozenset[int] = frozenset()
    for segment in order.segments:
        if segment.phase == phase and source in segment.exhausted - before:
            step = order.skips.place(segment.start) // run.global_batch
            return step if step < run.steps else None
        before = segment.exhausted
    return None


def plan_lines(config: DataConfig, order: Order, run: Run) -> list[str]:
    """Return the plan as lines of text; none where the steps of the run are not known."""
    if run.steps is None:
        return []
    planned = plan(config, order, run)
    streamed = config.streamed_names()
    lines: list[str] = []
    for number in sorted({one.phase for one in planned}):
        rows = [one for one in planned if one.phase == number]
        total = sum(one.tokens for one in rows) or 1
        scale = config.phases[number - 1].lr_scale if number else 1.0
        rate = f", learning rate x {scale:g}" if scale != 1 else ""
        lines.append(f"phase {number} from step {rows[0].first_step:,}: {total:,} tokens{rate}")
        for one in rows:
            ends = "" if one.exhausted_at_step is None else f", exhausted at step {one.exhausted_at_step:,}"
            lines.append(
                f"  source {one.source}: {one.tokens:,} tokens ({one.tokens / total:.1%}), "
                f"{'streamed' if one.source in streamed else f'{one.epochs:.3g} epochs by its end'}{ends}"
            )
    if config.temperature is not None and config.phases:
        lines.append(
            "the weights of phases are taken as they are: temperature holds for the first phase only"
        )
    last = last_step(order, run)
    if last is not None and last < run.steps:
        lines.append(
            f"the run ends at step {last:,} of {run.steps:,}: a source is read max_epochs times there"
        )
    return lines + [f"left out: {skip}" for skip in config.skip]
