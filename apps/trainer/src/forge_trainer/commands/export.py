"""`forge export`: writes the weights of a run as Hugging Face files."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forge_ckpt.interop.weights import write_weights
from forge_ckpt.state import MODEL, model_tensors
from forge_data.tokenizer.tokenizer import Tokenizer
from forge_model.config import ComposedConfig
from forge_model.error import ModelError
from torch import Tensor

from forge_trainer.checkpoints.init_from import form_of
from forge_trainer.commands.evaluate import model_on_meta, take_step
from forge_trainer.commands.steps import folder_of, is_series, of_each_step, require_none
from forge_trainer.config.job import Job
from forge_trainer.endings import generation_of, trained_template
from forge_trainer.run_dir.files import RunFiles, read_job


class Cast(Mapping[str, Tensor]):
    """Tensors whose floating-point numbers are converted to one dtype; each is read on access.

    Args:
        tensors: tensors by name.
        dtype: dtype of the result; None leaves tensors as they are.
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
        config: content of `config.json`.
        files: text of further files by name.
        theirs: renames our tensors to the exported names.
        why: message about the form of the export.
    """

    config: Mapping[str, Any]
    files: Mapping[str, str]
    theirs: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    why: str


def _export_of(job: Job, run: Path, tokenizer: Tokenizer) -> _Export:
    """Choose the form: a model of transformers, or our own format for a composed model without such a class.

    Raises:
        ModelError: the model has no form for an export.
    """
    form, known = form_of(job.model, "forge export"), tokenizer.vocab_size
    settings = json.loads(
        job.data.tokenizer.hf_files(job.model.max_tokens).get("tokenizer_config.json", "{}")
    )
    try:
        config = form.config()

        def spell(token: int | None) -> str:
            if token is None:
                return str(settings.get("bos_token") or "")
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
    """Run `forge export`: write safetensors, configs and tokenizer of Hugging Face; all files or none.

    Tensors are read, renamed and written one by one, so that the model is never in memory. With several
    steps, each step has its folder in `out`.
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
