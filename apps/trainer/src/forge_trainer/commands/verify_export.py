"""Compares an export, loaded by `transformers`, with the run: tokens and logits."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

import torch
from forge_ckpt.error import CheckpointError
from forge_config import ConfigError
from forge_data.tokenizer.tokenizer import with_bos
from forge_model.config import ModelConfig
from torch import nn

from forge_trainer.commands.evaluate import load_model
from forge_trainer.commands.steps import folder_of, is_series, of_each_step, require_none
from forge_trainer.config.job import Job
from forge_trainer.run_dir.files import read_job

TOLERANCE = 1e-4
"""The tolerance relative to the largest logit: both sides compute in float32, in different orders."""
TEXTS = (
    "The end, isn't it? 12345 + 6.7",
    "  two  spaces\n\n\tand lines\r\n",
    "na\u00efve cafe\u0301 \u6771\u4eac \U0001f642",
    "def f(x_1):\n    return [x_1]",
)
"""Texts on which tokenizers differ: digits, apostrophes, spaces, lines, forms of accents, other letters."""
TOKENS = (4, 64)
"""The largest number of sequences, and of tokens in each, whose logits are compared."""


@torch.no_grad()
def verify_export(options: argparse.Namespace) -> None:
    """Run `forge verify-export`: compare tokens and logits of an export in `transformers` with the run.

    Only text is compared, no images.

    Raises:
        ConfigError: `transformers` is not installed.
        CheckpointError: `transformers` cannot load the export, or tokens or logits differ; says by how
            much.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError:
        raise ConfigError("forge verify-export needs transformers: pip install 'transformers>=5'") from None
    out, classes = Path(options.out), (AutoModelForCausalLM, AutoModelForImageTextToText)

    def verify(step: int | None) -> None:
        folder = folder_of(out, step) if is_series(options) and step is not None else out
        _verify_step(options, step, folder, classes)

    require_none(of_each_step(options, verify)[1])


def _verify_step(
    options: argparse.Namespace, asked: int | None, folder: Path, classes: tuple[Any, Any]
) -> None:
    job = read_job(Path(options.directory))
    model, step = load_model(job, step=asked)
    device = next(model.parameters()).device
    if not (folder / "config.json").exists():
        raise CheckpointError(f"there is no {folder / 'config.json'}; expected what forge export wrote")
    try:
        loads = classes[job.model.items() is not None]
        theirs = cast(nn.Module, loads.from_pretrained(folder, dtype=torch.float32))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers does not load {folder}: {error}") from None
    require_tokens(job, folder)
    if json.loads((folder / "config.json").read_text()).get("dtype") == "bfloat16":
        model.to(torch.bfloat16)  # the numbers that the export holds
    draw = torch.Generator().manual_seed(0)
    model.float()
    theirs.to(device).eval()
    apart, compared = 0.0, 0
    for shape in _shapes(job.model):
        tokens = torch.randint(job.model.vocab_size, shape, generator=draw).to(device)
        few = shape[1] <= TOKENS[1]
        ours = model(tokens, **({} if few else {"last_logits": TOKENS[1]})).float()
        logits = theirs(tokens, **({} if few else {"logits_to_keep": TOKENS[1]})).logits.float()
        if ours.shape != logits.shape:
            raise CheckpointError(f"{folder} has logits {list(logits.shape)}; the run has {list(ours.shape)}")
        apart = max(apart, float((ours - logits).abs().max() / ours.abs().max()))
        compared += ours.shape[0] * ours.shape[1]
    message = f"{folder} and step {step} of {options.directory}: logits differ by {apart:.2g} of the largest"
    if not apart <= TOLERANCE:
        raise CheckpointError(f"{message}; expected at most {TOLERANCE:g}: is it the export of this step?")
    sys.stdout.write(f"{message}, at most, in {compared} tokens\n")


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Return numbers of sequences and tokens; with rotations that depend on length, also at the border."""
    lengths = [
        n for border in config.length_borders() for n in (border, border + 1) if n <= config.max_tokens
    ]
    return [(TOKENS[0], min(TOKENS[1], config.max_tokens)), *((1, length) for length in lengths)]


def require_tokens(job: Job, folder: Path) -> None:
    """Check that `transformers` tokenizes texts as the run does.

    Raises:
        CheckpointError: it does not: for some types of models `transformers` has a tokenizer class that uses
            only the vocabulary of `tokenizer.json` and splits words differently.
    """
    if not (folder / "tokenizer.json").exists():
        return
    from transformers import AutoTokenizer

    tokenizer = job.data.tokenizer.build()
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot read the tokenizer: {error}") from error
    for text in TEXTS:
        mine, its = with_bos(tokenizer, text), theirs(text).input_ids
        if mine != its:
            raise CheckpointError(
                f"{folder}: AutoTokenizer of transformers, here a {type(theirs).__name__}, reads {text!r} as "
                f"{its}, and the run as {mine}; load the tokenizer by "
                "PreTrainedTokenizerFast.from_pretrained, which does as tokenizer.json says"
            )
