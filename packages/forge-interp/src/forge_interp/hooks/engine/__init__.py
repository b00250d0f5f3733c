"""How taps reach the modules of a model, and how values are copied and put together."""
