"""A run under random faults of all kinds, beside one that is left alone.

    python benchmarks/soak.py [--minutes 20] [--ranks 2] [--seed 0] [--clean] [--quick] [--folder F]

Faults come for so many minutes: a rank or all are killed, a rank is stopped (the watchdog ends the run), a
gradient is infinite once, the disk is full for two saves, the newest checkpoint is damaged, the run is
preempted. Then another run takes as many steps, with evaluations, saves and a compiler, and nothing happens
to it: any hang that its watchdog sees is a false alarm. Both must hold the same bits in the end, and the
ledger of the first must add up to its wall time within 1 %. `--clean` only does the second, for so many
minutes. `--quick` lets each fault happen once, after few steps, and records nothing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from report import ROOT, table, write

FAULTS = ("kill one", "kill all", "stop", "nan", "disk full", "damage", "preempt")
ENDS = {
    "kill one": None,  # the others lose a connection, as long as the killed one had begun to train
    "kill all": {-signal.SIGKILL},
    "stop": {86, -signal.SIGKILL},
    "preempt": {85},
    "damage": {85},
    "nan": {85},
    "disk full": {85},
}
"""The exit codes that a rank may end with, by fault."""
INSIDE = {"nan": "nan:5", "disk full": "full:2"}
STEPS, QUICK_STEPS = (60, 160), (20, 40)
"""Between so many steps lies the moment of a fault, after a start."""
QUICK = ["--checkpoint.every_steps=6", "--eval.every_steps=10"]
ENDLESS = 10_000_000
SETTINGS = f"""
imports = ["soak_part"]
extends = "{ROOT}/configs/runs/debug.toml"

[job]
name = "soak"

[train]
global_batch = 4
micro_batch = 2
log_every_steps = 1

[data]
max_tokens = 32
workers = 2
validation_samples = 8

[schedule]
type = "constant"

[eval]
every_steps = 40

[checkpoint]
every_steps = 25
keep = 3

[compile]
enabled = true
backend = "eager"

[resilience]
hang_least_s = 20.0
hang_first_s = 120.0
check_every_steps = 1

[hooks.soak]
type = "soak"
"""


class Soak:
    """A run that is started again and again.

    Args:
        folder: of this run.
        ranks: how many processes.
        keys: overrides of the configuration.
    """

    def __init__(self, folder: Path, ranks: int, keys: list[str]) -> None:
        self._keys = keys
        self.config, self.run, self._ranks = folder / "soak.toml", folder / "runs" / "soak", ranks
        folder.mkdir(parents=True)
        self.config.write_text(SETTINGS)
        shutil.copy(Path(__file__).with_name("soak_part.py"), folder)
        self._folder, self.starts = folder, 0

    def start(self, steps: int = ENDLESS, fault: str = "") -> list[subprocess.Popen[bytes]]:
        """One process a rank."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        words = ["train", str(self.config), f"--job.root={self._folder / 'runs'}", f"--train.steps={steps}"]
        words += self._keys
        ranks = []
        self.starts += 1
        for rank in range(self._ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._ranks, "MASTER_PORT": port}
            environment = os.environ | {
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": "1",
                "FORGE_FAULT": fault,
            }
            if self._ranks > 1:
                environment |= {key: str(value) for key, value in place.items()}
            with (self._folder / f"log-{rank}").open("a") as log:
                line = [sys.executable, "-m", "forge_trainer", *words]
                ranks.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log))
        return ranks

    def step(self) -> int:
        """The last step that was logged."""
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = [
                line for line in file.read().decode(errors="replace").splitlines()[1:] if '"loss"' in line
            ]
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue
        return 0

    def train_for(self, ranks: list[subprocess.Popen[bytes]], steps: int) -> None:
        """Until so many steps more are logged, or a rank has ended."""
        begin, written = self.step(), self._written()
        end = time.monotonic() + 600
        while all(rank.poll() is None for rank in ranks):
            # what comes after the checkpoint is done again first: the file must have grown as well
            if self._written() > written and self.step() >= begin + steps:
                return
            if time.monotonic() > end:
                raise SystemExit(f"no step in ten minutes; see {self._folder}/log-0")
            time.sleep(0.02)

    def _written(self) -> float:
        path = self.run / "metrics.jsonl"
        return path.stat().st_mtime if path.exists() else 0.0

    def damage(self, chooser: random.Random) -> None:
        """Flip a bit of the newest checkpoint."""
        newest = max((self.run / "checkpoints").glob("step-*"))
        path = chooser.choice(sorted(newest.glob("rank-*")))
        data = bytearray(path.read_bytes())
        data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)


def end_by(fault: str, ranks: list[subprocess.Popen[bytes]], chooser: random.Random) -> list[int]:
    """Let a fault happen, and return the exit codes."""
    hit = [chooser.choice(ranks)] if fault in ("kill one", "stop") else ranks
    number = {"kill one": signal.SIGKILL, "kill all": signal.SIGKILL, "stop": signal.SIGSTOP}
    for _ in range(3 if fault == "preempt" else 1):
        for rank in hit:
            rank.send_signal(number.get(fault, signal.SIGTERM))
    return [rank.wait(timeout=600) for rank in ranks]


