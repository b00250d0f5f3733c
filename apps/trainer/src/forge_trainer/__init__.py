"""The command `forge`: composes the Forge packages into runs; see `forge_trainer.cli`."""
