"""What every error is that a user of Forge can mend."""


class ForgeError(ValueError):
    """What was given cannot be used. Each package has its own kind; the message says what to do.

    A command prints the message and ends; any other error is a fault of ours and ends with its traceback.
    """
