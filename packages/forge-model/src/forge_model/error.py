"""The error of this package."""

from forge_config.error import ForgeError


class ModelError(ForgeError):
    """A model cannot do what was asked of it."""
