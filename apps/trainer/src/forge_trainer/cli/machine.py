"""Commands on this machine: doctor."""

import argparse
from typing import Any

from forge_trainer.cli.types import add_command


def add_commands(commands: Any) -> None:
    """Add doctor."""
    doctor = add_command(commands, "doctor", _doctor, "whether this machine can do what training needs")
    doctor.add_argument("folder", nargs="?", default="runs", help="where runs are to be kept")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument(
        "--for",
        dest="purposes",
        type=_purposes,
        help="what to look at, with commas between: train, slurm, gpu, wandb, hf (default: train,slurm)",
    )


def _purposes(text: str) -> list[str]:
    from forge_trainer.doctor.show import CHECKS

    if unknown := [one for one in text.split(",") if one not in CHECKS]:
        raise argparse.ArgumentTypeError(f"given {', '.join(unknown)}; expected some of {', '.join(CHECKS)}")
    return text.split(",")


def _doctor(options: argparse.Namespace) -> int:
    from forge_trainer.doctor.show import examine

    return examine(options)
