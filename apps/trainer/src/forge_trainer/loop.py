"""The training loop. Everything that varies is a step, a hook or a guard."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from forge_resilience.verdict import Verdict

from forge_trainer.guards import Guard
from forge_trainer.hooks import Hook
from forge_trainer.progress import Progress
from forge_trainer.step import Batch, Step, StepOutput


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
    save: Callable[[Progress], None],
) -> Verdict:
    """Train until step `until` or until a guard on any rank stops the run. Collective.

    Args:
        step: one optimizer step on a batch.
        batches: this rank's part of each global batch.
        progress: advanced in place.
        until: the step to end at.
        hooks: observe every `hook.every` steps and at the end.
        guards: judge every step.
        agree: the gravest verdict over all ranks, the only place where ranks decide together.
        save: writes a checkpoint.

    Returns:
        The verdict that ended the run: CONTINUE or SAVE when it is complete, STOP or ABORT when it was cut
        short.
    """
    verdict = Verdict.CONTINUE
    while progress.step < until and verdict < Verdict.STOP:
        out = step(next(batches))
        progress.advance(out)
        for hook in hooks:
            if progress.step % hook.every == 0 or progress.step == until:
                hook.on_step(progress, out)
        verdict = agree(worst(guards, progress, out))
        if Verdict.SAVE <= verdict < Verdict.ABORT:
            save(progress)
    return verdict
