"""Which sequences a source has."""
