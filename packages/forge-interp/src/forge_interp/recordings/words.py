"""Which tokens are a word of a transcript, and what stands before it?

Letters: W words, T tokens, R rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_interp.analysis.arrays import Array, Labels, as_labels, as_matrix
from forge_interp.errors import InterpError
from forge_interp.extraction.run.rows import pool_tokens

Tokenize = Callable[..., Mapping[str, Any]]


def word_samples(words: Sequence[str], tokenize: Tokenize, *, before: int | None) -> list[dict[str, Tensor]]:
    """Make samples for `extract_representations` of the words of one transcript, joined by spaces.

    Each sample has `input_ids` [T], and `word` [T]: 1 + the number of the word at tokens of a word whose
    rows are wanted, 0 at its context and at special tokens. `where="word"` extracts the former alone.

    Args:
        words: the transcript, in order; W of them.
        tokenize: called as tokenize(text, return_offsets_mapping=True), gives `input_ids` and
            `offset_mapping`, the letters [start, end) of each token: a fast tokenizer of Hugging Face.
        before: a sample is a word and up to so many words before it: W samples, each with one word. None:
            the whole transcript is one sample, with all words.

    InterpError: a word has no letters, or no token of its own: it is cut off, or shares one with a word
    before it.
    """
    if not words or (before is not None and before < 0):
        raise InterpError(f"{len(words)} words, before is {before}; expected at least 1 word and 0 or None")
    if before is None:
        return [_sample(words, 0, 0, tokenize)]
    return [_sample(words[: i + 1], max(0, i - before), i, tokenize) for i in range(len(words))]


def _sample(words: Sequence[str], start: int, first: int, tokenize: Tokenize) -> dict[str, Tensor]:
    """Words [start, W) as one sample, in which those from `first` on are wanted."""
    encoded = tokenize(" ".join(words[start:]), return_offsets_mapping=True)
    if "offset_mapping" not in encoded:
        raise InterpError(f"tokenize gave {', '.join(encoded)}; expected input_ids and offset_mapping")
    spans = torch.tensor(encoded["offset_mapping"]).view(-1, 2)
    word = torch.zeros(len(spans), dtype=torch.int64)  # -1 at those before `first`
    place = 0
    for number in range(start, len(words)):
        end = place + len(words[number])
        own = (spans[:, 0] < end) & (spans[:, 1] > place) & (spans[:, 0] < spans[:, 1]) & (word == 0)
        if number >= first and not bool(own.any()):
            raise InterpError(
                f"word {number}, {words[number]!r}, has no token of its own; expected one: join it with its "
                "neighbour, or give shorter texts"
            )
        word[own] = number + 1 if number >= first else -1
        place = end + 1
    return {"input_ids": torch.tensor(encoded["input_ids"]), "word": word.clamp_min(0)}


def pool_words(rows: Array, word: Labels, how: str = "mean") -> Tensor:
    """Reduce rows of tokens to rows of words.

    Args:
        rows: [R, D], extracted with `where="word"` and `keep="word"`.
        word: [R], `store.kept("word")`: positive numbers, those of one word side by side.
        how: "mean", "last", "first" or "max".

    Returns:
        [W, D] in order of the words, in the dtype of `rows`.
    """
    values, numbers = as_matrix(rows, "rows", dtype=None), torch.as_tensor(as_labels(word))
    names, counts = numbers.unique_consecutive(return_counts=True)
    if len(numbers) != len(values) or len(names.unique()) != len(names) or bool((numbers < 1).any()):
        raise InterpError(
            f"word has {len(numbers)} numbers, rows are {len(values)}; expected one from 1 on for each row, "
            "and the rows of a word side by side"
        )
    padded = torch.nn.utils.rnn.pad_sequence(list(values.split(counts.tolist())), batch_first=True)
    return pool_tokens(padded, torch.arange(padded.shape[1]) < counts[:, None], how)
