"""The errors of this package."""

from forge_config.error import ForgeError


class DataError(ForgeError):
    """A user error about data: missing, damaged, or not what was requested."""


class NothingHeldOutError(DataError):
    """A source has so few documents that `held_out` chooses none of them for validation."""
