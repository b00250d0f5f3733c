"""What follows trouble, where several guards find some in one step."""

from forge_ckpt.store import Store
from forge_resilience.config import ResilienceConfig
from forge_resilience.exit_codes import ExitCode
from forge_resilience.verdict import Verdict
from forge_trainer.recovery.incidents import Trouble
from forge_trainer.recovery.recovery import Recovery

COPIES = Trouble(3, 7, "copies differ", ExitCode.DIVERGED, data=False)
NOT_FINITE = Trouble(6, 7, "not finite", ExitCode.NOT_FINITE)


def test_trouble_of_the_guard_that_is_asked_first_is_what_follows(tmp_path):
    """Copies that differ come before the NaN that a flipped bit has made: its data are innocent."""
    recovery = Recovery(ResilienceConfig(max_rollbacks=1), tmp_path, Store(tmp_path / "c"), None)
    assert recovery.judge(COPIES) is recovery.judge(NOT_FINITE) is Verdict.ROLLBACK
    assert recovery.trouble == COPIES
    assert recovery.begin() is None  # there is no checkpoint
    assert recovery.trouble.code is ExitCode.DIVERGED and "no checkpoint" in recovery.trouble.why


def test_trouble_near_a_rollback_ends_the_run_where_no_more_are_allowed(tmp_path):
    recovery = Recovery(ResilienceConfig(max_rollbacks=0), tmp_path, Store(tmp_path / "c"), None)
    assert recovery.judge(NOT_FINITE) is Verdict.ABORT
    assert recovery.trouble == NOT_FINITE
