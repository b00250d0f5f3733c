"""The error of this package."""


class DataError(ValueError):
    """Data are missing, damaged, or not what was asked for."""
