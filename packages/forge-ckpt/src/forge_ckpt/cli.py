"""The command `forge-ckpt`: ls, show, verify, prune."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_ckpt import manifest as manifests
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError, UnsupportedError
from forge_ckpt.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 1 when something is damaged or missing."""
    parser = argparse.ArgumentParser(prog="forge-ckpt", description="Look after the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("ls", "the checkpoints there are"),
        ("show", "what a checkpoint holds"),
        ("verify", "read every byte and compare it"),
        ("prune", "remove all but the newest"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument(
            "folder", type=Path, help="the folder of the checkpoints, e.g. runs/debug/checkpoints"
        )
        if name in ("show", "verify"):
            command.add_argument("--step", type=int, help="default: the newest (show), all (verify)")
        if name == "prune":
            command.add_argument("--keep", type=int, required=True)
    options = parser.parse_args(arguments)
    store = Store(options.folder, keep=getattr(options, "keep", 3))
    try:
        return {"ls": _ls, "show": _show, "verify": _verify, "prune": _prune}[options.command](store, options)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _ls(store: Store, options: argparse.Namespace) -> int:
    for step in store.steps():
        try:
            opened = manifests.read(store.folder(step))
            size = opened.num_bytes / 1e6
            line = f"{size:10,.1f} MB  {len(opened.tensors)} tensors  written by {opened.world_size} ranks"
        except CheckpointError as error:
            line = f"{_kind(error)}: {error}"
        sys.stdout.write(f"{step:>9}  {line}\n")
    return 0


def _show(store: Store, options: argparse.Namespace) -> int:
    opened = store.newest() if options.step is None else manifests.read(store.folder(options.step))
    sys.stdout.write(
        f"step {opened.step}, torch {opened.torch}, {opened.world_size} ranks, meta {opened.meta}\n"
    )
    for key, entry in opened.tensors.items():
        sys.stdout.write(
            f"  {key}  {entry.dtype} {list(entry.shape)} in {len(opened.layouts[entry.layout].ranks)} boxes\n"
        )
    return 0


def _verify(store: Store, options: argparse.Namespace) -> int:
    damaged = 0
    for step in store.steps() if options.step is None else [options.step]:
        try:
            store.verify(step)
            sys.stdout.write(f"{step:>9}  intact\n")
        except CheckpointError as error:
            damaged += 1
            sys.stdout.write(f"{step:>9}  {_kind(error)}: {error}\n")
    return int(bool(damaged))


def _prune(store: Store, options: argparse.Namespace) -> int:
    if options.keep < 1:
        raise CheckpointError(f"given --keep {options.keep}; at least one stays")
    removed = store.prune(verify=True)
    sys.stdout.write(f"removed {removed or 'nothing'}\n")
    return 0


def _kind(error: CheckpointError) -> str:
    kinds = {DamagedError: "damaged", UnreadableError: "unreadable", UnsupportedError: "unsupported"}
    return kinds.get(type(error), "wrong")
