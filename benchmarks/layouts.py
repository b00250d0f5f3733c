"""Which layout to begin with: models of `configs/runs` on 1 to 512 GPUs, as `forge plan --json` plans them.

Of the candidates of a model and a number of GPUs, the fastest that leaves 5 % of the memory free is the one
to begin with. Nothing of it was measured: it is as good as the plan (docs/plan.md says how good).

Run: python benchmarks/layouts.py          plans what benchmarks/results/layouts.json lacks, and writes the
                                           table of docs/howto/choose_layout.md
     python benchmarks/layouts.py --table  writes the table alone
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import RESULTS, ROOT, table, write

PAGE = ROOT / "docs" / "howto" / "choose_layout.md"
BEGIN, END = "<!-- table of layouts -->", "<!-- end of it -->"
SPARE = 0.95
"""Of the memory of a device; the rest is for kernels, fragments and NCCL."""

FSDP = "--mesh.tp=1 --mesh.pp=1 --mesh.dp_replicate=1 --mesh.dp_shard=-1"
HSDP = "--mesh.tp=1 --mesh.pp=1 --mesh.dp_replicate={nodes} --mesh.dp_shard={node}"
TP = "--mesh.tp={node} --mesh.pp=1 --mesh.dp_replicate=1 --mesh.dp_shard=-1"
FULL = " --activation_checkpointing.mode=full"
SELECTIVE = " --activation_checkpointing.mode=selective"
SHARDED = " --fsdp.reduce_gradients=every_micro_batch"
TWO = " --train.micro_batch=2"


class Case(NamedTuple):
    """A model on GPUs of one kind, and the layouts that are tried.

    Attributes:
        run: of `configs/runs`.
        device: as `forge plan --device` names it.
        gpus: of them in all.
        node: GPUs of a node.
        candidates: flags of `forge plan`, `{nodes}` and `{node}` being numbers.
    """

    run: str
    device: str
    gpus: int
    node: int
    candidates: list[str]


def cases() -> list[Case]:
    """What is planned."""
    found = []
    for gpus in (1, 8):
        found.append(Case("llama-125m", "h100", gpus, min(gpus, 8), [FSDP]))
    for gpus in (1, 8, 64):
        layouts = [FSDP + SELECTIVE] + ([HSDP + SELECTIVE] if gpus > 8 else [])
        found.append(Case("llama-1b", "h100", gpus, min(gpus, 8), layouts))
    found.append(
        Case("llama-1b", "a100-40gb", 4, 4, [FSDP + SELECTIVE, FSDP + SELECTIVE + " --train.micro_batch=2"])
    )
    for gpus in (8, 64, 512):
        layouts = [FSDP + SELECTIVE + SHARDED, FSDP + FULL + SHARDED + TWO]
        layouts += [HSDP + FULL + SHARDED] if gpus > 8 else [TP + SELECTIVE]
        found.append(Case("llama-8b", "h100", gpus, 8, layouts))
    found.append(Case("llama-8b", "h200", 4, 4, [FSDP + FULL + SHARDED, FSDP + SELECTIVE + SHARDED]))
    for gpus in (64, 512):
        deep = "--mesh.pp=4 --mesh.tp={node} --mesh.dp_shard=-1"
        layouts = [FSDP + FULL + SHARDED, TP + FULL + SHARDED] + ([deep + FULL] if gpus == 512 else [])
        found.append(Case("llama-70b", "h100", gpus, 8, layouts))
    for gpus in (8, 64):
        found.append(Case("moe_1b_a400m", "h100", gpus, 8, [FSDP, FSDP + " --mesh.ep=8"]))
    for gpus in (16, 64):
        layouts = [HSDP + FULL, HSDP + FULL + " --mesh.ep=8", FSDP + FULL + " --mesh.ep=8"]
        found.append(Case("mla_moe_16b", "h100", gpus, 8, layouts))
    return found


def flags_of(case: Case, candidate: str) -> str:
    """Of `forge plan`, with the numbers of the case."""
    return candidate.format(nodes=case.gpus // case.node, node=case.node)


def plan(case: Case, candidate: str) -> dict[str, Any]:
    """What `forge plan --json` says of a candidate, or why it is refused."""
    flags = flags_of(case, candidate).split()
    where = f"--nodes {case.gpus // case.node} --gpus-per-node {case.node} --device {case.device}".split()
    command = ["forge", "plan", f"configs/runs/{case.run}.toml", *where, *flags]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    row = {
        "run": case.run,
        "device": case.device,
        "gpus": case.gpus,
        "node": case.node,
        "flags": " ".join(flags),
    }
    if done.returncode:
        return row | {"refused": done.stderr.strip().splitlines()[-1]}
    found = json.loads(done.stdout)
    return row | {
        "gib": found["memory_bytes"] / 2**30,
        "fits": found["memory_bytes"] < SPARE * found["device_bytes"],
        "step_s": [found["time"]["low"], found["time"]["high"]],
        "tokens_per_s": found["tokens_per_s"],
        "mfu": found["mfu"],
        "days": found["steps"] * found["time"]["likely"] / 86400,
    }


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest candidate that fits, of each model and number of GPUs."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["device"], row["gpus"]), []).append(row)
    chosen = []
    for group in groups.values():
        fitting = [row for row in group if row.get("fits")]
        if fitting:
            chosen.append(max(fitting, key=lambda row: row["tokens_per_s"]) | {"tried": len(group)})
        else:
            chosen.append(group[0] | {"tried": len(group)})
    return chosen


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the page."""
    start = {
        "run": row["run"],
        "GPUs": f"{row['gpus']} {row['device']}",
        "flags": " ".join(f"`{flag}`" for flag in row["flags"].split() if not idle(flag)),
    }
    if not row.get("fits"):
        return start | {
            "GiB": "none fits",
            "s a step": "",
            "tokens/s": "",
            "MFU %": "",
            "days": "",
            "tried": row["tried"],
        }
    low, high = row["step_s"]
    return start | {
        "GiB": f"{row['gib']:.0f}",
        "s a step": f"{low:.3g} to {high:.3g}",
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "MFU %": f"{100 * row['mfu']:.0f}",
        "days": f"{row['days']:.3g}",
        "tried": row["tried"],
    }


def idle(flag: str) -> bool:
    """Whether a flag says what is so without it in most files."""
    return flag in ("--mesh.pp=1", "--mesh.dp_replicate=1")


def put_into_page(rows: list[dict[str, Any]]) -> None:
    """Write the table between its marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table([shown(row) for row in best(rows)])}\n{END}{after}")


def main() -> None:
    """Plan every candidate, keep what was said, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="write the table of what was planned")
    path = RESULTS / "layouts.json"
    rows = json.loads(path.read_text())["results"]["rows"] if path.exists() else []
    there = {(row["run"], row["device"], row["gpus"], row["flags"]) for row in rows}
    wanted = [] if parser.parse_args().table else [(case, one) for case in cases() for one in case.candidates]
    for case, candidate in wanted:
        if (case.run, case.device, case.gpus, flags_of(case, candidate)) not in there:
            rows.append(plan(case, candidate))
            write("layouts", {"rows": rows})
    put_into_page(rows)


if __name__ == "__main__":
    main()
