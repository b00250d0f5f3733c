"""The command in a process forked from an interpreter that has imported it, which saves seconds a call."""

import os
import sys
from importlib import import_module

from forge_trainer.__main__ import main

for name in (
    "torch._dynamo",
    "datasets",
    "transformers",
    "forge_trainer.launch",
    "forge_trainer.commands.evaluate",
    "forge_trainer.commands.generate",
    "forge_trainer.commands.verify_export",
    "forge_trainer.report.plan",
    "forge_vlm.fusion",
):
    import_module(name)  # what most commands import, once for all of them


def command(arguments: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    """Run `forge` with these arguments in a folder; what it prints goes to files. Does not return."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["forge", *arguments]
    try:
        code: object = main()
    except SystemExit as error:
        code = error.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
