"""Commands on the folder of a run: status, generate, eval, export, verify-export, sample, branch, after."""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

from forge_resilience.exit_codes import ExitCode

from forge_trainer.cli.types import Parser, add_command, count, count_or_none, seed, steps

OR_MODEL = ", a folder of a Hugging Face model, or hf://owner/name"


def add_commands(commands: Any) -> None:
    """Add the commands that read or write one run."""
    for add in (
        _add_status,
        _add_sample,
        _add_generate,
        _add_eval,
        _add_extract,
        _add_dynamics,
        _add_exports,
        _add_branch,
        _add_after,
    ):
        add(commands)


def _on_run(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, or_: str = ""
) -> Parser:
    """Add a command whose first argument is the folder of a run, or the alternative in `or_`."""
    command = add_command(commands, name, run, help)
    command.add_argument("directory", help=f"the run directory{or_}")
    return command


def _take_steps(command: Parser) -> None:
    help = "of the checkpoints; the newest if absent"
    command.add_argument("--step", type=steps, metavar="N|all|A-B", help=help)


def _add_status(commands: Any) -> None:
    text = "how far a run has come and what its next start will do"
    status = _on_run(commands, "status", _look, text, ", or a folder of runs to list")
    status.add_argument(
        "--exit-code", action="store_true", help="print nothing; exit as the last start of the run did"
    )
    status.add_argument(
        "--parameters", action="store_true", help="print how each parameter is trained, and the schedule"
    )


def _add_sample(commands: Any) -> None:
    sample = _on_run(commands, "sample", _look, "the text that a step of a run read, or will read")
    sample.add_argument("--step", type=count_or_none, required=True, help="from 0")
    sample.add_argument("--rank", type=count_or_none, default=0, help="of ranks that read different data")
    sample.add_argument("--world-size", type=count, default=1, help="how many such ranks there are")
    sample.add_argument("--limit", type=count_or_none, help="sequences at most")


def _add_exports(commands: Any) -> None:
    export = _on_run(commands, "export", _look, "write the weights of a run as Hugging Face safetensors")
    export.add_argument("out", help="the folder to write; must not exist")
    _take_steps(export)
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="as they are kept if absent")
    export.add_argument(
        "--shard-bytes",
        type=count,
        default=5 << 30,
        help="a file holds at most this much, or one tensor (default: 5 GiB)",
    )
    verify = _on_run(commands, "verify-export", _look, "compare an export, in transformers, with the run")
    verify.add_argument("out", help="the folder that forge export wrote")
    _take_steps(verify)


def _add_extract(commands: Any) -> None:
    text = "what flows through places of a model, as stores that forge-interp reads"
    extract = _on_run(commands, "extract", _look, text, OR_MODEL)
    extract.add_argument("out", help="the folder to write; the same command goes on with it")
    _take_steps(extract)
    extract.add_argument(
        "--sites", nargs="+", required=True, help="such as layers.*:out or layers.*.attention:attn.pattern"
    )
    extract.add_argument("--samples", type=count, default=64, help="sequences (default: 64)")
    extract.add_argument(
        "--text", action="append", metavar="FILE", help="in place of the held-out text; may be repeated"
    )
    extract.add_argument("--max-tokens", type=count, help="of a sequence of --text, of a Hugging Face model")
    extract.add_argument("--batch-size", type=count, help="train.micro_batch if absent")
    extract.add_argument("--pool", choices=("mean", "last", "first", "max"), help="one row a sequence")
    extract.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of the rows")
    extract.add_argument("--keep", nargs="+", help="inputs to keep beside the rows, such as doc_ids")


def _add_dynamics(commands: Any) -> None:
    text = "what becomes of layers and heads over the checkpoints of a run: tables and pictures"
    dynamics = _on_run(commands, "dynamics", _look, text)
    dynamics.add_argument("out", help="the folder to write; the same command goes on with it")
    help = "of the checkpoints; all if absent"
    dynamics.add_argument("--step", type=steps, metavar="all|A-B", default="all", help=help)
    dynamics.add_argument("--sites", nargs="+", default=["layers.*:out"], help="default: layers.*:out")
    dynamics.add_argument("--samples", type=count, default=64, help="sequences (default: 64)")
    dynamics.add_argument(
        "--text", action="append", metavar="FILE", help="in place of the held-out text; may be repeated"
    )
    help = "after how many random tokens they repeat, for induction heads (default: 32, or less)"
    dynamics.add_argument("--period", type=count, help=help)


