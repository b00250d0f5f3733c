"""The exit codes of a run, for schedulers."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `forge`; only a finished run is 0."""

    DONE = 0
    """The run is complete."""
    FAILED = 1
    """An error; the traceback says which."""
    LOCKED = 75
    """Another process writes to this run; nothing was touched. Try again later (`EX_TEMPFAIL`)."""
    CONFIG = 78
    """The configuration cannot be used; a human must change it (`EX_CONFIG` of sysexits.h)."""
    PREEMPTED = 85
    """Stopped before its end, with a checkpoint or before its first step; start it again and it continues."""
    HUNG = 86
    """A phase took far too long on some rank; the folder `hang` of the run says which. Start it again."""
    NOT_FINITE = 87
    """Too many steps in a row, or the last ones, had a non-finite loss or gradient; as a new start would."""
    DIVERGED = 88
    """The loss left its range, or copies of the weights differed, and rollbacks did not help."""
    CRASH_LOOP = 89
    """Several starts of a job in a row failed without a new checkpoint; it does not run again by itself."""
