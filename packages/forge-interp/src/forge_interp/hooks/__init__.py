"""What flows through a model, seen and changed while it runs."""
