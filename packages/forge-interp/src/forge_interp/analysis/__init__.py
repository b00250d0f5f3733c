"""How representations compare and what can be read out of them."""
