"""The command `forge-ckpt`: look at checkpoints, keep them, remove them, and take tensors out of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forge_ckpt.error import CheckpointError, DamagedError
from forge_ckpt.folders import marks_around
from forge_ckpt.inspect.checkpointed import Checkpointed
from forge_ckpt.inspect.report import CANNOT, FINE, FOUND, Row, code_of, row, rows, say, say_json, say_row
from forge_ckpt.pins import pin, unpin
from forge_ckpt.store import Store

Run = Callable[[argparse.Namespace], int]

ENDING = "exit code: 0 all is well; 1 something is damaged, missing or different; 2 it cannot be done or told"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, see `report`."""
    options = _parser().parse_args(arguments)
    if arguments is None:  # a process of its own: what is partial is removed
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT
    except (CheckpointError, OSError, ValueError) as error:
        message = str(error).encode("utf-8", "backslashreplace").decode()
        sys.stderr.write(f"{message}\n")
        return FOUND if isinstance(error, DamagedError) and options.run is not _diff else CANNOT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge-ckpt", description="Look after the checkpoints of a run.", epilog=ENDING
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(run: Run, help_text: str, folder: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__.lstrip("_"), help=help_text, epilog=ENDING)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="for programs: an object a line")
        if folder:
            command.add_argument("folder", type=Path, help="of a run, or of its checkpoints")
        return command

    add(_ls, "the checkpoints there are")
    show = add(_show, "what a checkpoint holds")
    verify = add(_verify, "read every byte and compare it")
    add(_fsck, "look at all that is in the folder: checkpoints, leftovers, pins, the lease")
    export = add(_export, "write the tensors of the model as safetensors, under the names they have here")
    pinning = add(_pin, "keep a checkpoint, whatever is pruned"), add(_unpin, "let it be pruned again")
    for command in pinning:
        command.add_argument("step", type=_step)
    prune = add(_prune, "remove all but the newest, the newest that is intact, milestones and pins")
    prune.add_argument("--keep", type=int, required=True, help="newest checkpoints that stay")
    for command in (show, verify, export):
        command.add_argument("--step", type=_step, help="default: all (verify), the newest (others)")
    export.add_argument("out", type=Path, help="the folder to write; must not exist")
    imported = add(
        _import, "weights of a checkpoint of torch DCP, as torchtitan writes, as safetensors", folder=False
    )
    imported.add_argument("source", type=Path, help="the folder with its .metadata")
    imported.add_argument("out", type=Path, help="the folder to write; must not exist")
    imported.add_argument("--prefix", default="", help="of the names of the weights; left out")
    stack = imported.add_mutually_exclusive_group()
    stack.add_argument(
        "--kempnerforge",
        type=Path,
        metavar="TOML",
        help="a text model of KempnerForge becomes one of Forge: its configuration by `forge convert`",
    )
    stack.add_argument(
        "--llama",
        type=Path,
        metavar="CONFIG",
        help="a Llama of torchtitan becomes one of Hugging Face: its config.json",
    )
    for command in (export, imported):
        command.add_argument(
            "--shard-bytes",
            type=_bytes,
            default=5 << 30,
            help="a file holds at most this much, or one tensor",
        )
    diff = add(_diff, "which tensors of two checkpoints differ, and by how much", folder=False)
    diff.add_argument("a", type=Path, help="the folder of a step, e.g. checkpoints/step-000000100")
    diff.add_argument("b", type=Path)
    return parser


def _step(text: str) -> int:
    return _number(text, "a number of steps")


def _bytes(text: str) -> int:
    return _number(text, "a number of bytes above 0", 1)


def _number(text: str, expected: str, least: int = 0) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise argparse.ArgumentTypeError(f"given {text!r}; expected {expected}")
    return int(text)


def _store(options: argparse.Namespace, keep: int = 3) -> Store:
    """Open the checkpoints of a run, or of its folder of checkpoints.

    Raises:
        CheckpointError: there is no such folder.
    """
    inner = options.folder / "checkpoints"
    folder = inner if inner.is_dir() else options.folder
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}; expected that of a run or of its checkpoints")
    return Store(folder, keep, marks=marks_around(folder))


def _ls(options: argparse.Namespace) -> int:
    store = _store(options)
    _steps(store)
    return _say_rows(rows(store, verify=False), options)


def _verify(options: argparse.Namespace) -> int:
    store = _store(options)
    if options.step is not None:
        return _say_rows([row(store, options.step, verify=True)], options)
    return _say_rows(rows(store, verify=True), options) if _steps(store) else CANNOT


def _steps(store: Store) -> list[int]:
    """Return the steps that have checkpoints; prints a line if there is none.

    Raises:
        DamagedError: there were some.
    """
    steps = store.steps()
    if not steps and (highest := store.progress()) >= 0:
        raise DamagedError(store.root, f"once held step {highest}, and no checkpoint is left")
    if not steps:
        sys.stderr.write(f"there is no checkpoint in {store.root}\n")
    return steps


