"""Loads the model of a run at a step, and runs `forge eval`."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.state import MODEL, OPTIMIZER, model_tensors
from forge_ckpt.store import Store
from forge_config import ConfigError
from forge_data.sources.config import FilesConfig
from forge_parallel.apply import materialize
from forge_parallel.env import Env
from forge_parallel.mesh import Mesh
from msgspec.structs import replace
from torch import Tensor, nn

from forge_trainer.commands.steps import flat, is_series, of_each_step, require_none, write_table
from forge_trainer.config.eval import EvalSetConfig, prefixed
from forge_trainer.config.job import Job
from forge_trainer.data.evaluation_sets import open_evaluations
from forge_trainer.endings import stops_of
from forge_trainer.optim import OptimizerConfig
from forge_trainer.run_dir.files import RunFiles, read_job

log = logging.getLogger(__name__)

LAYOUT = ("mesh", "tensor_parallel", "context_parallel", "expert_parallel", "pipeline", "fsdp")
"""The sections that say how ranks share a model and its work."""


class Evaluated(Mapping[str, Tensor]):
    """The weights of a checkpoint to evaluate, which may depend on optimizer state; each is read on access.

    Args:
        store: the store of the checkpoints.
        step: step of the checkpoint.
        model: the model of the weights; may be on the meta device.
        optimizer: configuration of the optimizer, which computes the weights to evaluate.

    Raises:
        CheckpointError: the model has other tensors.
        DamagedError, UnreadableError: as for `Store.load`; also on access to a weight.
    """

    def __init__(self, store: Store, step: int, model: nn.Module, optimizer: OptimizerConfig) -> None:
        ours = model_tensors(model)
        store.require_fit(step, ours)
        self._names = [name.removeprefix(MODEL) for name in ours]
        self._there, self._optimizer = store.tensors(step), optimizer

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        value = self._there[MODEL + name]
        keys = {kind: f"{OPTIMIZER}{kind}.{name}" for kind in self._optimizer.averages}
        if not keys or not all(key in self._there.manifest.tensors for key in keys.values()):
            return value
        return self._optimizer.evaluated(value, {kind: self._there[key] for kind, key in keys.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Trained(NamedTuple):
    """A trained model for evaluation.

    Attributes:
        job: the job of its run, or a job made for a Hugging Face model.
        model: the whole model on one device, in the compute format of training.
        name: origin of the model, for a person.
        record: origin of the model, for programs.
    """

    job: Job
    model: nn.Module
    name: str
    record: dict[str, Any]


def open_trained(options: argparse.Namespace, step: int | None = None) -> Trained:
    """Load the model of the run (at a step) or of the Hugging Face folder in `options.directory`.

    Raises:
        CheckpointError, ConfigError, ModelError: there is no such model, or it is not supported.
    """
    from forge_trainer.commands.published import is_published, job_of, load_published

    folder = Path(options.directory)
    if not is_published(folder):
        if getattr(options, "max_tokens", None) is not None:
            raise ConfigError(
                f"--max-tokens is for a Hugging Face model, and {folder} is a run: its sequences are as long "
                "as data.max_tokens says; leave it out"
            )
        job = read_job(folder)
        model, step = load_model(job, computing=True, step=step)
        return Trained(job, model, f"{options.directory} at step {step}", {"step": step})
    job, device = job_of(options), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_on_meta(job)
    load_published(model, job, folder, device)
    _in_compute_format(model, job, device)
    return Trained(job, model.eval(), str(options.directory), {})


def load_model(job: Job, computing: bool = False, step: int | None = None) -> tuple[nn.Module, int]:
    """Load the whole model of a run on one device; return it and the step of its checkpoint.

    A damaged checkpoint is skipped with a warning, unless `step` names it.

    Args:
        job: the configuration.
        computing: whether weights are in the compute format of training (`precision.compute`), as in its
            evaluations; otherwise they are in their stored format: float32, or bfloat16 with
            `precision.pure_bf16`.
        step: step of the checkpoint; default the newest intact one.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_on_meta(job)
    materialize(model, device)

    @torch.no_grad()
    def load(weights: Mapping[str, Tensor]) -> None:
        for name, tensor in model_tensors(model).items():
            tensor.copy_(weights[name.removeprefix(MODEL)])

    step = take_step(job, model, load, step)
    if computing:
        _in_compute_format(model, job, device)
    return model.eval(), step


@torch.no_grad()
def _in_compute_format(model: nn.Module, job: Job, device: torch.device) -> None:
    """Convert all parameters, but no buffers, to the compute format, as FSDP2 does; keep float64."""
    if job.precision.compute_dtype(device.type) == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)


