"""The errors of this package."""

from pathlib import Path

from forge_config.error import ForgeError


class CheckpointError(ForgeError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written: a digest differs, or a file is missing or too short.

    Args:
        path: the file.
        what: its damage.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.path = path


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read now; whether it is damaged is not known."""


class UnsupportedError(CheckpointError):
    """An intact checkpoint that this version cannot read."""


class LockedError(CheckpointError):
    """Another process writes to this run; the message names it, its host, and since when."""
