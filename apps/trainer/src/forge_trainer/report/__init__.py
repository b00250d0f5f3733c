"""What a person is told of a run."""
