"""The error of this package."""

from forge_config.error import ForgeError


class ModelError(ForgeError):
    """A user error about a model."""
