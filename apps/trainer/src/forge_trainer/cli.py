"""The command `forge`. Nothing heavy is imported before the configuration is known to be good."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from forge_ckpt.error import LockedError
from forge_config import ForgeError
from forge_resilience.exit_codes import ExitCode
from forge_resilience.signals import Signals

Parser = argparse.ArgumentParser


def main(arguments: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; those of this process if None.
        signals: entered, for `forge train`; without it the run makes its own.

    Returns:
        The exit code: see `forge_resilience.exit_codes`.
    """
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.takes_keys:
        parser.error(f"unknown arguments: {' '.join(overrides)}")
    options.overrides, options.signals = overrides, signals
    try:
        return options.run(options)
    except LockedError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.LOCKED
    except ForgeError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge", description="Train language models and look at what they learnt."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_commands_on_jobs(commands)
    _add_commands_on_runs(commands)
    convert = _command(commands, "convert", _convert, "write a configuration of another stack in our keys")
    convert.add_argument("config", help="its TOML file")
    convert.add_argument("--from", dest="stack", choices=("kempnerforge", "torchtitan"), required=True)
    convert.add_argument("--ranks", type=_count, help="of the run, where its batch follows from them")
    convert.add_argument("--out", help="the file to write; must not exist (default: the console)")
    _add_commands_on_several_runs(commands)
    _add_study(commands)
    _add_sae(commands)
    doctor = _command(commands, "doctor", _doctor, "whether this machine can do what training needs")
    doctor.add_argument("folder", nargs="?", default="runs", help="where runs are to be kept")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument(
        "--for",
        dest="purposes",
        type=_purposes,
        help="what to look at, with commas between: train, slurm, gpu, wandb, hf (default: train,slurm)",
    )
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> Parser:
    parser = commands.add_parser(name, help=help, allow_abbrev=False)
    parser.set_defaults(run=run, takes_keys=False)
    return parser


def _add_commands_on_jobs(commands: Any) -> None:
    train = _command(commands, "train", _train, "start a run, or continue it")
    train.add_argument(
        "--change", action="store_true", help="let the run go on with other values where that is recorded"
    )
    plan = _command(commands, "plan", _plan, "what a run would do, without doing it")
    launch = _command(commands, "launch", _launch, "submit a run to SLURM")
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
    launch.add_argument("--device", help="with --dry-run, say what the job needs on it: see forge plan")


def _add_plan(plan: Parser) -> None:
    plan.add_argument("--nodes", type=_count, help="of the cluster")
    plan.add_argument("--gpus-per-node", type=_count, help="that of the table of devices if absent")
    plan.add_argument("--ranks", type=_count, help="in place of --nodes; as few as the mesh fits if absent")
    plan.add_argument("--device", help="h100, h200, a100, b200 or cpu; that of this machine if absent")
    plan.add_argument("--device-table", metavar="FILE", help="a TOML file with further devices")
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument("--search", action="store_true", help="plan what lies around it, for what fits")
    plan.add_argument("--strict", action="store_true", help="exit with 78 if the job does not fit")


def _add_study(commands: Any) -> None:
    study = _command(commands, "study", _study, "many runs that answer one question")
    study.add_argument("study", help="a TOML file like those in configs/studies")
    study.add_argument("--jobs", type=_count, default=1, help="runs at a time on this machine")
    study.add_argument("--cluster", help="submit the runs that are left as one SLURM array; see launch")
    study.add_argument("--nodes", type=_count, help="of each run, with --cluster")
    study.add_argument("--dry-run", action="store_true", help="list the runs, or print the batch script")
    study.add_argument(
        "--coordinates", type=_count, metavar="STEPS", help="do activations change alike at every width?"
    )
    study.add_argument("--analyse", action="store_true", help="fit what the complete runs say, and draw it")


def _add_sae(commands: Any) -> None:
    sae = commands.add_parser("sae", help="sparse autoencoders of activations", allow_abbrev=False)
    train = _command(sae.add_subparsers(dest="what", required=True), "train", _sae, "train one, or go on")
    train.add_argument("config", help="a TOML file; keys are overridden with --section.key=value")
    train.set_defaults(takes_keys=True)


