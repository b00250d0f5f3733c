"""Where the tensors of a run come from, and where they are kept."""
