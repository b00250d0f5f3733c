"""The command `forge-ckpt`: ls, show, diff, verify, export, prune."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_ckpt import manifest as manifests
from forge_ckpt.checkpointed import Checkpointed
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError, UnsupportedError
from forge_ckpt.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 1 when something is damaged, missing or different."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge-ckpt", description="Look after the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    for run, help_text in (
        (_ls, "the checkpoints there are"),
        (_show, "what a checkpoint holds"),
        (_verify, "read every byte and compare it"),
        (_export, "write the tensors of the model as safetensors, under the names they have here"),
        (_prune, "remove all but the newest, the newest that is intact, and milestones"),
    ):
        command = commands.add_parser(run.__name__.lstrip("_"), help=help_text)
        command.set_defaults(run=run)
        command.add_argument("folder", type=Path, help="the checkpoints, e.g. runs/debug/checkpoints")
        if run is _prune:
            command.add_argument("--keep", type=int, required=True, help="newest checkpoints that stay")
        elif run is not _ls:
            command.add_argument("--step", type=int, help="default: all (verify), the newest (others)")
        if run is _export:
            command.add_argument("out", type=Path, help="the folder to write; must not exist")
        if run in (_ls, _show, _verify):
            command.add_argument("--json", action="store_true", help="for programs")
    command = commands.add_parser("diff", help="which tensors of two checkpoints differ, and by how much")
    command.set_defaults(run=_diff)
    command.add_argument("a", type=Path, help="the folder of a step, e.g. checkpoints/step-000000100")
    command.add_argument("b", type=Path)
    command.add_argument("--json", action="store_true", help="for programs")
    return parser


def _ls(options: argparse.Namespace) -> int:
    store = Store(options.folder)
    return _tell([_row(store, step, verify=False) for step in store.steps()], options.json)


def _verify(options: argparse.Namespace) -> int:
    store = Store(options.folder)
    steps = store.steps() if options.step is None else [options.step]
    return _tell([_row(store, step, verify=True) for step in steps], options.json)


def _row(store: Store, step: int, verify: bool) -> dict[str, Any]:
    try:
        opened = store.verify(step) if verify else manifests.read(store.folder(step))
    except CheckpointError as error:
        return {"step": step, "state": _kind(error), "why": str(error)}
    return {
        "step": step,
        "state": "intact" if verify else "there",
        "MB": round(opened.num_bytes / 1e6, 1),
        "tensors": len(opened.tensors),
        "ranks": opened.world_size,
        "milestone": opened.milestone,
    }


def _tell(rows: list[dict[str, Any]], as_json: bool) -> int:
    for row in rows:
        if as_json:
            sys.stdout.write(json.dumps(row) + "\n")
            continue
        more = "  ".join(f"{value} {key}" for key, value in row.items() if key in ("MB", "tensors", "ranks"))
        told = row.get("why", more + ("  milestone" if row.get("milestone") else ""))
        sys.stdout.write(f"{row['step']:>9}  {row['state']:<11}  {told}\n")
    return int(any("why" in row for row in rows))


def _show(options: argparse.Namespace) -> int:
    opened = _opened(options).manifest
    tensors = {
        key: {"dtype": e.dtype, "shape": list(e.shape), "boxes": len(opened.layouts[e.layout].ranks)}
        for key, e in opened.tensors.items()
    }
    if options.json:
        about = {"step": opened.step, "torch": opened.torch, "ranks": opened.world_size}
        more = {"meta": opened.meta, "values": opened.values, "tensors": tensors}
        sys.stdout.write(json.dumps(about | more) + "\n")
        return 0
    sys.stdout.write(
        f"step {opened.step}, torch {opened.torch}, {opened.world_size} ranks, meta {opened.meta}\n"
    )
    for key, told in tensors.items():
        sys.stdout.write(f"  {key}  {told['dtype']} {told['shape']} in {told['boxes']} boxes\n")
    return 0


def _opened(options: argparse.Namespace) -> Checkpointed:
    store = Store(options.folder)
    return store.tensors(store.newest().step if options.step is None else options.step)


def _diff(options: argparse.Namespace) -> int:
    a, b = Checkpointed(options.a), Checkpointed(options.b)
    found = {key: "is only in a" for key in a.keys() - b.keys()}
    found |= {key: "is only in b" for key in b.keys() - a.keys()}
    found |= {key: told for key in a.keys() & b.keys() if (told := _difference(a, b, key))}
    for key, told in sorted(found.items()):
        line = json.dumps({"tensor": key, "difference": told}) if options.json else f"{key}  {told}"
        sys.stdout.write(line + "\n")
    return int(bool(found))


def _difference(a: Checkpointed, b: Checkpointed, key: str) -> str:
    """How the tensors of two checkpoints differ; nothing if every bit is the same."""
    import torch

    one, other = a.manifest.tensors[key], b.manifest.tensors[key]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"is {one.dtype} {list(one.shape)}, and {other.dtype} {list(other.shape)}"
    x, y = a[key].flatten(), b[key].flatten()
    if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return ""
    x, y = (v if v.is_complex() else v.double() for v in (x, y))
    differing = int((x != y).sum())
    return f"differs in {differing} of {x.numel()} elements, by at most {float((x - y).abs().max()):.6g}"


def _export(options: argparse.Namespace) -> int:
    from forge_ckpt.state import MODEL
    from forge_ckpt.weights import write_weights

    tensors = _opened(options)
    step = tensors.manifest.step
    write_weights(options.out, tensors.under(MODEL), {"step": step})
    sys.stdout.write(f"wrote the model of step {step} to {options.out}\n")
    return 0


def _prune(options: argparse.Namespace) -> int:
    if options.keep < 1:
        raise CheckpointError(f"given --keep {options.keep}; at least one stays")
    removed = Store(options.folder, keep=options.keep).prune(verify=True)
    sys.stdout.write(f"removed {removed or 'nothing'}\n")
    return 0


def _kind(error: CheckpointError) -> str:
    kinds = {DamagedError: "damaged", UnreadableError: "unreadable", UnsupportedError: "unsupported"}
    return kinds.get(type(error), "wrong")