def _add_branch(commands: Any) -> None:
    branch = _on_run(commands, "branch", _branch, "a new run that goes on from a checkpoint of another")
    branch.add_argument("out", help="the directory of the new run; keys are overridden as in train")
    branch.add_argument("--step", type=int, help="of the checkpoint; the newest if absent")
    branch.set_defaults(takes_keys=True)


def _add_after(commands: Any) -> None:
    text = "called by the batch script: run the job again if that helps"
    after = _on_run(commands, "after", _after, text)
    after.add_argument("--code", type=int, required=True, help="the exit code of the step")
    after.add_argument("--chained", default="", help="the job that waits for this one")
    after.add_argument("--never", action="store_true", help="do not put the job back into the queue")


def _add_generate(commands: Any) -> None:
    text = "let a run, or a Hugging Face model, write on"
    generate = _on_run(commands, "generate", _look, text, OR_MODEL)
    _take_steps(generate)
    given = generate.add_mutually_exclusive_group()
    given.add_argument("--prompt", action="append", help="text to go on from; may be repeated")
    given.add_argument(
        "--prompts", metavar="FILE", help="one a line, or .jsonl (prompt, images); prints JSON lines"
    )
    given.add_argument("--interactive", action="store_true", help="ask for prompts")
    where = "a file; stands where `<image>` does in the prompt, or before it; may be repeated"
    generate.add_argument("--image", action="append", help=where)
    generate.add_argument("--batch-size", type=count, help="of --prompts; train.micro_batch if absent")
    generate.add_argument("--max-new-tokens", type=count, default=256)
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
    generate.add_argument("--seed", type=seed, default=0)


def _add_eval(commands: Any) -> None:
    text = "the loss of a run on its held-out text, of any model on --text, or what tasks say"
    evaluate = _on_run(commands, "eval", _look, text, OR_MODEL)
    _take_steps(evaluate)
    evaluate.add_argument(
        "--table", metavar="FILE", help="write a row a step as CSV, and a picture beside it"
    )
    evaluate.add_argument(
        "--text", action="append", metavar="FILE", help="text to evaluate on instead; may be repeated"
    )
    evaluate.add_argument("--max-tokens", type=count, help="of a sequence of --text, of a Hugging Face model")
    evaluate.add_argument("--tasks", help="tasks of lm-evaluation-harness, with commas between")
    evaluate.add_argument("--tasks-from", metavar="FOLDER", help="YAML files of tasks of your own")
    evaluate.add_argument("--num-fewshot", type=count_or_none, help="examples before each question")
    evaluate.add_argument("--limit", type=count, help="questions of a task at most")
    evaluate.add_argument("--batch-size", type=count, help="train.micro_batch if absent")
    evaluate.add_argument("--json", metavar="FILE", help="write all numbers")
    evaluate.epilog = (
        "Started as several ranks, it takes keys of their layout in place of the run's: "
        "--mesh.tp=2 --tensor_parallel.sequence=false"
    )
    evaluate.set_defaults(takes_keys=True)


def _branch(options: argparse.Namespace) -> ExitCode:
    from forge_trainer.commands.branch import branch_run

    branch_run(options, options.overrides)
    return ExitCode.DONE


def _after(options: argparse.Namespace) -> int:
    from forge_trainer.slurm.after import after_job

    return after_job(options)


def _look(options: argparse.Namespace) -> int:
    from forge_trainer.config.hub import NAME, TOKENIZER, WEIGHTS, fetched
    from forge_trainer.run_dir.files import started_in

    if options.command in ("generate", "eval", "extract") and NAME.fullmatch(options.directory):
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
    from forge_trainer.commands.dynamics import follow_run
    from forge_trainer.commands.evaluate import evaluate_run
    from forge_trainer.commands.export import export_run
    from forge_trainer.commands.extract import extract_run
    from forge_trainer.commands.generate import generate_text
    from forge_trainer.commands.verify_export import verify_export

    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "dynamics": follow_run,
        "generate": generate_text,
        "eval": evaluate_run,
        "export": export_run,
        "extract": extract_run,
        "verify-export": verify_export,
    }
    from forge_config import ConfigError
    from forge_parallel.env import Env

    if options.command != "eval" and (ranks := Env.detect().world_size) > 1:
        raise ConfigError(
            f"forge {options.command} runs in one process, and {ranks} were started, which would all write "
            "the same; start it without torchrun"
        )
    commands[options.command](options)
    return ExitCode.DONE
