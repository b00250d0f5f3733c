"""What one does with a run that exists: let it write, evaluate it, export it. In one process."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forge_ckpt.error import CheckpointError, DamagedError, UnreadableError
from forge_ckpt.interop.weights import write_weights
from forge_ckpt.state import MODEL, OPTIMIZER, model_tensors
from forge_ckpt.store import Store
from forge_config import ConfigError
from forge_data.sources.config import FilesConfig
from forge_data.tokenizer.tokenizer import Tokenizer
from forge_model.config import ComposedConfig
from forge_model.error import ModelError
from forge_parallel.apply import materialize
from forge_parallel.env import Env
from forge_parallel.mesh import Mesh
from msgspec.structs import replace
from torch import Tensor, nn

from forge_trainer.checkpoints.init_from import form_of
from forge_trainer.commands.steps import flat, folder_of, is_series, of_each_step, require_none, write_table
from forge_trainer.config.eval import EvalSetConfig, prefixed
from forge_trainer.config.job import Job
from forge_trainer.data.evaluation_sets import open_evaluations
from forge_trainer.endings import generation_of, stops_of, trained_template
from forge_trainer.optim import OptimizerConfig
from forge_trainer.run_dir.files import RunFiles, read_job

log = logging.getLogger(__name__)


class Evaluated(Mapping[str, Tensor]):
    """The weights of a checkpoint to evaluate, which may need state of the optimizer; each read when taken.

    Args:
        store: the checkpoints.
        step: of the one.
        model: whose weights they are; may be on the meta device.
        optimizer: says what is evaluated.

    Raises:
        CheckpointError: the model has other tensors.
        DamagedError, UnreadableError: as for `Store.load`; also when one is taken.
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
    """A model to look at.

    Attributes:
        job: of its run, or one as if there were a run.
        model: in the format in which training computes, whole on one device.
        name: where it is from, for a person.
        record: the same for programs.
    """

    job: Job
    model: nn.Module
    name: str
    record: dict[str, Any]


def open_trained(options: argparse.Namespace, step: int | None = None) -> Trained:
    """The model of a run at a step, or of a folder of Hugging Face, that `options.directory` names.

    Raises:
        CheckpointError, ConfigError, ModelError: there is none, or it cannot be followed.
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
    """The model of a run on one device, whole, and the step of its newest checkpoint that is intact.

    A damaged checkpoint is passed over with a warning, unless its step is asked for.

    Args:
        job: the configuration.
        computing: weights are in the format in which training computes (`precision.compute`), as in its own
            evaluations; otherwise in that in which they are kept: float32, or bfloat16 with
            `precision.pure_bf16`.
        step: of the checkpoint; the newest that is intact if absent.

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
    """As FSDP2 does: all parameters, no buffers; float64 stays."""
    if job.precision.compute_dtype(device.type) == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)


def model_on_meta(job: Job) -> nn.Module:
    """The model of a run, without values, in the dtype of its weights."""
    with torch.device("meta"):
        model = job.model.build()
    if job.precision.pure_bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def take_step(
    job: Job, model: nn.Module, take: Callable[[Mapping[str, Tensor]], None], step: int | None = None
) -> int:
    """Call a function with the weights of a checkpoint of a run, by default of the newest that is intact.

    It is called again with another one where weights turn out to be damaged, or were removed by a run that
    went on meanwhile.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: there is no intact checkpoint, or that of the step is not.
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
    """`forge eval`: the loss on held-out text, evaluation sets or `--text`, or the scores of `--tasks`."""
    if options.tasks is not None and options.text:
        raise ConfigError("--tasks bring their own text: give --text in a command of its own")
    if (env := Env.detect()).world_size > 1:
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
    """Add the losses on all texts to the record and print them. Collective."""
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
        told = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items())
        sys.stdout.write(f"{place}{name and f', {name}'}: {told}\n")
    for name, numbers in results.items():
        record |= prefixed(name, numbers)
    return record


def _with_text(job: Job, options: argparse.Namespace) -> Job:
    """A job that is evaluated on the files of `--text` and on nothing else; itself without them."""
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


class Cast(Mapping[str, Tensor]):
    """Tensors whose floating-point numbers are of one dtype; each is read when it is taken.

    Args:
        tensors: by name.
        dtype: None leaves them as they are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        self._tensors, self._dtype = tensors, dtype

    def __getitem__(self, name: str) -> Tensor:
        value = self._tensors[name]
        return value.to(self._dtype) if self._dtype is not None and value.is_floating_point() else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Export(NamedTuple):
    """How a run is exported.

    Attributes:
        config: its `config.json`.
        files: text of more files by name.
        theirs: our tensors by the names that they are written with.
        why: what to tell about it.
    """

    config: Mapping[str, Any]
    files: Mapping[str, str]
    theirs: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    why: str


