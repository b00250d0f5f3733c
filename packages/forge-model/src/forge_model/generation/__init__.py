"""Generation of text by a model."""
