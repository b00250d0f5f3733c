"""Which activations make a difference."""