def _add_generate(commands: Any) -> argparse.ArgumentParser:
    generate = _command(commands, "generate", _look, "let a run, or a Hugging Face model, write on")
    given = generate.add_mutually_exclusive_group()
    given.add_argument("--prompt", action="append", help="text to go on from; may be repeated")
    given.add_argument(
        "--prompts", metavar="FILE", help="one a line, or .jsonl (prompt, images); prints JSON lines"
    )
    given.add_argument("--interactive", action="store_true", help="ask for prompts")
    where = "a file; stands where `<image>` does in the prompt, or before it; may be repeated"
    generate.add_argument("--image", action="append", help=where)
    generate.add_argument("--batch-size", type=_count, help="of --prompts; train.micro_batch if absent")
    generate.add_argument("--max-new-tokens", type=_count, default=256)
    generate.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    generate.add_argument("--top-k", type=int, default=0, help="0 is off")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument(
        "--speculative", action="store_true", help="let the modules of model.mtp propose tokens; greedy only"
    )
    generate.add_argument(
        "--compile", action="store_true", help="compile the step of a token; pays off for many tokens"
    )
    generate.add_argument("--seed", type=_seed, default=0)
    return generate


def _add_eval(commands: Any) -> argparse.ArgumentParser:
    evaluate = _command(
        commands,
        "eval",
        _look,
        "the loss of a run on its held-out text, of any model on --text, or what tasks say",
    )
    evaluate.add_argument(
        "--text", action="append", metavar="FILE", help="text to evaluate on instead; may be repeated"
    )
    evaluate.add_argument(
        "--max-tokens", type=_count, help="of a sequence of --text, of a Hugging Face model"
    )
    evaluate.add_argument("--tasks", help="tasks of lm-evaluation-harness, with commas between")
    evaluate.add_argument("--tasks-from", metavar="FOLDER", help="YAML files of tasks of your own")
    evaluate.add_argument("--num-fewshot", type=_count_or_none, help="examples before each question")
    evaluate.add_argument("--limit", type=_count, help="questions of a task at most")
    evaluate.add_argument("--batch-size", type=_count, help="train.micro_batch if absent")
    evaluate.add_argument("--json", metavar="FILE", help="write all numbers")
    return evaluate


def _add_commands_on_runs(commands: Any) -> None:
    generate, evaluate = _add_generate(commands), _add_eval(commands)
    status = _command(commands, "status", _look, "how far a run has come and what its next start will do")
    status.add_argument(
        "--exit-code", action="store_true", help="print nothing; exit as the last start of the run did"
    )
    status.add_argument(
        "--parameters", action="store_true", help="print how each parameter is trained, and the schedule"
    )
    export = _command(commands, "export", _look, "write the weights of a run as Hugging Face safetensors")
    verify = _command(commands, "verify-export", _look, "compare an export, in transformers, with the run")
    branch = _command(commands, "branch", _branch, "a new run that goes on from a checkpoint of another")
    after = _command(commands, "after", _after, "called by the batch script: run the job again if that helps")
    sample = _command(commands, "sample", _look, "the text that a step of a run read, or will read")
    sample.add_argument("--step", type=_count_or_none, required=True, help="from 0")
    sample.add_argument("--rank", type=_count_or_none, default=0, help="of ranks that read different data")
    sample.add_argument("--world-size", type=_count, default=1, help="how many such ranks there are")
    sample.add_argument("--limit", type=_count_or_none, help="sequences at most")
    or_model = ", a folder of a Hugging Face model, or hf://owner/name"
    or_root = ", or a folder of runs to list"
    for command in (generate, evaluate, status, sample, export, verify, branch, after):
        others = or_root if command is status else or_model if command in (generate, evaluate) else ""
        command.add_argument("directory", help=f"the run directory{others}")
    for command in (generate, evaluate, export, verify):
        command.add_argument(
            "--step", type=_steps, metavar="N|all|A-B", help="of the checkpoints; the newest if absent"
        )
    evaluate.add_argument(
        "--table", metavar="FILE", help="write a row a step as CSV, and a picture beside it"
    )
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="as they are kept if absent")
    branch.add_argument("out", help="the directory of the new run; keys are overridden as in train")
    branch.add_argument("--step", type=int, help="of the checkpoint; the newest if absent")
    branch.set_defaults(takes_keys=True)
    export.add_argument("out", help="the folder to write; must not exist")
    export.add_argument(
        "--shard-bytes",
        type=_bytes,
        default=5 << 30,
        help="a file holds at most this much, or one tensor (default: 5 GiB)",
    )
    verify.add_argument("out", help="the folder that forge export wrote")
    after.add_argument("--code", type=int, required=True, help="the exit code of the step")
    after.add_argument("--chained", default="", help="the job that waits for this one")
    after.add_argument("--never", action="store_true", help="do not put the job back into the queue")


