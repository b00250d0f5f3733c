"""What follows trouble: back to a checkpoint from before it, without the data that caused it; or the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge_data.order.skips import SkipConfig, left_out
from forge_resilience.config import ResilienceConfig
from forge_resilience.exit_codes import ExitCode
from forge_resilience.finite import LAST_STEPS, FiniteGuard
from forge_resilience.spike import SpikeGuard
from forge_resilience.verdict import Verdict

NEAR_STEPS = 1000
"""Rollbacks for trouble within so many steps of each other count together."""


@dataclass(frozen=True)
class Trouble:
    """What went wrong, and in which steps.

    Attributes:
        first: the first step, from 0.
        end: the one behind the last.
        why: in words.
        code: how the run ends if it cannot go back.
        data: whether the data of these steps may be the cause.
    """

    first: int
    end: int
    why: str
    code: ExitCode
    data: bool = True


@dataclass(frozen=True)
class Rollback:
    """A way back that was taken; as it stands in the record of incidents.

    Attributes:
        to: steps taken up to the checkpoint.
        first: the first step of the trouble, from 0.
        end: the one behind the last.
        why: in words.
        skip: whether the data of these steps, and of the margin, are left out from then on.
        margin: steps.
    """

    to: int
    first: int
    end: int
    why: str
    skip: bool
    margin: int = 0

    def skipped(self) -> list[SkipConfig]:
        """What is left out."""
        return [left_out(self.to, self.first, self.end, self.margin)] if self.skip else []


class Ladder:
    """Judges what the guards have found. Holds the same on every rank.

    Args:
        config: of the job.
        finite: counts steps that were not finite.
        spikes: looks for losses out of range.
        taken: the rollbacks of the run so far; grows.

    Attributes:
        trouble: what it has found last.
        reported: trouble that was found elsewhere, on all ranks alike; judged with the next verdict.
    """

    def __init__(
        self, config: ResilienceConfig, finite: FiniteGuard, spikes: SpikeGuard, taken: Sequence[Rollback]
    ) -> None:
        self.trouble: Trouble | None = None
        self.reported: Trouble | None = None
        self._config, self._finite, self._spikes, self._taken = config, finite, spikes, taken

    def verdict(self, step: int, read: bool = False, last: bool = False) -> Verdict:
        """ROLLBACK or, where that has been done too often, ABORT, once there is trouble.

        Args:
            step: steps taken so far.
            read: read from the device now, as something depends on it: a checkpoint, for one.
            last: the run is complete with this step.
        """
        if self.reported is not None:
            reported, self.reported = self.reported, None
            return self.found(reported)
        limit = self._config.max_bad_steps
        if self._finite.verdict(step, read, last) is Verdict.ABORT:
            first, end = self._finite.worst_steps()
            why = (
                "too many steps in a row were not finite, or had no target (resilience.max_bad_steps = "
                f"{limit}; {LAST_STEPS} at the end of a run)"
            )
            return self.found(Trouble(first, end, why, ExitCode.NOT_FINITE))
        if self._spikes.verdict(step, read or last) is Verdict.ABORT:
            first, end = self._spikes.trouble()
            why = f"the loss was out of its range for {end - first} steps (resilience.spike_deviations)"
            return self.found(Trouble(first, end, why, ExitCode.DIVERGED))
        return Verdict.CONTINUE

    def not_finite(self, step: int) -> Verdict:
        """What follows weights that are not finite after a step that was.

        Args:
            step: steps taken so far.
        """
        why = "a weight is not finite"
        return self.found(Trouble(step - 1, step, why, ExitCode.NOT_FINITE))

    def found(self, trouble: Trouble) -> Verdict:
        """What follows."""
        self.trouble = trouble
        near = sum(abs(one.first - trouble.first) < NEAR_STEPS for one in self._taken)
        if near < self._config.max_rollbacks:
            return Verdict.ROLLBACK
        if near:
            self.trouble = replace(trouble, why=f"{trouble.why}; {near} rollbacks near here have not helped")
        return Verdict.ABORT

    def sound(self, step: int) -> int:
        """So many steps are known to be good, less the margin. Waits for the device."""
        suspect = max(self._finite.in_a_row(), self._spikes.in_a_row())
        return step - suspect - self._config.rollback_margin_steps
