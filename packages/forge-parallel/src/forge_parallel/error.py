"""The error of this package."""


class ParallelError(ValueError):
    """A model cannot be spread over these ranks as asked."""
