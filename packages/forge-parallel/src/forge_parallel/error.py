"""The error of this package."""

from forge_config.error import ForgeError


class ParallelError(ForgeError):
    """A model cannot be spread over these ranks as asked."""
