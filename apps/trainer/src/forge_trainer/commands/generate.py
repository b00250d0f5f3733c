"""`forge generate`: continues prompts of the command line, of a file, or typed by the user."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from forge_config import ConfigError, ForgeError
from forge_data.tokenizer.tokenizer import Tokenizer, stop_ids, with_bos
from forge_model.config import ModelConfig
from forge_model.error import ModelError
from forge_model.generation.generate import Sampling, generate
from forge_model.model_config import Prompt
from torch import nn

from forge_trainer.commands.evaluate import open_trained
from forge_trainer.commands.steps import is_series, of_each_step, require_none
from forge_trainer.endings import stops_of

DEFAULT_PROMPT = "def "


class Asked(NamedTuple):
    """A line of a file of prompts.

    Attributes:
        text: the prompt.
        images: paths of its images.
    """

    text: str
    images: tuple[Path, ...] = ()


class Writer:
    """A model with settings for generation.

    Args:
        model: a whole `Decoder` on one device.
        tokenizer: tokenizer of its run.
        config: configuration of the model.
        options: options of the command.
        stops: tokens that end an answer; default the stop tokens of the tokenizer.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        config: ModelConfig,
        options: argparse.Namespace,
        stops: Sequence[int] = (),
    ) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._max_tokens = config.max_tokens
        self._stops = list(stops or stop_ids(tokenizer))
        self._sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
        self._new_tokens = options.max_new_tokens
        self._ways = {"speculative": options.speculative, "compiled": options.compile}
        self._generator = torch.Generator(next(model.parameters()).device)
        self._seed = options.seed

    def prompt(self, prompt: str, images: Sequence[bytes] = (), others: bool = False) -> Prompt:
        """Build the input of the model for a prompt; an empty prompt begins a document.

        Args:
            prompt: text of the prompt.
            images: contents of its image files.
            others: whether other prompts of the batch have images.

        Raises:
            ConfigError: the prompt has characters that are no text, such as bytes that are not UTF-8; or the
                model does not support these images.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"given the prompt {prompt!r}; expected text in UTF-8: {error}") from None
        if not images and not (others and prompt):
            built = Prompt(with_bos(self._tokenizer, prompt) or [self._tokenizer.eos_id])
        else:
            try:
                built = self._config.prompt(prompt, images, self._tokenizer)
            except ValueError as error:
                raise ConfigError(f"the prompt {prompt!r}: {error}") from None
        if (most := max(built.tokens, default=0)) >= self._config.vocab_size:
            raise ConfigError(
                f"the prompt {prompt!r}: {self._tokenizer.spell([most])} is no text for this model; write "
                "<image> where an image stands"
            )
        return built

    def show(self, prompt: str, images: Sequence[bytes] = ()) -> None:
        """Print a prompt and its continuation, token by token."""
        built = self.prompt(prompt, images)
        tokens, inputs = built.tokens, batch_inputs([built], self._generator.device)
        decode, shown = self._tokenizer.decode, tokens[:]
        new_tokens = min(self._new_tokens, room_for(len(tokens), self._max_tokens))
        sys.stdout.write(decode(tokens))

        def show(new: list[int | None]) -> None:
            before = decode(shown)
            shown.extend(token for token in new if token is not None)
            after = decode(shown)
            # a character of several tokens appears once it is whole
            if not after.endswith("\N{REPLACEMENT CHARACTER}"):
                sys.stdout.write(after.removeprefix(before.rstrip("\N{REPLACEMENT CHARACTER}")))
                sys.stdout.flush()

        self._generator.manual_seed(self._seed)
        sampled = self._sampling, self._stops, self._generator
        generate(self._model, [tokens], new_tokens, *sampled, show, **self._ways, inputs=inputs)
        sys.stdout.write("\n")

    def continued(self, prompts: list[Asked], batch_size: int) -> Iterator[tuple[int, str]]:
        """Continue many prompts, in batches of similar length; yield index and text of each.

        Prompts that leave room for fewer tokens are in separate batches, so that they shorten no other one.

        Args:
            prompts: the lines of a file, with their images.
            batch_size: largest number of prompts in a batch.

        Raises:
            ConfigError: a prompt is no text or leaves no room; names its line.
        """
        rows, new, some = list[Prompt](), list[int](), any(prompt.images for prompt in prompts)
        for number, prompt in enumerate(prompts, 1):
            try:
                images = [_read_image(path, "--prompts") for path in prompt.images]
                rows.append(self.prompt(prompt.text, images, some))
                new.append(min(self._new_tokens, room_for(len(rows[-1].tokens), self._max_tokens)))
            except ForgeError as error:
                raise ConfigError(f"--prompts: line {number}: {error}") from None
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
        batches = [
            (new_tokens, alike[start : start + batch_size])
            for new_tokens, group in groupby(order, key=lambda i: new[i])
            for alike in [list(group)]
            for start in range(0, len(alike), batch_size)
        ]
        self._generator.manual_seed(self._seed)
        for new_tokens, batch in batches:
            written = generate(
                self._model,
                [rows[i].tokens for i in batch],
                new_tokens,
                self._sampling,
                self._stops,
                self._generator,
                **self._ways,
                inputs=batch_inputs([rows[i] for i in batch], self._generator.device),
            )
            for index, answer in zip(batch, written, strict=True):
                text = [token for token in answer if token not in self._stops]
                yield index, self._tokenizer.decode(text)


def batch_inputs(prompts: Sequence[Prompt], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch of prompts other than tokens, padded on the left like the tokens."""
    longest, first = max(len(prompt.tokens) for prompt in prompts), prompts[0]
    found: dict[str, torch.Tensor] = {}
    for name in first.inputs:
        rows = [torch.from_numpy(prompt.inputs[name]) for prompt in prompts]
        if name in first.by_token:
            rows = [nn.functional.pad(row, (longest - row.shape[-1], 0)) for row in rows]
        found[name] = torch.cat(rows).to("cpu" if name in first.host else device)
    return found


