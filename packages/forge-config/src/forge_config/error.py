"""What every error is that a user of Forge can mend."""


class ForgeError(ValueError):
    """A user error. Each package has its own subclass; the message says what to do.

    A command prints the message and ends; any other error is a fault of ours and ends with its traceback.
    """
