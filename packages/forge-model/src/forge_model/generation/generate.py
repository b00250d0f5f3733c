"""Generation of text by a model. B batch, T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_model.attention.cache import Cache
from forge_model.error import ModelError
from forge_model.generation.compiled import CompiledDecoding, shared_capacity
from forge_model.generation.speculate import Speculation
from forge_model.model_config import ModelConfig


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: number of likeliest tokens that are kept; 0 is off.
        top_p: least probability of the smallest set of likeliest tokens that is kept; 1 is off.
        min_p: least probability of a kept token, as a fraction of the likeliest one's; 0 is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        good = self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1
        if not good:
            raise ModelError(
                f"given {self}; expected temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1"
            )

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Choose a token for each row, [B, V] -> [B] int64."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = self.filter(logits.float() / self.temperature)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    def filter(self, logits: Tensor) -> Tensor:
        """Set tokens that may not be chosen to minus infinity, [B, V]; in the order of `transformers`."""
        if self.top_k and self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        if self.top_p < 1:
            sorted_logits, order = logits.sort(descending=True)
            probability = sorted_logits.softmax(-1)
            before = probability.cumsum(-1) - probability
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter_(1, order, before >= self.top_p)
            logits = logits.masked_fill(dropped, float("-inf"))
        if self.min_p > 0:
            probability = logits.softmax(-1)
            floor = self.min_p * probability.amax(-1, keepdim=True)
            logits = logits.masked_fill(probability < floor, float("-inf"))
        return logits


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    on_tokens: Callable[[list[int | None]], Iterable[int] | None] | None = None,
    speculative: bool = False,
    compiled: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
) -> list[list[int]]:
    """Continue each prompt, with a key-value cache.

    Args:
        model: a `Decoder`, or another model with the same `begin`, `new_cache` and `writer`; unsharded on
            one device.
        prompts: token ids; lengths may differ, padding is added on the left inside. None may be empty.
        max_new_tokens: most tokens written for a prompt, at least 1.
        sampling: how tokens are chosen.
        stop_tokens: tokens that end an answer; the stop token is part of the result.
        generator: source of random numbers, on the device of the model.
        on_tokens: called after every step with the new token of each prompt, None for finished prompts; may
            return the indices of prompts that are finished now.
        speculative: let the modules for multi-token prediction propose tokens. Greedy only; same result.
        compiled: compile the step of one token, once for each batch size and each capacity of 128 tokens;
            sums are then rounded differently, which may decide between tokens that are about as likely.
        inputs: further model inputs of the prompts, padded on the left like them.

    Returns:
        The new token ids of each prompt.

    Raises:
        ModelError: a prompt is empty or has a token that the model does not know; or there are no prompts; or
            prompt and answer do not fit into `max_tokens`; or `speculative` is given for a model without such
            modules, with sampling, or with `compiled`; or the model cannot generate.
    """
    if not hasattr(model, "begin"):
        raise ModelError(f"a {type(model).__name__} does not write text: it has no method `begin`")
    longest = _longest_prompt(prompts, max_new_tokens, model.config)  # type: ignore[arg-type]
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    padding = torch.tensor([longest - len(p) for p in prompts], device=device)
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    written = _Written(len(prompts), stop_tokens, on_tokens)
    borders = _borders(prompts, max_new_tokens, model.config)  # type: ignore[arg-type]
    if borders and (speculative or inputs):
        raise ModelError(
            f"an answer of {max_new_tokens} tokens would cross {borders[0]} tokens, where longrope turns all "
            "tokens anew, which speculative generation and inputs beside tokens do not allow; write fewer "
            "tokens"
        )
    if speculative:
        _require_speculation(model, sampling, compiled, inputs)
        return _speculated(Speculation(model, tokens, padding, max_new_tokens), max_new_tokens, written)
    maker: Any = model
    some = padding if any(len(prompt) < longest for prompt in prompts) else None
    capacity = longest + max_new_tokens
    if compiled:
        capacity = shared_capacity(capacity, model.config.max_tokens)  # type: ignore[arg-type, union-attr]
    writer = maker.writer

    def begin() -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        cache: Cache = maker.new_cache(capacity, some, device)
        logits: Tensor = maker.begin(tokens, cache, **(inputs or {}))
        if compiled:
            return logits, CompiledDecoding(writer, cache)
        return logits, lambda tokens: writer(tokens, cache=cache, last_logits=1)[:, -1]

    crossings = {border + 1 + longest - len(prompt) for border in borders for prompt in prompts}
    logits, decode = begin()
    while True:
        chosen = sampling.choose(logits, generator)
        written.add(chosen)
        if written.steps == max_new_tokens or all(written.done):
            return written.rows
        tokens = torch.cat([tokens, chosen[:, None]], 1)
        if tokens.shape[1] in crossings:
            logits, decode = begin()
        else:
            logits = decode(chosen[:, None])


class _Written:
    """The new tokens of each prompt."""

    def __init__(
        self,
        prompts: int,
        stop_tokens: Sequence[int],
        on_tokens: Callable[[list[int | None]], Iterable[int] | None] | None,
    ) -> None:
        self.rows: list[list[int]] = [[] for _ in range(prompts)]
        self.done = [False] * prompts
        self.steps = 0
        self._stop_tokens, self._on_tokens = stop_tokens, on_tokens

    def add(self, chosen: Tensor) -> None:
        """Add one token to each unfinished prompt, [B]."""
        if all(self.done):
            return
        self.steps += 1
        new: list[int | None] = [None if d else t for d, t in zip(self.done, chosen.tolist(), strict=True)]
        for index, token in enumerate(new):
            if token is not None:
                self.rows[index].append(token)
                self.done[index] = token in self._stop_tokens
        if self._on_tokens is not None:
            for index in self._on_tokens(new) or ():
                self.done[index] = True


def _speculated(growing: Speculation, max_new_tokens: int, written: _Written) -> list[list[int]]:
    written.add(growing.known[:, -1])
    while (left := max_new_tokens - written.steps) and not all(written.done):
        for chosen in growing.grow(left, written.done).unbind(1):
            written.add(chosen)
    return written.rows


def _require_speculation(
    model: nn.Module, sampling: Sampling, compiled: bool, inputs: Mapping[str, Tensor] | None
) -> None:
    if inputs:
        raise ModelError(f"given {', '.join(inputs)} with speculative generation, which reads tokens only")
    if compiled:
        raise ModelError("speculative steps have no fixed number of tokens to compile; give one of both")
    if sampling.temperature != 0:
        raise ModelError(
            f"given temperature = {sampling.temperature} with speculative generation, which is greedy; use 0"
        )
    if not len(getattr(model, "mtp", ())):
        raise ModelError(
            "this model has no modules for multi-token prediction to propose tokens; generate without "
            "`speculative`, or train with model.mtp.num_modules above 0"
        )


def _borders(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: ModelConfig) -> list[int]:
    """Return the lengths at which positions begin to rotate otherwise and which an answer may cross."""
    return [
        border
        for border in config.length_borders()
        if any(len(prompt) <= border < len(prompt) + max_new_tokens - 1 for prompt in prompts)
    ]


def _longest_prompt(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: ModelConfig) -> int:
    """Return the length of the longest prompt, after checking that all of them can be continued."""
    if max_new_tokens < 1:
        raise ModelError(f"given max_new_tokens = {max_new_tokens}; expected at least 1")
    if not prompts or not all(prompts):
        raise ModelError("a prompt has no tokens; give at least one, e.g. the end-of-document token")
    unknown = sorted({t for prompt in prompts for t in prompt if not 0 <= t < config.vocab_size})
    if unknown:
        raise ModelError(
            f"a prompt has the tokens {unknown}; the model knows 0 to {config.vocab_size - 1} (vocab_size). "
            "Was it made by another tokenizer?"
        )
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > config.max_tokens:
        raise ModelError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into max_tokens = "
            f"{config.max_tokens}; shorten one of them"
        )
    return longest
