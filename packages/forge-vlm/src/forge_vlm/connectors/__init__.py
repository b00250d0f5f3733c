"""Connectors: features of a tower to visual tokens of a decoder."""
