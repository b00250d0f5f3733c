"""The command `forge`. Nothing heavy is imported before the configuration is known to be good."""

import argparse
import os
import sys
from collections.abc import Sequence

from forge_config import ConfigError
from forge_resilience.exit_codes import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: see `forge_resilience.exit_codes`.
    """
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.command != "train":
        parser.error(f"unknown arguments: {' '.join(overrides)}")
    try:
        return options.run(options, overrides)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge", description="Train language models and look at what they learnt."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="start a run, or continue it", allow_abbrev=False)
    train.add_argument("config", help="a TOML file; keys are overridden with --section.key=value")
    train.set_defaults(run=_train)

    generate = commands.add_parser("generate", help="let a run write on")
    generate.add_argument("directory", help="the run directory")
    generate.add_argument(
        "--prompt", action="append", default=None, help="text to go on from; may be repeated"
    )
    generate.add_argument("--max-new-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    generate.add_argument("--top-k", type=int, default=0, help="0 is off")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.set_defaults(run=_generate)

    evaluate = commands.add_parser("eval", help="the loss of a run on its held-out text")
    evaluate.add_argument("directory", help="the run directory")
    evaluate.set_defaults(run=_evaluate)

    status = commands.add_parser("status", help="how far a run has come and what its next start will do")
    status.add_argument("directory", help="the run directory")
    status.set_defaults(run=_status)

    export = commands.add_parser("export", help="write the weights of a run as Hugging Face safetensors")
    export.add_argument("directory", help="the run directory")
    export.add_argument("out", help="the folder to write; must not exist")
    export.set_defaults(run=_export)
    return parser


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from forge_trainer.job import load_job
    from forge_trainer.run_dir import require_same_job

    job = load_job(options.config, overrides).value
    require_same_job(job)

    # torch is loaded here and not before
    from forge_trainer.launch import run_job

    return run_job(job, int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))))


def _generate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from forge_trainer.inspect_run import generate_text

    return generate_text(options)


def _evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from forge_trainer.inspect_run import evaluate_run

    return evaluate_run(options)


def _status(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from forge_trainer.status import show_status

    return show_status(options)


def _export(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from forge_trainer.inspect_run import export_run

    return export_run(options)
