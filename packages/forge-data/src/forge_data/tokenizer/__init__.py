"""How text becomes tokens."""
