"""The error of this package."""


class ModelError(ValueError):
    """A model cannot do what was asked of it."""
