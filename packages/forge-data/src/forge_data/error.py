"""The errors of this package."""


class DataError(ValueError):
    """Data are missing, damaged, or not what was asked for."""


class NothingHeldOutError(DataError):
    """A source has so few documents that `held_out` chooses none of them for validation."""
