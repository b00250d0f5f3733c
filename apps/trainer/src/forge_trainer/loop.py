"""The training loop. Everything that varies is a step, a hook or a guard."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from forge_resilience.verdict import Verdict

from forge_trainer.clock import Clock
from forge_trainer.guards import Guard
from forge_trainer.hooks import Hook
from forge_trainer.progress import Progress
from forge_trainer.steps.base import Batch, Step, StepOutput


def worst(guards: Iterable[Guard], progress: Progress, out: StepOutput) -> Verdict:
    """The gravest verdict of all guards on this rank."""
    return max((guard(progress, out) for guard in guards), default=Verdict.CONTINUE)


def train(
    step: Step,
    batches: Iterator[Batch],
    progress: Progress,
    until: int,
    hooks: Sequence[Hook],
    guards: Sequence[Guard],
    agree: Callable[[Verdict], Verdict],
    save: Callable[[Progress], Verdict],
    clock: Clock,
) -> Verdict:
    """Train until step `until` or until a guard on any rank stops the run. Collective.

    Args:
        step: trains on one global batch.
        batches: this rank's part of each global batch.
        progress: advanced in place.
        until: the step to end at.
        hooks: observe every `hook.every` steps and at the end.
        guards: judge every step.
        agree: the gravest verdict over all ranks, the only place where ranks decide together.
        save: writes a checkpoint, and returns CONTINUE; or what follows if the state is not worth keeping.
        clock: counts the time of each part.

    Returns:
        The verdict that ended the training: CONTINUE or SAVE when it is complete; STOP, ROLLBACK or ABORT
        when it was cut short.
    """
    verdict = Verdict.CONTINUE
    while progress.step < until and verdict < Verdict.STOP:
        with clock.span("data"):
            batch = next(batches)
        with clock.span("step"):
            out = step.train(batch, progress.step)
        progress.advance(out)
        for hook in hooks:
            if progress.step % hook.every == 0 or progress.step == until:
                with clock.span(hook.span):
                    hook.on_step(progress, out)
        with clock.span("agree"):
            verdict = agree(worst(guards, progress, out))
        if Verdict.SAVE <= verdict < Verdict.ROLLBACK:
            with clock.span("save"):
                verdict = max(verdict, save(progress))
    return verdict
