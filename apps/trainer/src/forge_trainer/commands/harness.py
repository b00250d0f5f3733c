"""`forge eval RUN --tasks ...`: evaluates a run on tasks of lm-evaluation-harness, without an export."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from forge_config import ConfigError
from forge_data.tokenizer.tokenizer import Tokenizer, stop_ids, with_bos
from forge_model.attention.rope import row_positions
from forge_model.config import ModelConfig
from forge_model.generation.generate import Sampling, generate
from forge_model.model_config import Prompt
from torch import Tensor, nn

from forge_trainer.commands.generate import batch_inputs
from forge_trainer.commands.task_table import task_table
from forge_trainer.console import emit

try:
    from datasets.exceptions import DatasetsError
    from lm_eval import evaluator, utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:
    raise ConfigError("forge eval --tasks needs: pip install 'forge-trainer[tasks]'") from None

NEW_TOKENS = 256
"""The most new tokens of an answer, if a task gives no number."""
SORTED = 64
"""The number of batches of questions that are sorted by length together, with images in memory."""


class RunModel(TemplateLM):
    """A Forge model with the interface of the harness; it gives the same numbers as `hf` with an export.

    Args:
        model: a whole `Decoder` on one device.
        tokenizer: tokenizer of its run.
        batch_size: sequences that are computed at once.
        seed: seed of the sampled tokens.
        device: device of the computation; default the device of the parameters.
        stops: tokens that end an answer; default the stop tokens of the tokenizer.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        batch_size: int,
        seed: int = 0,
        device: torch.device | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        self._stops = list(stops or stop_ids(tokenizer))
        self._named: dict[str, int] = getattr(tokenizer, "named_ids", {})
        self._device = device or next(model.parameters()).device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self.max_length: int = model.config.max_tokens  # type: ignore[union-attr, assignment]

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text: `eos_token` of the exported tokenizer, if it has one."""
        return self._named.get("eos_token", self._tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before the first token of a text whose likelihood is computed."""
        bos = getattr(self._tokenizer, "bos_ids", ())
        return self._named.get("bos_token", bos[0] if bos else self.eot_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text, after the tokens that begin a document unless `add_special_tokens` is False."""
        if add_special_tokens is False:
            return [int(token) for token in self._tokenizer.encode(string)]
        return with_bos(self._tokenizer, string)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Compute the log-likelihood of whole texts; long texts are cut into disjoint windows."""
        windows: list[tuple[int, tuple[list[int], list[int]]]] = []
        for index, (text,) in enumerate(request.args for request in requests):
            cuts = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(index, utils.make_disjoint_window(cut)) for cut in cuts]
        sums = [0.0] * len(requests)
        found = self._loglikelihood_tokens([(("", ""), *window) for _, window in windows])
        for (index, _), (value, _) in zip(windows, found, strict=True):
            sums[index] += value
        return sums

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Compute the log-likelihood of each continuation after its context, and whether it is greedy."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        rows = [(context + new, len(new)) for _, context, new in requests]
        for indices in self._batches([len(row) for row, _ in rows]):
            kept = [rows[i][0][-(self.max_length + 1) :] for i in indices]
            longest = max(map(len, kept)) - 1
            tokens = [row[:-1] + [0] * (longest + 1 - len(row)) for row in kept]
            lengths = torch.tensor([len(row) - 1 for row in kept], device=self._device)
            inputs = self._positions(lengths, longest)
            logits = self._model(torch.tensor(tokens, device=self._device), **inputs)
            for index, row, scores in zip(indices, kept, logits, strict=True):
                found[index] = self._scored(scores[: len(row) - 1], row, min(rows[index][1], len(row) - 1))
        return found

    def _positions(self, lengths: Tensor, tokens: int) -> dict[str, Tensor]:
        """Return further model inputs for rows of `lengths` [B] tokens, padded on the right to `tokens`.

        Without them, longrope would treat the padding as a part of the text.
        """
        borders: list[int] = self._model.config.length_borders()  # type: ignore[operator, union-attr, assignment]
        return {"positions": row_positions(lengths, tokens)} if min(borders, default=tokens) < tokens else {}

    def _scored(self, logits: Tensor, row: list[int], new: int) -> tuple[float, bool]:
        """Score the last `new` tokens of a row of T + 1 by logits [T, V]; each predicts the next token."""
        wanted = torch.tensor(row[-new:], device=self._device)
        known = logits[-new:].float().log_softmax(-1)
        value = known.gather(-1, wanted[:, None]).sum().item()
        return value, bool((known.argmax(-1) == wanted).all())

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate an answer after each context, up to the first of its stop texts."""
        written = [""] * len(requests)
        asked: list[tuple[int, Any]] = [(index, request.args) for index, request in enumerate(requests)]
        asked.sort(key=lambda pair: json.dumps(pair[1][1], sort_keys=True))
        for options, group in groupby(asked, key=lambda pair: pair[1][1]):
            members = list(group)
            until, sampling, room = _generation(options)
            sampling = self._sampling(sampling)
            if not 0 < room < self.max_length:
                raise ConfigError(
                    f"a task asks for {room} new tokens; expected 1 to {self.max_length - 1}, below "
                    "model.max_tokens"
                )
            # not all at once: prompts hold their images
            for start in range(0, len(members), portion := SORTED * self._batch_size):
                some = members[start : start + portion]
                prompts = [self._prompt(arguments, room) for _, arguments in some]
                for indices in self._batches([len(prompt.tokens) for prompt in prompts]):
                    texts = self._continued([prompts[i] for i in indices], room, sampling, until)
                    for index, text in zip(indices, texts, strict=True):
                        written[some[index][0]] = text
        return written

    def _prompt(self, arguments: Sequence[Any], room: int) -> Prompt:
        """Build the prompt of a request, cut on the left to leave `room` for new tokens."""
        tokens = self.tok_encode(arguments[0]) or [self.eot_token_id]
        return Prompt(tokens[-(self.max_length - room) :])

    def _sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling of tokens; subclasses may change it."""
        return sampling

    def _continued(
        self, prompts: Sequence[Prompt], room: int, sampling: Sampling, until: list[str]
    ) -> list[str]:
        decode: Callable[[list[int]], str] = self._tokenizer.decode
        rows: list[list[int]] = [[] for _ in prompts]

        def ended(new: list[int | None]) -> Iterator[int]:
            for index, token in enumerate(new):
                if token is not None:
                    rows[index].append(token)
                    if any(stop in decode(rows[index]) for stop in until):
                        yield index

        generate(
            self._model,
            [prompt.tokens for prompt in prompts],
            room,
            sampling,
            self._stops,
            self._generator,
            on_tokens=ended,
            inputs=batch_inputs(prompts, self._device),
        )
        texts = [decode(row) for row in rows]
        for word in until:
            texts = [text.split(word)[0] for text in texts]
        return texts

    def _batches(self, lengths: list[int], parts: int = 1) -> Iterator[list[int]]:
        """Yield indices of sequences for `parts` batches at a time, sorted by length, longest first."""
        order, count = sorted(range(len(lengths)), key=lambda i: -lengths[i]), parts * self._batch_size
        for start in range(0, len(order), count):
            yield order[start : start + count]


