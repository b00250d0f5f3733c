"""`forge eval` on several ranks that share the model as in training, for models too large for one device."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.state import MODEL, model_tensors
from forge_ckpt.store import Store
from forge_config import ConfigError
from forge_parallel.env import Env, process_group
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.tensor import local_shard
from torch import nn

from forge_trainer.build import build_parts
from forge_trainer.commands.evaluate import Evaluated, model_on_meta
from forge_trainer.commands.published import is_published
from forge_trainer.commands.steps import chosen_steps
from forge_trainer.config.job import Job
from forge_trainer.ranks import from_first
from forge_trainer.run_dir.files import RunFiles, read_job


class Shared(NamedTuple):
    """A model that the ranks share.

    Attributes:
        job: configuration of its run.
        mesh: mesh of the job on the present ranks.
        parts: this rank's parts of the model, with the weights of the last loaded step.
    """

    job: Job
    mesh: Mesh
    parts: list[nn.Module]

    @property
    def run(self) -> Any:
        """The attributes of a `Run` that `TrainedModel` reads."""
        step = self.job.step.build(self.parts, self.job.loss.build(), self.mesh)
        return SimpleNamespace(job=self.job, mesh=self.mesh, parts=self.parts, step=step)

    def steps(self, options: argparse.Namespace) -> list[int]:
        """Return the steps of `--step`, or all steps, newest first, as found by the first rank. Collective.

        Raises:
            ConfigError: there is no such step.
        """

        def find() -> list[int] | str:
            try:
                found = chosen_steps(options)
            except ConfigError as error:
                return str(error)
            store = Store(RunFiles(self.job.job.directory).checkpoints)
            return store.steps()[::-1] if found == [None] else cast("list[int]", found)

        found = from_first(find, self.mesh.control_group)
        if isinstance(found, str):
            raise ConfigError(found)
        return found

    def load(self, step: int) -> str | None:
        """Load the weights of a checkpoint into the parts, tensor by tensor. Collective.

        Returns:
            The reason why any rank cannot read it; None if all ranks can.
        """
        try:
            self._fill(step)
            message = None
        except (DamagedError, UnreadableError) as error:
            message = str(error)
        every: list[str | None] = [None] * dist.get_world_size(self.mesh.control_group)
        dist.all_gather_object(every, message, group=self.mesh.control_group)
        return next((one for one in every if one is not None), None)

    @torch.no_grad()
    def _fill(self, step: int) -> None:
        store = Store(RunFiles(self.job.job.directory).checkpoints)
        weights = Evaluated(store, step, model_on_meta(self.job), self.job.optimizer)
        for part in self.parts:
            for name, tensor in model_tensors(part).items():
                shard = local_shard(tensor)
                box = [slice(o, o + n) for o, n in zip(shard.offsets, shard.values.shape, strict=True)]
                shard.values.copy_(weights[name.removeprefix(MODEL)][tuple(box)])


@contextmanager
def open_shared(options: argparse.Namespace, change: Callable[[Job], Job]) -> Iterator[Shared]:
    """Open the process group and the model of a run, without weights. Collective.

    All ranks but the first print nothing.

    Args:
        options: options of the command.
        change: applies the command's changes to the job.

    Raises:
        ConfigError: the folder is no run.
    """
    env = Env.detect()
    if is_published(Path(options.directory)):
        raise ConfigError(
            f"{options.directory} is no run: it is evaluated in one process, and there are {env.world_size}"
        )
    job = change(read_job(Path(options.directory), options.overrides))
    job.require_mesh(env.world_size)
    timeout_s, quiet = job.resilience.collective_timeout_s, _quiet(env.rank > 0)
    with process_group(env, True, timeout_s, job.process_group), quiet:
        mesh = build_mesh(job.mesh, env)
        yield Shared(job, mesh, build_parts(job, mesh))


@contextmanager
def _quiet(is_quiet: bool) -> Iterator[None]:
    if not is_quiet:
        yield
        return
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def of_each_shared(
    shared: Shared, options: argparse.Namespace, make: Callable[[int], Any], is_series: bool
) -> tuple[list[Any], list[str]]:
    """Call a function for each step; return its results, and why steps were skipped. Collective.

    Without `--step`, it is called for the newest intact step; with it, see `of_each_step`.
    """
    newest, made, damaged = options.step is None, list[Any](), list[str]()
    steps: Sequence[int] = shared.steps(options)
    for step in steps:
        if (wrong := shared.load(step)) is not None:
            if not newest and not is_series:
                raise CheckpointError(wrong)
            sys.stderr.write(f"step {step} is passed over: {wrong}\n")
            damaged.append(f"step {step}: {wrong}")
            continue
        made.append(make(step))
        if newest:
            return made, []
    if newest:
        folder = RunFiles(Path(options.directory)).checkpoints
        raise CheckpointError(f"there is no intact checkpoint in {folder}")
    return made, damaged