def under_faults(
    soak: Soak, minutes: float, steps: tuple[int, int], chooser: random.Random
) -> tuple[Counter[str], list[str], float]:
    """Train under faults; what was injected, what ended otherwise than it should, and seconds.

    The seconds go from the first command to the last word of the run, its `exit.json`.
    """
    injected: Counter[str] = Counter()
    wrong: list[str] = []
    begin, waiting = time.time(), list[str]()
    while time.time() - begin < minutes * 60 or waiting:
        if not waiting:
            waiting = chooser.sample(FAULTS, len(FAULTS))  # each kind comes as often as the others
        fault = waiting.pop()
        ranks = soak.start(fault=INSIDE.get(fault, ""))
        soak.train_for(ranks, chooser.randrange(*steps))
        codes = end_by(fault, ranks, chooser)
        injected[fault] += 1
        if (ends := ENDS[fault]) is not None and not set(codes) <= ends:
            wrong.append(f"{fault}: exit codes {codes}")
        if fault == "damage":
            soak.damage(chooser)
        print(f"{time.time() - begin:6.0f} s  {fault:<10} {codes} at step {soak.step()}", flush=True)
        if time.time() - begin > minutes * 60 and all(injected[one] for one in FAULTS):
            break
    ranks = soak.start()
    soak.train_for(ranks, 5)
    if (codes := end_by("preempt", ranks, chooser)) != [85] * len(ranks):
        wrong.append(f"at the end: exit codes {codes}")
    # an interpreter that has said its last word may still take seconds to end on a busy machine
    return injected, wrong, (soak.run / "exit.json").stat().st_mtime - begin


def left_alone(soak: Soak, steps: int, minutes: float) -> list[str]:
    """Train without faults for so many steps, or minutes; what went wrong."""
    ranks, begin = soak.start(steps), time.monotonic()
    while any(rank.poll() is None for rank in ranks):
        if steps == ENDLESS and time.monotonic() - begin > minutes * 60:
            end_by("preempt", ranks, random.Random())
        time.sleep(0.1)
    code = 85 if steps == ENDLESS else 0
    wrong = [f"left alone: exit code {rank.wait()}" for rank in ranks if rank.wait() != code]
    return wrong + [f"false alarm: {path.read_text()}" for path in soak.run.glob("hang*/verdict.txt")]


def same(one: Path, other: Path) -> bool:
    """Whether two runs hold the same bits in their newest checkpoints, and logged the same losses."""
    from forge_ckpt.store import Store

    stores = [Store(run / "checkpoints") for run in (one, other)]
    steps = [store.newest().step for store in stores]
    if steps[0] != steps[1]:
        return False
    tensors = [store.tensors(step) for store, step in zip(stores, steps, strict=True)]
    alike = all(bool((tensors[0][name] == tensors[1][name]).all()) for name in tensors[0])
    return alike and tensors[0].keys() == tensors[1].keys() and _losses(one) == _losses(other)


def _losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def judge(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Do it all; the results, and what went wrong."""
    keys = QUICK if options.quick else []
    if options.clean:
        alone = Soak(folder / "alone", options.ranks, keys)
        wrong = left_alone(alone, ENDLESS, options.minutes)
        return {"minutes": options.minutes, "steps": alone.step(), "false_alarms": len(wrong)}, wrong
    from forge_resilience.goodput import add_up
    from forge_trainer.hooks.ledger import read_ledger

    soak = Soak(folder / "faults", options.ranks, keys)
    moments = QUICK_STEPS if options.quick else STEPS
    injected, wrong, wall_s = under_faults(soak, options.minutes, moments, random.Random(options.seed))
    steps, begin = soak.step(), time.monotonic()
    alone = Soak(folder / "alone", options.ranks, keys)
    wrong += left_alone(alone, steps, 0)
    alone_s = time.monotonic() - begin
    if not same(soak.run, alone.run):
        wrong.append("the two runs do not hold the same bits")
    found = add_up(read_ledger(soak.run))
    apart = abs(sum(found.seconds.values()) / found.wall_s - 1), abs(found.wall_s / wall_s - 1)
    if max(apart) > 0.01:
        wrong.append(
            f"the ledger: parts {apart[0]:.2%} from its wall time, that {apart[1]:.2%} from the clock"
        )
    return {
        "ranks": options.ranks,
        "minutes": wall_s / 60,
        "steps": steps,
        "starts": soak.starts,
        "injected": dict(injected),
        "ledger_s": {name: round(s, 2) for name, s in found.seconds.items()},
        "ledger_parts_over_wall": sum(found.seconds.values()) / found.wall_s,
        "ledger_wall_over_clock": found.wall_s / wall_s,
        "goodput": found.ratio,
        "left_alone_minutes": alone_s / 60,
    }, wrong


def main() -> None:
    """Soak and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean", action="store_true", help="no faults: look for false alarms only")
    parser.add_argument("--quick", action="store_true", help="each fault once; records nothing")
    parser.add_argument("--folder", type=Path, help="keeps the runs")
    options = parser.parse_args()
    if options.quick and not options.clean:
        options.minutes = 0.01
    with tempfile.TemporaryDirectory() as scratch:
        results, wrong = judge(options.folder or Path(scratch), options)
    results["wrong"] = wrong
    print(table([{"what": name, "found": value} for name, value in results.items()]))
    if not options.quick:
        write("soak_clean" if options.clean else "soak", results)
    raise SystemExit(f"{len(wrong)} went wrong" if wrong else 0)


if __name__ == "__main__":
    main()
