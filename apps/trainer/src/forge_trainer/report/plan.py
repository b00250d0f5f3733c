"""Lists how each parameter trains: its rule and learning rates. Builds the model without values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from forge_config.registry import type_name

from forge_trainer.config.job import Job
from forge_trainer.optim import trainable
from forge_trainer.optim.groups import Stages, freeze, listed
from forge_trainer.report.announce import scaled, unused_lines
from forge_trainer.schedule.draw import draw


def plan_lines(job: Job, unused: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of `forge plan` and `forge status --parameters`; each parameter is in exactly one line.

    Args:
        job: the configuration.
        unused: see `Loaded.unused`.

    Raises:
        ConfigError: the rules of the groups do not fit the model.
    """
    with torch.device("meta"):
        model = job.model.build()
    freeze(model, job.optimizer_by_steps.groups, job.data.sources)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    yield f"{job.job.name}: {len(shapes)} parameters, {scaled(_size(shapes.values()))}elements"
    yield from unused_lines(unused)
    parameters = trainable([model])
    for entry in job.optimizer_by_steps.param_groups(parameters):
        names = [name for name, _ in entry["params"]]
        yield (
            f"  {entry['kind']}  lr {entry['lr']:.3g}  decay {entry['weight_decay']:.3g}"
            f"{_frozen(entry['frozen'])}{_stages(entry.get('curves', ()))}  "
            f"{len(names)} of {scaled(_size(shapes[n] for n in names))}elements"
        )
        yield from (f"    {line}" for line in listed(names))
    never = shapes.keys() - {p.name for p in parameters}
    if never:
        yield f"  never trained  {len(never)} of {scaled(_size(shapes[n] for n in never))}elements"
        yield from (f"    {line}" for line in listed(n for n in shapes if n in never))

    schedule, steps = job.schedule, job.train.steps
    yield f"  {type_name(type(schedule))} schedule, times the learning rates above, by step"
    yield from draw(partial(schedule.factor, steps=steps, step_tokens=job.step_tokens), steps)


def _size(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes)


def _stages(curves: Iterable[Iterable[tuple[int, float, int]]]) -> str:
    texts = [
        f"x {lr:g} from step {start} on" + (f" after {warmup} steps of warm-up" if warmup else "")
        for curve in curves
        for start, lr, warmup in curve
    ]
    return f"  {', '.join(texts)}" if texts else ""


def _frozen(stages: Stages) -> str:
    texts = [f"from step {a} on" if b is None else f"in steps {a} to {b - 1}" for a, b in stages]
    return f"  frozen {', '.join(texts)}" if texts else ""