def model_on_meta(job: Job) -> nn.Module:
    """Build the model of a run on the meta device, in the dtype of its weights."""
    with torch.device("meta"):
        model = job.model.build()
    if job.precision.pure_bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def take_step(
    job: Job, model: nn.Module, take: Callable[[Mapping[str, Tensor]], None], step: int | None = None
) -> int:
    """Call a function with the weights of a checkpoint of a run, by default the newest intact one.

    The function is called again with another checkpoint if weights turn out to be damaged, or if the
    active run removed them meanwhile.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: there is no intact checkpoint, or the checkpoint of `step` is damaged.
    """
    if step is not None:
        store = Store(RunFiles(job.job.directory).checkpoints)
        take(Evaluated(store, step, model, job.optimizer))
        return step
    store, tried = Store(RunFiles(job.job.directory).checkpoints), set[int]()
    while left := {*store.steps()} - tried:
        tried.add(step := max(left))
        try:
            take(Evaluated(store, step, model, job.optimizer))
            return step
        except (DamagedError, UnreadableError) as error:
            log.warning("the checkpoint of step %d is passed over: %s", step, error)
    raise CheckpointError(f"there is no intact checkpoint in {store.root}")


def evaluate_run(options: argparse.Namespace) -> None:
    """Run `forge eval`: the loss on held-out text, evaluation sets or `--text`, or scores of `--tasks`."""
    if options.tasks is not None and options.text:
        raise ConfigError("--tasks bring their own text: give --text in a command of its own")
    env = Env.detect()
    _require_layout_keys(options.overrides, env.world_size)
    if env.world_size > 1:
        found, damaged = _evaluate_shared(options)
        if env.rank > 0:
            return require_none(damaged)
    else:
        found, damaged = of_each_step(options, lambda step: _evaluate_step(options, step))
    if options.json is not None:
        write_json(Path(options.json), found if is_series(options) else found[0])
    if is_series(options) or options.table is not None:
        write_table([flat(one) for one in found], None if options.table is None else Path(options.table))
    require_none(damaged)


def _require_layout_keys(overrides: Sequence[str], world_size: int) -> None:
    """Check that overrides concern only the layout, and only if there are several ranks."""
    unknown = [key for key in overrides if not key.startswith(tuple(f"--{name}." for name in LAYOUT))]
    if unknown:
        sections = ", ".join(f"[{name}]" for name in LAYOUT)
        raise ConfigError(
            f"given {' '.join(unknown)}; expected no keys but those of {sections}, as --mesh.tp=2"
        )
    if overrides and world_size == 1:
        raise ConfigError(
            f"given {' '.join(overrides)} in one process; expected several ranks to lay out: start it by "
            "torchrun, or leave it out"
        )


def _evaluate_shared(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Evaluate each checkpoint on ranks that share the model. Collective."""
    from forge_trainer.commands.shared import of_each_shared, open_shared

    with open_shared(options, lambda job: _with_text(job, options)) as shared:
        job, mesh, parts = shared

        def evaluate(step: int) -> dict[str, Any]:
            place, record = f"{options.directory} at step {step}", {"step": step}
            if options.tasks is None:
                return _evaluate_texts(options, job, parts, mesh, place, record)
            from forge_trainer.hooks.harness import evaluate_shared

            sys.stdout.write(f"{place}\n")
            found = evaluate_shared(shared.run, options)
            return record | found if is_series(options) else found

        return of_each_shared(shared, options, evaluate, is_series(options))


def _evaluate_step(options: argparse.Namespace, step: int | None) -> dict[str, Any]:
    """Evaluate one checkpoint and print its results."""
    job, model, place, record = open_trained(options, step)
    if options.tasks is not None:
        from forge_trainer.commands.harness import evaluate_tasks

        sys.stdout.write(f"{place}\n")
        tokenizer = job.data.tokenizer.build()
        stops = stops_of(job, tokenizer)
        found = evaluate_tasks(model, tokenizer, job.model, job.train.micro_batch, options, stops)
        return record | found if is_series(options) else found
    mesh = Mesh(next(model.parameters()).device)
    return _evaluate_texts(options, _with_text(job, options), [model], mesh, place, record)


def _evaluate_texts(
    options: argparse.Namespace,
    job: Job,
    parts: list[nn.Module],
    mesh: Mesh,
    place: str,
    record: dict[str, Any],
) -> dict[str, Any]:
    """Evaluate all texts, print their losses and add them to the record. Collective."""
    sets, lacks = open_evaluations(job, mesh)
    if not sets:
        why = "; ".join(lacks) or "no source holds any out"
        raise ConfigError(
            f"{options.directory} has no text to evaluate on: {why}, and there is no [eval.sets]; name files "
            "by --text, or --tasks"
        )
    evaluate = job.step.build(parts, job.loss.build(), mesh).evaluate
    results = {name: evaluate(batches) for name, batches in sets.items()}
    for name, numbers in results.items():
        text = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
        sys.stdout.write(f"{place}{name and f', {name}'}: {text}\n")
    for name, numbers in results.items():
        record |= prefixed(name, numbers)
    return record


def _with_text(job: Job, options: argparse.Namespace) -> Job:
    """Return a job that is evaluated on the files of `--text` alone; without `--text`, the same text."""
    batch, texts = options.batch_size or job.train.micro_batch, options.text
    job = replace(job, train=replace(job.train, micro_batch=batch))
    if not texts:
        return job
    data = replace(job.data, sources=[source.whole() for source in job.data.sources])
    texts = EvalSetConfig(sources=[FilesConfig(paths=texts)], samples=0)
    return replace(job, data=data, eval=replace(job.eval, sets={"text": texts}))


def write_json(path: Path, found: Any) -> None:
    """Write results for programs.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error}") from None
