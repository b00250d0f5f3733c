"""Formats large numbers in few letters. Imports no torch."""

SCALES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def scaled(number: float) -> str:
    """Format a number with three digits and a unit prefix, such as `1.05 M`."""
    for scale, prefix in SCALES:
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:.3g} "
