"""The command line: each file holds some commands, their flags and where they lead."""

from forge_trainer.cli.main import main as main
