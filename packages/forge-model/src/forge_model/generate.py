"""How a model writes on. B batch, T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forge_model.cache import Cache
from forge_model.decoder_config import DecoderConfig
from forge_model.error import ModelError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep only so many of the likeliest; 0 is off.
        top_p: keep the smallest set of likeliest tokens with at least this probability; 1 is off.
        min_p: drop tokens less likely than this fraction of the likeliest; 0 is off.
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
        """[B, V] -> [B] int64."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = self.filter(logits.float() / self.temperature)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    def filter(self, logits: Tensor) -> Tensor:
        """[B, V] with the tokens that may not be chosen at minus infinity."""
        if self.top_k and self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        if self.min_p > 0:
            probability = logits.softmax(-1)
            floor = self.min_p * probability.amax(-1, keepdim=True)
            logits = logits.masked_fill(probability < floor, float("-inf"))
        if self.top_p < 1:
            sorted_logits, order = logits.sort(descending=True)
            probability = sorted_logits.softmax(-1)
            before = probability.cumsum(-1) - probability
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter_(1, order, before >= self.top_p)
            logits = logits.masked_fill(dropped, float("-inf"))
        return logits


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt, with a key-value cache.

    Args:
        model: a `Decoder`, unsharded on one device.
        prompts: token ids; of different lengths, padded on the left inside. None may be empty.
        max_new_tokens: most tokens written for a prompt, at least 1.
        sampling: how tokens are chosen.
        stop_tokens: a prompt is done when one of these was written; it is part of the result.
        generator: random numbers, on the device of the model.
        on_tokens: called after every step with the new token of each prompt, None where it is done.

    Returns:
        The new token ids of each prompt.

    Raises:
        ModelError: a prompt is empty or has a token that the model does not know; there is nothing to write;
            or prompt and answer do not fit into `max_tokens`.
    """
    longest = _longest_prompt(prompts, max_new_tokens, model.config)  # type: ignore[arg-type]
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    padding = torch.tensor([longest - len(p) for p in prompts], device=device)
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    cache = Cache(model.config.num_layers, longest + max_new_tokens, padding)  # type: ignore[arg-type, union-attr]
    written: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for _ in range(max_new_tokens):
        chosen = sampling.choose(model(tokens, cache=cache, last_logits=1)[:, -1], generator)
        new: list[int | None] = [None if d else t for d, t in zip(done, chosen.tolist(), strict=True)]
        for index, token in enumerate(new):
            if token is not None:
                written[index].append(token)
                done[index] = token in stop_tokens
        if on_tokens is not None:
            on_tokens(new)
        if all(done):
            break
        tokens = chosen[:, None]
    return written


def _longest_prompt(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: DecoderConfig) -> int:
    """The length of the longest prompt, once it is clear that all of them can be continued."""
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