class SeeingModel(RunModel):
    """A model that takes images; images are only in tasks that generate text, as for `hf-multimodal`."""

    MULTIMODAL = True

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See `RunModel`.

        Raises:
            ConfigError: a task compares the likelihood of texts after images.
        """
        if seen := [request.task_name for request in requests if len(request.args) > 2]:
            raise ConfigError(
                f"the task {seen[0]} compares likelihoods of texts behind images; expected one that has the "
                "model write (output_type: generate_until)"
            )
        return super().loglikelihood(requests, disable_tqdm)

    def _prompt(self, arguments: Sequence[Any], room: int) -> Prompt:
        """See `RunModel`; a prompt with images that is too long is an error, as it cannot be cut."""
        beside = arguments[2] if len(arguments) > 2 else {}
        if other := beside.keys() - {"visual"}:
            raise ConfigError(f"a task gives {', '.join(other)} beside its text; expected images alone")
        images = _images(beside.get("visual", []))
        config: ModelConfig = self._model.config  # type: ignore[assignment]
        try:
            prompt = config.prompt(arguments[0], images, self._tokenizer)
        except ValueError as error:
            raise ConfigError(f"the prompt {arguments[0]!r} of a task: {error}") from None
        if (tokens := len(prompt.tokens)) > (most := self.max_length - room):
            if not images:
                return _end_of(prompt, most)
            raise ConfigError(
                f"a task has a prompt of {tokens} tokens with its images, and asks for {room} new ones; "
                f"expected at most model.max_tokens = {self.max_length} together"
            )
        return prompt


def _end_of(prompt: Prompt, tokens: int) -> Prompt:
    """Cut a prompt without images to its last tokens."""
    cut = {name: value[..., -tokens:] for name, value in prompt.inputs.items() if name in prompt.by_token}
    return prompt._replace(tokens=prompt.tokens[-tokens:], inputs={**prompt.inputs, **cut})


def _images(value: Any) -> list[bytes]:
    """Encode the Pillow images of a question, one or several, as image files.

    Raises:
        ConfigError: a value is no image, or a damaged one.
    """
    from PIL import Image

    images = value if isinstance(value, list | tuple) else [value]
    if wrong := [one for one in images if not isinstance(one, Image.Image)]:
        raise ConfigError(
            f"doc_to_image of a task gives {type(wrong[0]).__name__}; expected images of Pillow, as a column "
            "of images in `datasets` does"
        )
    try:
        return [_png(image) for image in images]
    except OSError as error:
        raise ConfigError(f"an image of a task is damaged: {error}") from None


def _png(image: Any) -> bytes:
    """Encode an image as PNG, rotated by its EXIF orientation; transparency is preserved."""
    from PIL import ImageOps

    image, file = ImageOps.exif_transpose(image), io.BytesIO()
    image.convert("RGBA" if image.has_transparency_data else "RGB").save(file, "png")
    return file.getvalue()


def _generation(options: dict[str, Any]) -> tuple[list[str], Sampling, int]:
    """Return stop texts, sampling and largest number of new tokens from the options of a task."""
    until = options.get("until") or []
    drawn = options.get("do_sample", options.get("temperature", 0.0) > 0)
    sampling = Sampling(
        temperature=options.get("temperature", 1.0) if drawn else 0.0,
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
    )
    room = options.get("max_gen_toks", options.get("max_new_tokens", NEW_TOKENS))
    return [word for word in ([until] if isinstance(until, str) else until) if word], sampling, int(room)


class KeptTasks(TaskManager):
    """A task manager that loads tasks once, for repeated evaluations of the same names."""

    _kept: Any = None

    def load(self, spec: Any) -> Any:
        """See `TaskManager.load`.

        Raises:
            ConfigError: the data of a task cannot be read.
        """
        if self._kept is None:
            asked = ", ".join(map(str, spec)) if isinstance(spec, list) else str(spec)
            emit(f"reading the data of {asked}, from the Hugging Face cache or the hub\n", sys.stderr)
            try:
                self._kept = super().load(spec)
            except (OSError, DatasetsError) as error:
                raise ConfigError(
                    f"the data of {asked} cannot be read: {error}; where there is no network, let HF_HOME "
                    "name a cache that holds them, or give tasks on local files"
                ) from None
        return self._kept


def known_tasks(names: Sequence[str], folder: Path | None, names_key: str, folder_key: str) -> KeptTasks:
    """Return a manager that finds the tasks.

    Raises:
        ConfigError: a task is unknown; the message names the keys of names and folder.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder_key} = {folder} is no folder; expected one with YAML files of tasks")
    manager = KeptTasks(include_path=None if folder is None else str(folder))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"{names_key} names {', '.join(unknown)}, which the harness does not know; give the folder of "
            f"tasks of your own as {folder_key}"
        )
    return manager


