"""Treats the folder of a Hugging Face model as a run, for commands that evaluate a model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from forge_ckpt.error import CheckpointError
from forge_ckpt.interop.weights import Weights
from forge_ckpt.state import MODEL, model_tensors
from forge_config import ConfigError
from forge_data.config import DataConfig, HfTokenizerConfig
from forge_data.sources.config import FilesConfig
from forge_data.tokenizer.chat import special_tokens_beside
from forge_data.tokenizer.hf import eos_ids, generation_beside
from forge_model.config import LossConfig, ModelConfig
from forge_model.hf.config import config_from_hf, read_config
from forge_model.hf.families import FAMILIES
from forge_parallel.apply import materialize
from forge_vlm.hf.models import model_from_hf, whole_family
from forge_vlm.hf.processor import processed
from msgspec.structs import replace
from torch import Tensor, nn

from forge_trainer.checkpoints.init_from import form_of
from forge_trainer.checkpoints.initial_weights import require_numbers
from forge_trainer.config.job import Job, JobConfig
from forge_trainer.config.train import TrainConfig
from forge_trainer.optim import AdamWConfig
from forge_trainer.run_dir.files import RunFiles
from forge_trainer.schedule import ConstantConfig

TOKENS = 2048
"""The default of the most tokens of a sequence."""
BATCH = 8
"""The default of the number of sequences that are computed at once."""


def is_published(folder: Path) -> bool:
    """Return whether a folder contains a Hugging Face model, and not a run."""
    return (folder / "config.json").exists() and not RunFiles(folder).config.exists()


def job_of(options: argparse.Namespace) -> Job:
    """Make a job for the model in the folder `options.directory`; it is never trained.

    Raises:
        ConfigError, ModelError: the model or its tokenizer is not supported.
    """
    folder = Path(options.directory)
    model = _model_of(folder, keeps_ahead=getattr(options, "speculative", False))
    tokens = min(getattr(options, "max_tokens", None) or min(TOKENS, model.max_tokens), model.max_tokens)
    data = DataConfig(
        max_tokens=tokens,
        sources=[FilesConfig(paths=[str(folder)]).whole()],  # never read
        tokenizer=HfTokenizerConfig(path=str(folder), eos=end_of_text(folder)),
        packing="pad",
    )
    if data.tokenizer.vocab_size > model.tokenizer_ids:
        raise ConfigError(
            f"the tokenizer of {folder} has {data.tokenizer.vocab_size} ids, and its model "
            f"vocab_size = {model.vocab_size}; expected the tokenizer of the model"
        )
    return Job(
        job=JobConfig(name="published", root=str(folder)),
        model=model,
        data=data,
        train=TrainConfig(steps=1, micro_batch=BATCH, global_batch=BATCH, init_from=str(folder)),
        optimizer=AdamWConfig(lr=1.0),
        schedule=ConstantConfig(),
        loss=LossConfig(),
    )


def _model_of(folder: Path, keeps_ahead: bool) -> ModelConfig:
    """Return the model; `keeps_ahead` keeps modules for multi-token prediction, which are often missing."""
    hf = read_config(folder)
    if any(family.model_type == hf.get("model_type") for family in FAMILIES):
        decoder = config_from_hf(hf)
        return decoder if keeps_ahead else replace(decoder, mtp=type(decoder.mtp)())
    if isinstance(hf.get("text_config"), dict):
        return processed(model_from_hf(hf), folder, whole_family(hf.get("model_type")).kind)
    config_from_hf(hf)  # says which types there are
    raise AssertionError


def end_of_text(folder: Path) -> str:
    """Return the token that ends a text, as named by the files of the tokenizer, else of the model.

    Raises:
        ConfigError: there is no `tokenizer.json`, or no file names the token that ends a text.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"there is no {folder / 'tokenizer.json'}; expected the tokenizer beside the model, as "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
        )
    if (named := special_tokens_beside(folder).get("eos_token")) is not None:
        return named
    from tokenizers import Tokenizer

    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for index in eos_ids(generation_beside(folder)):
        if (text := rust.id_to_token(index)) is not None:
            return text
    raise ConfigError(
        f"nothing in {folder} says which token ends a text: expected eos_token in tokenizer_config.json, or "
        "eos_token_id in generation_config.json"
    )


@torch.no_grad()
def load_published(model: nn.Module, job: Job, folder: Path, device: torch.device) -> None:
    """Materialize a model on the meta device with the weights of a folder.

    Raises:
        CheckpointError, ModelError: the weights cannot be read, or do not fit the model.
    """
    weights, form = Weights(folder), form_of(job.model, str(folder))
    theirs: Mapping[str, Tensor] = form.ours(weights)
    materialize(model, device)
    for name, tensor in model_tensors(model).items():
        loaded: Any = theirs[name.removeprefix(MODEL)]
        require_numbers(name, loaded.dtype, tensor, str(folder))
        if loaded.shape != tensor.shape:
            raise CheckpointError(
                f"{name.removeprefix(MODEL)} of {folder} is {list(loaded.shape)}; its config.json means "
                f"{list(tensor.shape)}"
            )
        tensor.copy_(loaded)
