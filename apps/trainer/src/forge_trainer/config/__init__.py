"""The sections of a run's TOML file. Imports no torch."""
