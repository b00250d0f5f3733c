"""The error of this package."""

from forge_config.error import ForgeError


class DataError(ForgeError):
    """Data are missing, damaged, or not what was asked for."""
