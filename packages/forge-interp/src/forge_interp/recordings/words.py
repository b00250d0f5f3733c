"""How do words of a transcript become samples of a model, and their rows features of scans?

Letters: W words, T tokens, R rows, S scans, D features, L delays.
"""

from collections.abc import Callable, Mapping, Sequence
from math import factorial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_interp.analysis.arrays import Array, Labels, as_labels, as_matrix
from forge_interp.errors import InterpError
from forge_interp.extraction.run.rows import pool_tokens

Tokenize = Callable[..., Mapping[str, Any]]
Response = Callable[[np.ndarray], np.ndarray]


def word_samples(words: Sequence[str], tokenize: Tokenize, *, before: int | None) -> list[dict[str, Tensor]]:
    """Make samples for `extract_representations` of the W words of one transcript, joined by spaces.

    Each sample has `input_ids` [T], and `word` [T]: 1 + the index of the word at tokens whose rows are
    wanted, 0 at context and special tokens. `where="word"` extracts only the wanted rows.

    `tokenize(text, return_offsets_mapping=True)` returns `input_ids` and `offset_mapping`, the letters
    [start, end) of each token, as fast tokenizers of Hugging Face do. A sample is a word and up to `before`
    words before it: W samples, each with one wanted word; None: one sample with all words. InterpError: a
    word has no letters, or no token of its own (it is cut off, or shares its token with an earlier word).
    """
    if not words or (before is not None and before < 0):
        raise InterpError(f"{len(words)} words, before is {before}; expected at least 1 word and 0 or None")
    if before is None:
        return [_sample(words, 0, 0, tokenize)]
    return [_sample(words[: i + 1], max(0, i - before), i, tokenize) for i in range(len(words))]


def _sample(words: Sequence[str], start: int, first: int, tokenize: Tokenize) -> dict[str, Tensor]:
    """Make one sample of words [start, W), of which those from `first` on are wanted."""
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
    """Reduce rows of tokens to rows of words, [W, D] in their order, in the dtype of `rows`.

    `rows` [R, D] were extracted with `where="word"` and `keep="word"`; `word` [R] is `store.kept("word")`:
    positive numbers, equal ones side by side. `how` is "mean", "last", "first" or "max".
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


def canonical_response(seconds: np.ndarray) -> np.ndarray:
    """Return the blood response `seconds` after an event: peak at 5 s, undershoot at 15 s, integral 1.

    The difference of two gamma densities, of shapes 6 and 16 and rate 1 per second; the second is weighted
    by 1/6. Source: SPM, `spm_hrf` with its default parameters (Friston et al. 1998, NeuroImage 7:30).
    """
    t = np.clip(seconds, 0, 200)  # where it is 0 in float64
    peak, undershoot = (t ** (k - 1) * np.exp(-t) / factorial(k - 1) for k in (6, 16))
    return (peak - undershoot / 6) / (1 - 1 / 6)


def lanczos(interval_s: float, lobes: int = 3) -> Response:
    """Make the low-pass filter of Huth et al. 2016 (Nature 532:453) for scans `interval_s` apart.

    It has no delay: `encode(..., delays=)` models the response.
    """

    def response(seconds: np.ndarray) -> np.ndarray:
        u = seconds / interval_s
        return np.sinc(u) * np.sinc(u / lobes) * (np.abs(u) < lobes)

    return response


def at_scans(
    features: Array, onsets: Array, scan_times: Array, response: Response = canonical_response
) -> np.ndarray:
    """Convolve words at their onsets with a response, exactly, and read it at the scans of one run.

    `features` [W, D] of words at `onsets` [W] in seconds, in any order; `scan_times` [S] on the same clock;
    `response` takes [S, W] seconds after the onset. Returns [S, D] float64: sum over words of
    response(scan - onset) x features.
    """
    x = as_matrix(features, "features").cpu().numpy()
    starts, scans = (np.asarray(as_labels(times), dtype=np.float64) for times in (onsets, scan_times))
    if starts.shape != (len(x),) or scans.ndim != 1 or not np.isfinite([*starts, *scans]).all():
        raise InterpError(
            f"onsets are {starts.shape}, scan_times {scans.shape}, for {len(x)} words; expected finite "
            "times in seconds, one of each word and of each scan"
        )
    return response(scans[:, None] - starts) @ x


def delayed(features: Array, delays: Sequence[int], runs: Labels) -> np.ndarray:
    """Copy features to later scans of the same run, 0 before its begin (finite impulse response).

    `features` [S, D]; L `delays` in scans, negative ones move features to earlier scans; `runs` [S] is the
    run of each scan, whose scans stand side by side, in order of time. Returns [S, L D] float64: the features
    of the first delay, then those of the next.
    """
    x, labels = as_matrix(features, "features").cpu().numpy(), as_runs(runs)
    copies = []
    for delay in delays:
        source = np.arange(len(x)) - delay
        inside = (source >= 0) & (source < len(x))
        source = source.clip(0, len(x) - 1)
        copies.append(np.where((inside & (labels[source] == labels))[:, None], x[source], 0.0))
    return np.concatenate(copies, axis=1)


def as_runs(runs: Labels) -> np.ndarray:
    """Number the run of each scan, [S], from 0 in order; InterpError where a run is in pieces."""
    labels = as_labels(runs)
    begins = np.append(True, labels[1:] != labels[:-1]) if labels.ndim == 1 else np.zeros(0, dtype=bool)
    if labels.ndim != 1 or begins.sum() != len(np.unique(labels)):
        raise InterpError(
            f"runs are {labels.shape}, in {begins.sum()} pieces; expected a label for each scan, and "
            "the scans of a run side by side"
        )
    return begins.cumsum() - 1
