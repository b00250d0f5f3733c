"""The base class of all user errors."""


class ForgeError(ValueError):
    """A user error. Each package has its own subclass; the message says what to do.

    A command prints the message and ends; any other error is a fault of ours and ends with its traceback.
    """