def require_text(tasks: Mapping[str, Any], why: str) -> None:
    """Check that no task has images or sounds, for a model that takes text alone.

    Args:
        tasks: tasks by name.
        why: reason in the message why the model gets text alone.

    Raises:
        ConfigError: a task has images or sounds.
    """
    if seen := [name for name, task in tasks.items() if getattr(task, "MULTIMODAL", False)]:
        raise ConfigError(f"the questions of {', '.join(seen)} are no text alone: {why}")


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Tokenizer,
    config: ModelConfig,
    micro_batch: int,
    options: argparse.Namespace,
    stops: Sequence[int] = (),
) -> dict[str, Any]:
    """Print and return the scores of each task.

    Raises:
        ConfigError: a task is unknown, or has inputs that the model does not take.
    """
    asked = RunModel if config.items() is None else SeeingModel
    manager = asked_tasks(options)
    if asked is RunModel:
        require_text(loaded(manager, options), "this model takes neither images nor sounds")
    made = asked(model, tokenizer, options.batch_size or micro_batch, stops=stops)
    return results_of(made, manager, options)


def asked_tasks(options: argparse.Namespace) -> KeptTasks:
    """Return a manager that finds the tasks of `--tasks`.

    Raises:
        ConfigError: a task is unknown.
    """
    folder = None if options.tasks_from is None else Path(options.tasks_from).resolve()
    return known_tasks(options.tasks.split(","), folder, "--tasks", "--tasks-from")


def loaded(manager: KeptTasks, options: argparse.Namespace) -> Mapping[str, Any]:
    """Load the tasks of `--tasks`, by name."""
    return manager.load(options.tasks.split(","))["tasks"]


def results_of(asked: RunModel, manager: KeptTasks, options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the scores of each task."""
    found = evaluator.simple_evaluate(
        asked,
        tasks=options.tasks.split(","),
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
    )
    results: dict[str, Any] = dict(found or {})
    if not results:  # the harness gives them to the first rank alone
        return {}
    sys.stdout.write(task_table(results) + "\n")
    return results["results"]
