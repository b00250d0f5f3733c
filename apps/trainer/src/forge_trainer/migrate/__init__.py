"""Converts configurations of other training stacks to the keys of Forge."""
