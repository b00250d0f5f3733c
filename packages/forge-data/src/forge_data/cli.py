"""The command `forge-data`: tokenize, import, inspect, validate, plan and sample."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forge_config import Config, ConfigError, load
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.sample import marked, sample_lines, with_rollbacks
from forge_data.order.batch_sizes import BatchSizes
from forge_data.order.mixing import Run, build_order, plan_lines
from forge_data.packing.build import held_out_digests, train_packings
from forge_data.sources.columns import TextColumn as Text
from forge_data.sources.files import find_files
from forge_data.store.formats import RAW_DTYPES, import_tokens
from forge_data.store.tokenize import cores, say_progress, tokenize_files
from forge_data.store.tokens import TokenStore
from forge_data.store.validate import problems
from forge_data.tokenizer.hf import HfTokenizerConfig
from forge_data.tokenizer.tokenizer import BytesConfig, TokenizerConfig, is_named

READER_LEFT = 128 + 13
"""Exit code where nobody reads the output any more, as of a command that SIGPIPE ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.command not in ("plan", "sample"):
        parser.error(f"unknown arguments: {' '.join(overrides)}")
    run = {
        "tokenize": _tokenize,
        "import": _import,
        "inspect": _inspect,
        "validate": _validate,
        "sample": partial(_sample, overrides=overrides),
        "plan": partial(_plan, overrides=overrides),
    }
    try:
        code = run[options.command](options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `forge-data sample RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except (DataError, ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge-data", description="Make token stores and look into them.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_making(commands)
    _add_looking(commands)
    return parser


def _add_making(commands: Any) -> None:
    make = commands.add_parser("tokenize", help="text, .py, .jsonl, .parquet -> a token store")
    make.add_argument("paths", nargs="+", help="files, folders or patterns")
    make.add_argument("--out", type=Path, required=True, help="folder of the store; must not exist")
    make.add_argument("--tokenizer", default="bytes", help="'bytes', or the path of a tokenizer.json")
    make.add_argument("--eos", default="</s>", help="token of tokenizer.json that ends a document")
    make.add_argument("--field", default="text", help="key of the text in rows")
    make.add_argument("--workers", type=_count, default=cores(), help="processes")
    bring = commands.add_parser("import", help="token files of other projects -> a token store")
    bring.add_argument(
        "paths",
        nargs="+",
        type=Path,
        help="Megatron .bin, nanoset .ds, .npy, raw; litData, MDS, tatm folders",
    )
    bring.add_argument("--out", type=Path, required=True, help="folder of the store; must not exist")
    bring.add_argument(
        "--tokenizer", default="bytes", help="that of the tokens: 'bytes', or a tokenizer.json"
    )
    bring.add_argument("--eos", default="</s>", help="token of tokenizer.json that ends a document")
    bring.add_argument("--dtype", choices=RAW_DTYPES, help="of raw files, which do not say it themselves")


def _add_looking(commands: Any) -> None:
    look = commands.add_parser("inspect", help="what a store holds, and whether it is intact")
    look.add_argument("folder", type=Path)
    look.add_argument("--docs", type=_count, default=2, help="documents to show")
    look.add_argument("--tokenizer", default="bytes")
    look.add_argument("--eos", default="</s>")
    check = commands.add_parser("validate", help="whether stores are what they say; exit code 1 if not")
    check.add_argument("folders", nargs="+", type=Path)
    check.add_argument("--tokenizer", help="that they should have: 'bytes', or a tokenizer.json")
    check.add_argument("--eos", default="</s>")
    seen = commands.add_parser("sample", help="the text that a step of a run reads")
    seen.add_argument("run", help="a run directory or a TOML file; keys are overridden as in plan")
    seen.add_argument("--step", type=_count, required=True, help="from 0")
    seen.add_argument("--rank", type=_count, default=0, help="of the ranks that read different data")
    seen.add_argument("--world-size", type=int, default=1, help="how many such ranks there are")
    seen.add_argument("--limit", type=_count, help="sequences at most")
    ahead = commands.add_parser("plan", help="what a run will read, by phase and source")
    ahead.add_argument("config", help="the TOML file of a run; keys are overridden with --section.key=value")


def _count(text: str) -> int:
    """A number from 0 on, as an argument."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"given {text!r}; expected an integer from 0")
    return int(text)


def _tokenizer(options: argparse.Namespace) -> TokenizerConfig:
    if options.tokenizer == "bytes":
        return BytesConfig()
    return HfTokenizerConfig(path=options.tokenizer, eos=options.eos)  # pyright: ignore[reportCallIssue]


def _tokenize(options: argparse.Namespace) -> int:
    files = find_files(options.paths)
    root = Path(os.path.commonpath([f.parent for f in files]))
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("tokenizing", total=None)
        store = tokenize_files(
            files,
            options.out,
            _tokenizer(options),
            root=root,
            columns=Text(options.field),
            workers=options.workers,
            restart=True,
            on_progress=(lambda done, total: progress.update(bar, completed=done, total=total))
            if console.is_terminal
            else say_progress("text"),
        )
    return _print_summary(options.out, store)


def _import(options: argparse.Namespace) -> int:
    store = import_tokens(options.paths, options.out, _tokenizer(options), options.dtype)
    return _print_summary(options.out, store)


def _print_summary(folder: Path, store: TokenStore) -> int:
    sys.stdout.write(f"{folder}: {len(store):,} tokens in {store.manifest.num_docs:,} documents\n")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    store = TokenStore(options.folder)
    manifest = store.manifest
    sys.stdout.write(
        f"{options.folder}\n"
        f"  tokens     {manifest.num_tokens:,} ({manifest.dtype}, vocabulary {manifest.vocab_size:,})\n"
        f"  documents  {manifest.num_docs:,}, {_lengths(store)}\n"
        f"  tokenizer  {manifest.tokenizer}\n"
    )
    store.verify()
    sys.stdout.write("  intact     every block matches its digest\n")
    tokenizer = _tokenizer(options).build()
    if not is_named(tokenizer, manifest.tokenizer):
        sys.stdout.write(
            "  made with another tokenizer: no text is shown; name it with --tokenizer and --eos\n"
        )
        return 0
    start = 0
    for index, end in enumerate(store.doc_ends[: options.docs]):
        length, at = min(int(end) - start, 400), np.asarray([start])
        targets, none = np.ones(length, dtype=bool), store.no_targets(at, length)
        if none is not None:
            targets[none[1]] = False
        text = marked(tokenizer, store.read(at, length)[0], targets)
        note = "" if none is None else f", of which {int(targets.sum())} of the {length} shown are targets"
        sys.stdout.write(f"-- document {index}, {int(end) - start:,} tokens{note}\n{text}\n")
        start = int(end)
    return 0


def _validate(options: argparse.Namespace) -> int:
    tokenizer = _tokenizer(options).build() if options.tokenizer else None
    failed = 0
    for folder, problem in problems(options.folders, tokenizer):
        failed += problem is not None
        sys.stdout.write(f"{folder}: {'intact' if problem is None else problem}\n")
    return 1 if failed else 0


class _Job(Config):
    """The sections of a run that this command reads: `[data]` and `[train]`."""

    data: DataConfig
    train: dict[str, Any] = {}
    job: dict[str, Any] = {}
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    schedule: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    step: dict[str, Any] = {}
    eval: dict[str, Any] = {}
    mesh: dict[str, Any] = {}
    tensor_parallel: dict[str, Any] = {}
    context_parallel: dict[str, Any] = {}
    process_group: dict[str, Any] = {}
    expert_parallel: dict[str, Any] = {}
    pipeline: dict[str, Any] = {}
    fsdp: dict[str, Any] = {}
    precision: dict[str, Any] = {}
    fp8: dict[str, Any] = {}
    activation_checkpointing: dict[str, Any] = {}
    compile: dict[str, Any] = {}
    checkpoint: dict[str, Any] = {}
    resilience: dict[str, Any] = {}
    track: dict[str, Any] = {}
    hooks: dict[str, Any] = {}


def _run_of(path: str, overrides: Sequence[str]) -> tuple[DataConfig, Run, BatchSizes]:
    """Return the data section of a run, how much it reads, and the sizes of its batches."""
    try:
        job = load(_Job, path, overrides).value
    except ConfigError as error:
        if ".type: " not in str(error):
            raise
        raise ConfigError(
            f"{error}\nTypes that the parts of a run bring along, such as sources of images, are known to "
            "`forge sample` and `forge train`"
        ) from None
    train, max_tokens = job.train, job.data.max_tokens
    numbers = {key: train[key] for key in ("steps", "global_batch", "global_batch_tokens") if key in train}
    for key, value in numbers.items():
        if type(value) is not int or value < 1:
            raise DataError(f"{path}: train.{key}: given {value!r}; expected an integer from 1")
    batch = numbers.get("global_batch") or numbers.get("global_batch_tokens", 0) // max_tokens
    missing = ["train.steps"] * ("steps" not in numbers) + ["train.global_batch"] * (not batch)
    if missing:
        raise DataError(f"{path} does not set {' and '.join(missing)}; a plan needs both")
    try:
        warmup = train.get("batch_warmup", ())
        stages = [(int(stage["steps"]), int(stage["global_batch"])) for stage in warmup]
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{path}: train.batch_warmup: given {train['batch_warmup']!r}; expected steps and global_batch "
            "of each stage"
        ) from None
    return job.data, Run(batch, numbers["steps"]), BatchSizes(stages, batch)


def _plan(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    data, run, sizes = _run_of(options.config, overrides)
    if sizes.unit != run.global_batch:
        raise DataError(
            f"{options.config} sets train.batch_warmup; steps of different length are not planned here"
        )
    packings = train_packings(data, run.global_batch)
    order = build_order(data, [len(packing) for packing in packings.values()], run)
    lacks: list[str] = []
    held_out_digests(data, lacks=lacks)  # a run needs the text that it holds out, too
    cuts = [f"source {data.source_names()[n]}: {packing.describe()}" for n, packing in packings.items()]
    lacks = [f"not evaluated: {why}" for why in lacks]
    sys.stdout.write("\n".join(cuts + lacks + plan_lines(data, order, run)) + "\n")
    return 0


def _sample(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    path = Path(options.run)
    data, run, sizes = _run_of(str(path / "config.toml" if path.is_dir() else path), overrides)
    data = with_rollbacks(data, path) if path.is_dir() else data
    lines = sample_lines(data, run, options.step, options.rank, options.world_size, options.limit, sizes)
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return 0


def _lengths(store: TokenStore) -> str:
    ends = store.doc_ends
    if not len(ends):
        return "no tokens"
    low, middle, high = np.percentile(np.diff(ends, prepend=0), [0, 50, 100])
    return f"of {low:,.0f} to {high:,.0f} tokens, half below {middle:,.0f}"
