"""Fusions: ways in which a decoder gets visual tokens."""
