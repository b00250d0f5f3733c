"""Checks that this start is still the only writer of the run."""

from __future__ import annotations

from forge_resilience.verdict import Verdict

from forge_trainer.guards.guards import Guard
from forge_trainer.progress import Progress
from forge_trainer.run_dir.claim import Claim


class LeaseGuard(Guard):
    """A guard for the first rank: ABORT when another process took the run over.

    Args:
        claim: the right of this start to write to the run directory.
    """

    span = ""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        return Verdict.CONTINUE if self._claim.is_held() else Verdict.ABORT
