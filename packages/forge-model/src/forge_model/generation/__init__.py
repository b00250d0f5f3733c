"""How a model writes on."""
