"""Checks whether a start fits into its GPUs, by a plan in a separate process. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from forge_config import ConfigError

from forge_trainer.console import emit
from forge_trainer.plan.devices import name_of_gpu
from forge_trainer.plan.record import does_not_fit, record_of, short_lines
from forge_trainer.ranks import from_first
from forge_trainer.run_dir.files import write_whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GPUS = Path("/proc/driver/nvidia/gpus")
"""The folder in which the driver lists the GPUs, readable without starting CUDA."""

PATIENCE_S, STRICT_PATIENCE_S = 1.5, 300.0
"""How long a start waits for its plan before it builds anything; `--strict` requires the plan."""

OF_RANKS = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|SLURM_.*)$")
"""Environment variables that would make the process of a plan a rank of the run."""


class StartPlan:
    """The plan of a start, made on its first rank.

    A start on a CPU, or on a GPU that is not in the table of devices, has no plan. If the plan fails, one
    line is printed, and the start continues.

    Args:
        command: command of a process that prints the plan as JSON; None plans nothing.
        strict: whether to refuse a start that does not fit.
    """

    def __init__(self, command: Sequence[str] | None = None, strict: bool = False) -> None:
        self.strict = strict
        self._record: dict[str, Any] = {}
        self._ready, self._warned = Event(), False
        self._process = None if command is None else _started(command)
        if self._process is None:
            self._ready.set()
        else:
            Thread(target=self._read, name="plan", daemon=True).start()

    def require_room(self, group: ProcessGroup | None) -> None:
        """Warn before anything is built if the job does not fit; see `PATIENCE_S`. Collective.

        Raises:
            ConfigError: the job does not fit and the start is strict; raised on every rank.
        """
        message = from_first(self._too_large, group)
        if message and self.strict:
            raise ConfigError(f"{message}; without --strict it would be tried")

    def lines(self) -> list[str]:
        """Return lines for the announcement of the start; none if the plan is not finished yet."""
        return list(short_lines(self._record)) if self._ready.is_set() and self._record else []

    def keep(self, path: Path) -> None:
        """Write the plan for `forge report` as soon as it is finished, in the background."""

        def write() -> None:
            self._ready.wait()
            if self._record:
                self._too_large(0.0)
                try:
                    write_whole(path, json.dumps(self._record, indent=2) + "\n")
                except OSError as error:
                    emit(f"plan: {path} cannot be written: {error}\n", sys.stderr)

        if self._process is not None:
            Thread(target=write, name="plan-keep", daemon=True).start()

    def close(self) -> None:
        """End the process of an unfinished plan."""
        if self._process is not None and not self._ready.is_set():
            self._process.kill()

    def _read(self) -> None:
        assert self._process is not None
        try:
            out, err = self._process.communicate()
            if self._process.returncode == 0:
                self._record = record_of(json.loads(out[out.find("{") :]))  # modules may print as they load
            elif self._process.returncode > 0:  # below 0 it was ended
                lines = err.strip().splitlines() or ["no reason"]
                emit(f"plan: this start is not planned: {lines[-1]}\n", sys.stderr)
        except (ValueError, KeyError, TypeError) as error:
            emit(f"plan: this start is not planned: {error!r}\n", sys.stderr)
        finally:
            self._ready.set()

    def _too_large(self, patience_s: float | None = None) -> str:
        """Return a warning, and print it once unless strict; empty if the job fits or there is no plan."""
        usual = STRICT_PATIENCE_S if self.strict else PATIENCE_S
        if not self._ready.wait(usual if patience_s is None else patience_s) or self._warned:
            return ""
        message = does_not_fit(self._record)
        if message and not self.strict:
            emit(f"WARNING {message}\n", sys.stderr)
        self._warned = bool(message)
        return message


def plan_start(options: argparse.Namespace, overrides: Sequence[str], rank: int, ranks: int) -> StartPlan:
    """Begin to plan a start if its first rank has a GPU of the table.

    Args:
        options: options of `forge train`.
        overrides: overrides of configuration keys.
        rank: rank of this process.
        ranks: number of ranks of the run.
    """
    device = gpu_here() if rank == 0 else None
    if device is None:
        return StartPlan(strict=options.strict)
    local = re.match(
        r"\d+", os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    )
    command = [
        *(sys.executable, "-m", "forge_trainer", "plan", str(options.config), *overrides),
        *(f"--ranks={ranks}", f"--device={device}", "--json"),
        *([f"--gpus-per-node={local[0]}"] if local else []),
    ]
    return StartPlan(command, options.strict)


def gpu_here() -> str | None:
    """Return the name of this machine's GPUs in the table; None if they are unknown or hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return None
    names = {name_of_gpu(model) for model in _models()}
    return names.pop() if len(names) == 1 else None


def _models() -> Iterator[str]:
    for file in sorted(GPUS.glob("*/information")):
        try:
            text = file.read_text()
        except OSError:
            continue
        yield from re.findall(r"^Model:\s*(.+)$", text, re.MULTILINE)


def _started(command: Sequence[str]) -> subprocess.Popen[str] | None:
    """Start a process in a new session, with low priority, without variables of ranks and without GPUs."""
    environment = {key: value for key, value in os.environ.items() if not OF_RANKS.match(key)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # modules print what they like
            env=environment,
            start_new_session=True,
        )
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        return process
    except OSError as error:
        emit(f"plan: this start is not planned: {error}\n", sys.stderr)
        return None
