"""Computes how many tokens of each source a run reads, from the weights of sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forge_trainer.config.job import Job
from forge_trainer.report.announce import scaled


def source_lines(job: Job) -> Iterator[str]:
    """Yield one line for each source."""
    found = tokens_by_source(job)
    total = sum(found.values())
    for name, tokens in found.items():
        yield f"  source     {name}: {scaled(tokens)}tokens, {100 * tokens / total:.1f} %{_epochs(job, name)}"


def tokens_by_source(job: Job) -> dict[str, float]:
    """Return the tokens of each source by the weights of each phase; the data are not read."""
    data, steps = job.data, job.train.steps
    first = {name: one.weight for name, one in zip(data.source_names(), data.sources, strict=True)}
    starts = [(0, first)]
    starts += [(phase.first_step(steps, job.step_tokens), phase.weights) for phase in data.phases]
    samples = job.batch_sizes.samples
    ends = [*(min(start, steps) for start, _ in starts[1:]), steps]
    found = dict.fromkeys(first, 0.0)
    for (start, weights), end in zip(starts, ends, strict=True):
        tokens = (samples(max(start, end)) - samples(start)) * data.max_tokens
        for name, share in _shares(weights).items():
            found[name] += tokens * share
    return found


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _epochs(job: Job, name: str) -> str:
    source = job.data.sources[job.data.source_names().index(name)]
    return "" if source.max_epochs is None else f", at most {source.max_epochs:g} epochs"
