"""The command line: each file defines some commands, their flags and the functions they call."""

from forge_trainer.cli.main import main as main
