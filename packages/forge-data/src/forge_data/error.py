"""The errors of this package."""

from forge_config.error import ForgeError


class DataError(ForgeError):
    """Data are missing, damaged, or not what was asked for."""


class NothingHeldOutError(DataError):
    """A source has so few documents that `held_out` chooses none of them for validation."""
