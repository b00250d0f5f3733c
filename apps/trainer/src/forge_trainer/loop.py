"""The training loop. Everything that varies is a step, a hook or a guard."""

from collections.abc import Callable, Iterator, Sequence

from forge_resilience.verdict import Verdict

from forge_trainer.clock import Clock
from forge_trainer.guards.guards import Guard
from forge_trainer.hooks import Hook
from forge_trainer.progress import Progress
from forge_trainer.steps.base import Batch, Step


def train(
    step: Step,
    batches: Iterator[Batch],
    progress: Progress,
    guards: Sequence[Guard],
    hooks: Sequence[Hook],
    save_due: Callable[[int], bool],
    agree: Callable[[Verdict], Verdict],
    save: Callable[[], Verdict],
    clock: Clock,
) -> Verdict:
    """Train until step `progress.until` or until a guard on any rank stops the run. Collective.

    Args:
        step: trains on one global batch.
        batches: this rank's part of each global batch.
        progress: the counts of the run, advanced in place.
        guards: observers that judge every step.
        hooks: observers that run every `hook.every` steps and at the end.
        save_due: returns whether a checkpoint is due after a number of steps.
        agree: returns the gravest verdict over all ranks; the only place where ranks decide together.
        save: writes a checkpoint and returns CONTINUE; returns a guard's verdict if the state is bad.
        clock: counts the time of each part.

    Returns:
        The verdict that ended the training: CONTINUE or SAVE when it is complete; STOP, ROLLBACK or ABORT
        when it was cut short.
    """
    verdict = Verdict.CONTINUE
    while not progress.complete and verdict < Verdict.STOP:
        with clock.span("data"):
            batch = next(batches)
        with clock.span("step"):
            out = step.train(batch, progress.step)
        progress.advance(out)
        for guard in guards:
            if guard.span:
                with clock.span(guard.span):
                    guard.observe(progress, out)
        for hook in hooks:
            if progress.step % hook.every == 0 or progress.complete:
                with clock.span(hook.span):
                    hook.on_step(progress, out)
        with clock.span("agree"):
            due = save_due(progress.step)
            verdict = agree(max([guard.verdict(progress, due) for guard in guards], default=Verdict.CONTINUE))
        if Verdict.SAVE <= verdict < Verdict.ROLLBACK:
            with clock.span("save"):
                verdict = max(verdict, save())
    return verdict