def room_for(prompt_tokens: int, max_tokens: int) -> int:
    """Return how many tokens can follow a prompt.

    Raises:
        ModelError: no token can follow.
    """
    if prompt_tokens >= max_tokens:
        raise ModelError(
            f"given a prompt of {prompt_tokens} tokens, which leaves no room to write: expected fewer than "
            f"model.max_tokens = {max_tokens}; shorten it"
        )
    return max_tokens - prompt_tokens


def read_prompts(path: Path) -> list[Asked]:
    """Read the lines of a text file; of a `.jsonl` file, `prompt` and optional `images` of each line.

    Raises:
        ConfigError: the file cannot be read, or a line has no prompt.
    """
    try:
        # other characters that end a line for Python, such as U+2028, may stand in a string of JSON
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error}") from None
    lines = text.removesuffix("\n").split("\n") if text else []
    if path.suffix != ".jsonl":
        return [Asked(line) for line in lines]
    return [_asked(line, path, number) for number, line in enumerate(lines, 1)]


def _asked(line: str, path: Path, number: int) -> Asked:
    """Read a line of JSON; names of images are relative to its file."""
    try:
        row = json.loads(line)
        prompt, images = row["prompt"], row.get("images") or []
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        prompt, images = None, []
    names = [images] if isinstance(images, str) else images
    if not isinstance(prompt, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f'--prompts: line {number} of {path} is no {{"prompt": "..."}}, perhaps with "images": ["..."]'
        )
    return Asked(prompt, tuple(path.parent / name for name in names))


def generate_text(options: argparse.Namespace) -> None:
    """Run `forge generate`: print each prompt with its continuation; for a file of prompts, JSON lines."""
    require_none(of_each_step(options, lambda step: _generate_at(options, step))[1])


def _generate_at(options: argparse.Namespace, step: int | None) -> None:
    prompts = None if options.prompts is None else read_prompts(Path(options.prompts))
    job, model, *_ = open_trained(options, step)
    if is_series(options) and prompts is None:
        sys.stdout.write(f"step {step}:\n")
    tokenizer = job.data.tokenizer.build()
    writer = Writer(model, tokenizer, job.model, options, stops_of(job, tokenizer))
    images = [_read_image(Path(path), "--image") for path in options.image or ()]
    if images and (prompts is not None or options.interactive):
        raise ConfigError("--image belongs to --prompt; leave out --prompts and --interactive")
    if prompts is not None:
        texts = dict(writer.continued(prompts, options.batch_size or job.train.micro_batch))
        for index, prompt in enumerate(prompts):
            record = {"prompt": prompt.text, "text": texts[index]}
            record |= {"step": step} if is_series(options) else {}
            sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
        return
    for prompt in options.prompt or (_typed() if options.interactive else [DEFAULT_PROMPT]):
        try:
            writer.show(prompt, images)
        except ForgeError as error:
            if not options.interactive:
                raise
            sys.stdout.write(f"{error}\n")


def _read_image(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from None


def _typed() -> Iterator[str]:
    """Yield prompts from the keyboard, line by line, until the end of the input."""
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
