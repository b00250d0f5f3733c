"""Whether this start still has the run to itself."""

from __future__ import annotations

from forge_resilience.verdict import Verdict

from forge_trainer.guards.guards import Guard
from forge_trainer.progress import Progress
from forge_trainer.run_dir.claim import Claim


class LeaseGuard(Guard):
    """A guard for the first rank: ABORT when another process took the run over.

    Args:
        claim: this start's hold of the run.
    """

    span = ""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def verdict(self, progress: Progress, save_due: bool) -> Verdict:
        """See `Guard.verdict`."""
        return Verdict.CONTINUE if self._claim.is_held() else Verdict.ABORT
