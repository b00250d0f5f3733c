"""Values that flow through a model, captured and edited while it runs."""
