"""The errors of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written."""


class LockedError(CheckpointError):
    """Another process writes to this run; names it, its host, and since when."""
