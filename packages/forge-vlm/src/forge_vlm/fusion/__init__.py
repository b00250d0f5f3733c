"""How a decoder is given visual tokens."""
