"""Commands on a configuration: train, plan, launch, study, sae, convert."""

import argparse
import os
from typing import Any

from forge_resilience.exit_codes import ExitCode

from forge_trainer.cli.types import Parser, add_command, count


def add_commands(commands: Any) -> None:
    """Add train, plan, launch, study, sae and convert."""
    train = add_command(commands, "train", _train, "start a run, or continue it")
    train.add_argument(
        "--change", action="store_true", help="let the run go on with other values where that is recorded"
    )
    plan = add_command(commands, "plan", _plan, "what a run would do, without doing it")
    launch = add_command(commands, "launch", _launch, "submit a run to SLURM")
    for command in (train, plan, launch):
        command.add_argument("config", help="a TOML file; keys are overridden with --section.key=value")
        command.set_defaults(takes_keys=True)
    _add_plan(plan)
    launch.add_argument("--cluster", required=True, help="a file like those in configs/clusters")
    launch.add_argument("--nodes", type=int, help="as few as the mesh fits if absent")
    launch.add_argument(
        "--sweep",
        metavar="KEY=VALUE,...",
        action="append",
        help="one run for each value, as a job array; several make a grid",
    )
    launch.add_argument("--change", action="store_true", help="see forge train")
    launch.add_argument("--dry-run", action="store_true", help="print the batch script instead")
    launch.add_argument("--device", help="say what the job needs on it: see forge plan, and cluster.device")
    for command in (train, launch):
        command.add_argument(
            "--strict", action="store_true", help="refuse a job that does not fit into the GPUs as planned"
        )
    _add_study(commands)
    _add_sae(commands)
    _add_convert(commands)


def _add_plan(plan: Parser) -> None:
    plan.add_argument("--nodes", type=count, help="of the cluster")
    plan.add_argument("--gpus-per-node", type=count, help="that of the table of devices if absent")
    plan.add_argument("--ranks", type=count, help="in place of --nodes; as few as the mesh fits if absent")
    plan.add_argument("--device", help="h100, h200, a100, b200 or cpu; that of this machine if absent")
    plan.add_argument(
        "--device-table", metavar="FILE", help="a TOML file with further devices, if not FORGE_DEVICE_TABLE"
    )
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument("--search", action="store_true", help="plan what lies around it, for what fits")
    plan.add_argument(
        "--search-limit", type=count, default=300, metavar="SECONDS", help="of --search (default: 300)"
    )
    plan.add_argument("--strict", action="store_true", help="exit with 78 if the job does not fit")


def _add_study(commands: Any) -> None:
    study = add_command(commands, "study", _study, "many runs that answer one question")
    study.add_argument("study", help="a TOML file like those in configs/studies")
    study.add_argument("--jobs", type=count, default=1, help="runs at a time on this machine")
    study.add_argument("--cluster", help="submit the runs that are left as one SLURM array; see launch")
    study.add_argument("--nodes", type=count, help="of each run, with --cluster")
    study.add_argument("--dry-run", action="store_true", help="list the runs, or print the batch script")
    study.add_argument(
        "--coordinates", type=count, metavar="STEPS", help="do activations change alike at every width?"
    )
    study.add_argument("--analyse", action="store_true", help="fit what the complete runs say, and draw it")


def _add_sae(commands: Any) -> None:
    sae = commands.add_parser("sae", help="sparse autoencoders of activations", allow_abbrev=False)
    text = "train one, or go on"
    train = add_command(sae.add_subparsers(dest="what", required=True), "train", _sae, text)
    train.add_argument("config", help="a TOML file; keys are overridden with --section.key=value")
    train.set_defaults(takes_keys=True)


def _add_convert(commands: Any) -> None:
    convert = add_command(commands, "convert", _convert, "write a configuration of another stack in our keys")
    convert.add_argument("config", help="its TOML file; what you decide is given as --section.key=value")
    convert.set_defaults(takes_keys=True)
    convert.add_argument("--from", dest="stack", choices=("kempnerforge", "torchtitan"), required=True)
    convert.add_argument("--ranks", type=count, help="of the run, where its batch follows from them")
    convert.add_argument("--out", help="the file to write; must not exist (default: the console)")


def _train(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.config.job import load_job
    from forge_trainer.plan.at_start import plan_start
    from forge_trainer.run_dir.claim import require_free
    from forge_trainer.run_dir.files import recorded_changes

    loaded = load_job(options.config, options.overrides)
    recorded_changes(loaded.value, options.change)
    ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    if ranks == 1:
        require_free(loaded.value)  # several ranks learn it together, later

    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch keeps a record of the last collectives
    start_plan = plan_start(options, options.overrides, rank, ranks)  # planned while torch is loaded

    from forge_trainer.launch import run_job

    return run_job(loaded, rank, options.signals, options.change, start_plan)


def _plan(options: argparse.Namespace) -> int:
    from forge_trainer.plan.command import plan_job

    return plan_job(options, options.overrides)


def _launch(options: argparse.Namespace) -> int:
    from forge_trainer.slurm.submit import launch

    return launch(options, options.overrides)


def _study(options: argparse.Namespace) -> int:
    from forge_trainer.study.command import run_study

    return run_study(options)


def _sae(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.sae.command import train

    return train(options, options.overrides)


def _convert(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.migrate.command import convert_file

    return convert_file(options)
