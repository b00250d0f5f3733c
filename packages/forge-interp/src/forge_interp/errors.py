"""Which error does this package raise?"""


class InterpError(ValueError):
    """A request that cannot be met: the text says what was given, what was expected, what to do."""
