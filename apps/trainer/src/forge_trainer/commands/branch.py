"""Starts a new run from a checkpoint of another run; some keys may have other values."""

from __future__ import annotations

import argparse
import logging
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from forge_ckpt.disk import sync, write_durably
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.folders import Folders
from forge_ckpt.manifest import step_name
from forge_ckpt.store import Store
from forge_config import Change, ConfigError, MayChange, judge, to_toml

from forge_trainer.config.job import load_job
from forge_trainer.recovery.incidents import ROLLBACK, append_incident, read_rollbacks
from forge_trainer.run_dir.files import RunFiles, append_history, read_job, require_trust

log = logging.getLogger(__name__)


def branch_run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Run `forge branch`: make the directory of the new run; `forge train` on its `config.toml` starts it.

    Raises:
        ConfigError: the new run exists, a key may not change, or the old run has no such checkpoint.
        CheckpointError: the checkpoint is damaged, or a file cannot be read or written.
    """
    old, new = Path(options.directory), Path(options.out)
    if new.exists():
        raise ConfigError(f"{new} exists; choose another folder for the new run")
    place = [f'--job.name="{new.name}"', f'--job.root="{new.resolve().parent}"']
    require_trust(old)
    loaded = load_job(RunFiles(old).config, [*overrides, *place], branch=True)
    judged = judge(read_job(old), loaded.value)
    never = [str(one.change) for one in judged if one.may is MayChange.NEVER]
    if never:
        raise ConfigError(f"a branch of {old} cannot change {'; '.join(never)}: start a new run for that")
    steps = _steps(Store(RunFiles(old).checkpoints), options.step, old)
    partial = new.with_name(f".{new.name}-{secrets.token_hex(4)}.partial")
    recorded = [one.change for one in judged if one.may is MayChange.RECORDED]
    try:
        step, known = _copied(RunFiles(old).checkpoints, RunFiles(partial).checkpoints, steps)
        if RunFiles(old).environment.exists():
            shutil.copy(RunFiles(old).environment, RunFiles(partial).environment)
        # what earlier rollbacks have left out of the data, this checkpoint has not seen
        for rollback in read_rollbacks(old)[:known]:
            append_incident(partial, ROLLBACK, asdict(rollback))
        write_durably(RunFiles(partial).config, to_toml(loaded.value, imports=loaded.imports).encode())
        append_history(partial, step, [Change("job", str(old.resolve()), str(new.resolve())), *recorded])
        here, there = RunFiles(partial), RunFiles(new)
        Folders(here.checkpoints, marks=here.progress_marks[:1]).remember(step)
        sync(partial)
        partial.replace(new)
        sync(new.parent)
        Folders(there.checkpoints, marks=there.progress_marks).remember(step)
    except OSError as error:
        raise CheckpointError(f"{new} cannot be made from {old}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sys.stdout.write(f"{new} goes on from step {step} of {old}: forge train {RunFiles(new).config}\n")


def _copied(source: Path, target: Path, steps: Sequence[int]) -> tuple[int, int]:
    """Copy the first intact checkpoint of `steps`; return its step and its number of rollbacks.

    Raises:
        CheckpointError: no checkpoint is intact; the message describes the damage of the last one.
        OSError: a copy cannot be written.
    """
    for step in steps:
        name = step_name(step)
        try:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source / name, target / name)
            found = Store(target).verify(step)
        except (shutil.Error, FileNotFoundError) as error:
            if (source / name).exists():
                raise OSError(error.args[0][0][2] if isinstance(error, shutil.Error) else error) from None
            reason = "it was removed meanwhile"
        except (DamagedError, UnreadableError) as error:
            reason = str(error)
        else:
            for path in (*(target / name).iterdir(), target / name, target):
                sync(path)
            return step, found.meta.get("rollbacks", 0)
        log.warning("step %d is passed over: %s", step, reason)
    raise CheckpointError(f"step {step} cannot be copied: {reason}")


def _steps(store: Store, wanted: int | None, old: Path) -> list[int]:
    """Return the steps of the checkpoints to branch from, in the order of preference.

    Raises:
        ConfigError: the run has no checkpoint, or not the wanted one.
    """
    steps = store.steps()
    if not steps:
        raise ConfigError(f"{old} has no checkpoint")
    if wanted is not None and wanted not in steps:
        has = ", ".join(map(str, steps))
        raise ConfigError(f"{old} has no checkpoint of step {wanted}; it has {has}")
    return steps[::-1] if wanted is None else [wanted]