def _say_rows(found: Iterable[Row], options: argparse.Namespace) -> int:
    states = []
    for entry in found:
        say_row(entry, options.json)
        states.append(entry["state"])
    return code_of(states)


def _fsck(options: argparse.Namespace) -> int:
    from forge_ckpt.inspect.fsck import fsck

    code = FINE
    for entry in fsck(_store(options).root):
        code = entry.get("code", code)
        if options.json:
            say_json(entry)
        elif entry["what"] == "checkpoint":
            say_row(entry, as_json=False)
        else:
            more = "  ".join(
                str(entry[key]) for key in ("name", "step", "state", "why") if entry.get(key, -1) != -1
            )
            say(f"{entry['what']:>9}  {more}")
    return code


def _show(options: argparse.Namespace) -> int:
    opened = _opened(options).manifest
    tensors = {
        key: {"dtype": e.dtype, "shape": list(e.shape), "boxes": len(opened.layouts[e.layout].ranks)}
        for key, e in opened.tensors.items()
    }
    if options.json:
        about = {"step": opened.step, "torch": opened.torch, "ranks": opened.world_size}
        say_json(about | {"meta": opened.meta, "values": opened.values, "tensors": tensors})
        return FINE
    say(f"step {opened.step}, torch {opened.torch}, {opened.world_size} ranks, meta {opened.meta}")
    for key, entry in tensors.items():
        say(f"  {key}  {entry['dtype']} {entry['shape']} in {entry['boxes']} boxes")
    return FINE


def _opened(options: argparse.Namespace) -> Checkpointed:
    store = _store(options)
    return store.tensors(store.newest().step if options.step is None else options.step)


def _diff(options: argparse.Namespace) -> int:
    from forge_ckpt.inspect.compare import compare

    code = FINE
    for entry in compare(options.a.resolve(), options.b.resolve()):
        code = FOUND
        say_json(entry) if options.json else say(f"{entry['tensor']}  {entry['difference']}")
    return code


def _export(options: argparse.Namespace) -> int:
    from forge_ckpt.interop.weights import write_weights
    from forge_ckpt.state import MODEL

    tensors = _opened(options)
    step = tensors.manifest.step
    weights = tensors.under(MODEL)
    if not weights:
        raise CheckpointError(f"step {step} holds no tensors of a model, whose names begin with {MODEL!r}")
    write_weights(options.out, weights, {"step": step}, options.shard_bytes, like=weights.on_meta())
    _done(options, f"wrote the model of step {step} to {options.out}", step=step, folder=str(options.out))
    return FINE


def _import(options: argparse.Namespace) -> int:
    from forge_ckpt.interop.dcp import DcpTensors
    from forge_ckpt.interop.dcp_names import LlamaOfTitan, require_config
    from forge_ckpt.interop.kempnerforge import PREFIX, OfKempnerForge, read_model, require_whole
    from forge_ckpt.interop.weights import Renamed, read_object, write_weights

    config = read_object(options.llama) if options.llama else {}
    model, is_tied = read_model(options.kempnerforge) if options.kempnerforge else ("", False)
    if model:
        require_whole(options.source)
    source = DcpTensors(options.source)
    names, left = source.weights(options.prefix or (PREFIX if model else ""))
    weights, like = (Renamed(tensors, names) for tensors in (source, source.on_meta()))
    if options.llama:
        weights, like = LlamaOfTitan(weights, config), LlamaOfTitan(like, config)
        require_config(like, config)
    elif model:
        weights, like = OfKempnerForge(weights, is_tied), OfKempnerForge(like, is_tied)
        weights.require_same_meaning()
    files = {"config.toml": model} if model else {}
    write_weights(options.out, weights, config, options.shard_bytes, files, like)
    _done(options, f"wrote {len(weights)} tensors to {options.out}", tensors=len(weights), left_out=left)
    if left and not options.json:
        say(f"left out {len(left)}, which are no weights (state of an optimizer is not taken over):")
        for name in left[:10]:
            say(f"  {name}")
    return FINE


def _pin(options: argparse.Namespace) -> int:
    pin(_store(options).root, options.step)
    _done(options, f"step {options.step} stays until it is unpinned", step=options.step, pinned=True)
    return FINE


def _unpin(options: argparse.Namespace) -> int:
    unpin(_store(options).root, options.step)
    _done(options, f"step {options.step} may be pruned", step=options.step, pinned=False)
    return FINE


def _prune(options: argparse.Namespace) -> int:
    if options.keep < 1:
        raise CheckpointError(f"given --keep {options.keep}; at least one stays")
    removed = _store(options, keep=options.keep).prune(verify=True)
    _done(options, f"removed {removed or 'nothing'}", removed=removed)
    return FINE


def _done(options: argparse.Namespace, line: str, **fields: object) -> None:
    say_json(fields) if options.json else say(line)