def _add_commands_on_several_runs(commands: Any) -> None:
    report = _command(commands, "report", _report, "curves, events and tables of runs as one HTML page")
    report.add_argument(
        "--out", metavar="FILE", help="report.html in the folder if one is given, else in this one, if absent"
    )
    compare = _command(commands, "compare", _compare, "runs as a table, the least validation loss first")
    compare.add_argument("--csv", metavar="FILE", help="write the table for programs, too")
    compare.add_argument(
        "--by",
        metavar="KEY,...",
        help="runs that are alike in these keys are one row; all that differ but for seeds if absent",
    )
    for command in (report, compare):
        command.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a folder of runs")


def _count(text: str, least: int = 1) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"given {text}; expected at least {least}")
    return int(text)


def _count_or_none(text: str) -> int:
    return _count(text, least=0)


def _purposes(text: str) -> list[str]:
    """What a doctor is asked about."""
    known = ("train", "slurm", "gpu", "wandb", "hf")
    if unknown := [one for one in text.split(",") if one not in known]:
        raise argparse.ArgumentTypeError(f"given {', '.join(unknown)}; expected some of {', '.join(known)}")
    return text.split(",")


def _steps(text: str) -> str:
    if text != "all" and not all(part.isdigit() for part in text.split("-", 1)):
        raise argparse.ArgumentTypeError(f"given {text!r}; expected a step, all, or a range such as 100-500")
    return text


def _seed(text: str) -> int:
    """A seed that random generators take."""
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"given {text}; expected 0 to 2^63 - 1")
    return int(text)


def _bytes(text: str) -> int:
    """How much a file may hold."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}; expected a number of bytes above 0")
    return int(text)


def _train(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.config.job import load_job
    from forge_trainer.run_dir.claim import require_free
    from forge_trainer.run_dir.files import recorded_changes

    loaded = load_job(options.config, options.overrides)
    recorded_changes(loaded.value, options.change)
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) == 1:
        require_free(loaded.value)  # several ranks learn it together, later

    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch keeps a record of the last collectives

    # torch is loaded here and not before
    from forge_trainer.launch import run_job

    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    return run_job(loaded, rank, options.signals, options.change)


def _plan(options: argparse.Namespace) -> int:
    from forge_trainer.plan.command import plan_job

    return plan_job(options, options.overrides)


def _study(options: argparse.Namespace) -> int:
    from forge_trainer.study.command import run_study

    return run_study(options)


def _sae(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.sae.command import train

    return train(options, options.overrides)


def _branch(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.commands.branch import branch_run

    branch_run(options, options.overrides)
    return ExitCode.DONE


def _convert(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.migrate.command import convert_file

    return convert_file(options)


def _launch(options: argparse.Namespace) -> int:
    from forge_trainer.slurm.submit import launch

    return launch(options, options.overrides)


def _after(options: argparse.Namespace) -> int:
    from forge_trainer.slurm.after import after_job

    return after_job(options)


def _report(options: argparse.Namespace) -> int:
    from forge_trainer.report.page import write_report

    return write_report(options)


def _compare(options: argparse.Namespace) -> int:
    from forge_trainer.report.compare import compare_runs

    return compare_runs(options)


def _doctor(options: argparse.Namespace) -> int:
    from forge_trainer.doctor.show import examine

    return examine(options)


def _look(options: argparse.Namespace) -> int:
    from forge_trainer.config.hub import NAME, TOKENIZER, WEIGHTS, fetched
    from forge_trainer.run_dir.files import started_in

    if options.command in ("generate", "eval") and NAME.fullmatch(options.directory):
        options.directory = fetched(options.directory, (*WEIGHTS, *TOKENIZER))
    folder = started_in(Path(options.directory))
    if folder.samefile("."):
        return _look_here(options)
    for name in {"directory", "out", "tasks_from", "json", "prompts", "table"} & vars(options).keys():
        if getattr(options, name) is not None:
            setattr(options, name, os.path.abspath(getattr(options, name)))
    for name in {"image", "text"} & vars(options).keys():
        setattr(options, name, [os.path.abspath(one) for one in getattr(options, name) or ()])
    sys.path.append(os.getcwd())  # parts of one's own are found from here as well
    with chdir(folder):
        return _look_here(options)


def _look_here(options: argparse.Namespace) -> int:
    from forge_trainer.report.status import show_status

    if options.command == "status":
        return show_status(options)
    if options.command == "sample":
        from forge_trainer.commands.sample import show_sample

        return show_sample(options)
    from forge_trainer.commands.evaluate import evaluate_run, export_run
    from forge_trainer.commands.generate import generate_text
    from forge_trainer.commands.verify_export import verify_export

    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "generate": generate_text,
        "eval": evaluate_run,
        "export": export_run,
        "verify-export": verify_export,
    }
    commands[options.command](options)
    return ExitCode.DONE