def _export_of(job: Job, run: Path, tokenizer: Tokenizer) -> _Export:
    """As a model of transformers; a composed model that none of its classes computes, in a folder of our own.

    Raises:
        ModelError: it has no form.
    """
    form, known = form_of(job.model, "forge export"), tokenizer.vocab_size
    told = json.loads(job.data.tokenizer.hf_files(job.model.max_tokens).get("tokenizer_config.json", "{}"))
    try:
        config = form.config()

        def spell(token: int | None) -> str:
            if token is None:
                return str(told.get("bos_token") or "")
            return tokenizer.spell([token]) if token < known else ""

        why = f"it is a {config['architectures'][0]} of transformers"
        lacks = form.lacks(spell)
        return _Export(config, form.files(spell), form.theirs, f"{why}\n{lacks}" if lacks else why)
    except ModelError as error:
        if not isinstance(job.model, ComposedConfig):
            raise
        files = {"config.toml": RunFiles(run).config.read_text(encoding="utf-8")}
        why = f"{error}\nso this is a folder of Forge's own: train.init_from takes it"
        return _Export({"model_type": "forge"}, files, lambda tensors: tensors, why)


def export_run(options: argparse.Namespace) -> None:
    """`forge export`: weights as Hugging Face safetensors, configs and tokenizer; all of it or nothing.

    Tensors are read, named and written one by one: the model never lies in memory. Of several steps, each has
    a folder of its own in `out`.
    """
    out = Path(options.out)

    def export(step: int | None) -> None:
        _export_step(options, step, folder_of(out, step) if is_series(options) and step is not None else out)

    require_none(of_each_step(options, export)[1])


def _export_step(options: argparse.Namespace, asked: int | None, folder: Path) -> None:
    job = read_job(Path(options.directory))
    model, tokenizer = model_on_meta(job), job.data.tokenizer.build()
    export = _export_of(job, Path(options.directory), tokenizer)
    as_dtype = partial(Cast, dtype=getattr(torch, options.dtype) if options.dtype else None)
    empty = {name.removeprefix(MODEL): tensor for name, tensor in model_tensors(model).items()}
    like = as_dtype(export.theirs(empty))
    generation, template = generation_of(job, tokenizer), trained_template(job, tokenizer)
    files = job.data.tokenizer.hf_files(job.model.max_tokens)
    more = {"generation_config.json": json.dumps(generation, indent=2) + "\n"}
    if files and template is not None:
        more["chat_template.jinja"] = template
        sys.stdout.write("the chat template is that of the conversations that the run was trained on\n")
    ids = {
        name: value
        for name, value in generation.items()
        if name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    hf, size, texts = {**export.config, **ids}, options.shard_bytes, {**files, **more, **export.files}
    hf |= {"dtype": options.dtype} if options.dtype else {}
    folder.parent.mkdir(parents=True, exist_ok=True)

    def write(weights: Mapping[str, Tensor]) -> None:
        write_weights(folder, as_dtype(export.theirs(weights)), hf, size, texts, like)

    step = take_step(job, model, write, asked)
    with_tokenizer = "and the tokenizer" if files else "(this type of tokenizer has no Hugging Face form)"
    sys.stdout.write(f"wrote {len(like)} tensors of step {step} to {folder} {with_tokenizer}\n{export.why}\n")
