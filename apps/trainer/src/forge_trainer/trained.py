"""What one does with a run that exists: let it write, evaluate it, export it. In one process."""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from forge_ckpt import manifest
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.state import OPTIMIZER, model_tensors
from forge_ckpt.store import Store
from forge_ckpt.weights import write_weights
from forge_config import ConfigError
from forge_model.config import DecoderConfig
from forge_model.hf import config_to_hf, tensors_of, to_hf
from forge_parallel.apply import materialize
from forge_parallel.mesh import Mesh
from torch import Tensor, nn

from forge_trainer.eval_config import prefixed
from forge_trainer.evaluations import open_evaluations
from forge_trainer.job import Job
from forge_trainer.optim import OptimizerConfig
from forge_trainer.run_dir import RunFiles, read_job

log = logging.getLogger(__name__)


def load_model(job: Job) -> tuple[nn.Module, int]:
    """The model of a run on one device, whole, and the step of its newest checkpoint that is intact.

    Weights are float32, or bfloat16 with `precision.pure_bf16`. A damaged checkpoint is passed over with a
    warning.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = job.model.build()
    materialize(model, device)
    if job.precision.pure_bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    store = Store(RunFiles(job.job.directory).checkpoints)
    for step in reversed(store.steps()):
        try:
            _load(store, step, model, job.optimizer)
            return model.eval(), step
        except (DamagedError, UnreadableError) as error:
            log.warning("the checkpoint of step %d is passed over: %s", step, error)
    raise CheckpointError(f"there is no intact checkpoint in {store.root}")


@torch.no_grad()
def _load(store: Store, step: int, model: nn.Module, optimizer: OptimizerConfig) -> None:
    """Read the weights to evaluate, which may need state of the optimizer."""
    opened, targets = manifest.read(store.folder(step)), model_tensors(model)
    averages: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        keys = {kind: f"{OPTIMIZER}{kind}.{name}" for kind in optimizer.averages}
        if keys and all(key in opened.tensors for key in keys.values()):
            dtypes = {kind: getattr(torch, opened.tensors[key].dtype) for kind, key in keys.items()}
            averages[name] = {kind: torch.empty_like(parameter, dtype=dtypes[kind]) for kind in keys}
            targets |= {key: averages[name][kind] for kind, key in keys.items()}
    store.load(step, targets)
    for name, state in averages.items():
        parameter = model.get_parameter(name)
        parameter.copy_(optimizer.evaluated(parameter, state))


def evaluate_run(options: argparse.Namespace) -> None:
    """`forge eval`: the loss on the held-out text and on sets, or what `--tasks` say."""
    job = read_job(Path(options.directory))
    model, step = load_model(job)
    if options.tasks is not None:
        from forge_trainer.tasks import evaluate_tasks

        sys.stdout.write(f"{options.directory} at step {step}\n")
        return evaluate_tasks(model, job.data.tokenizer.build(), job.train.micro_batch, options)
    mesh = Mesh(next(model.parameters()).device)
    sets = open_evaluations(job, mesh)
    if not sets:
        raise ConfigError(
            f"{options.directory} has no text to evaluate on: no source holds any out, and there is no "
            "[eval.sets]; name --tasks"
        )
    evaluate = job.step.build([model], job.loss.build(), mesh).evaluate
    results = {name: evaluate(batches) for name, batches in sets.items()}
    for name, numbers in results.items():
        told = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
        sys.stdout.write(f"{options.directory} at step {step}{name and f', {name}'}: {told}\n")
    if options.json is not None:
        record = {"step": step}
        for name, numbers in results.items():
            record |= prefixed(name, numbers)
        write_json(Path(options.json), record)


def write_json(path: Path, found: Any) -> None:
    """Write results for programs.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error}") from None


def export_run(options: argparse.Namespace) -> None:
    """`forge export`: weights as Hugging Face safetensors, configs and tokenizer; all of it or nothing."""
    job = read_job(Path(options.directory))
    model, step = load_model(job)
    assert isinstance(job.model, DecoderConfig)
    tensors = to_hf(tensors_of(model), job.model)
    ids = {"bos_token_id": None, "eos_token_id": job.data.tokenizer.build().eos_id}
    folder, files = Path(options.out), job.data.tokenizer.hf_files(job.model.max_tokens)
    more = {"generation_config.json": json.dumps(ids, indent=2) + "\n"}
    write_weights(folder, tensors, config_to_hf(job.model) | ids, files=files | more)
    with_tokenizer = "and the tokenizer" if files else "(this type of tokenizer has no Hugging Face form)"
    sys.stdout.write(f"wrote {len(tensors)} tensors of step {step} to {folder} {with_tokenizer}\n")
