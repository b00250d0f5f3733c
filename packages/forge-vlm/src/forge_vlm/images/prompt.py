"""Prompts with images as inputs of a model. T tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from forge_model.model_config import Prompt

from forge_vlm.images.marks import PLACE, MarkedTokenizer, with_marks, with_places
from forge_vlm.images.reader import ImageReader


def prompt_of(reader: ImageReader, text: str, images: Sequence[bytes], tokenizer: Any) -> Prompt:
    """See `VisionLanguageConfig.prompt`."""
    marked = MarkedTokenizer(tokenizer)
    ids, bos = marked.encode(with_marks(text, len(images))), list(getattr(tokenizer, "bos_ids", ()))
    if ids[: len(bos)].tolist() != bos:
        ids = np.concatenate([bos, ids]).astype(np.int64)
    sizes = [reader.measure(raw) for raw in images]
    tokens, _ = with_places(ids, marked.place_id, [reader.layout(size) for size in sizes], tokenizer)
    is_place = tokens == PLACE
    index = np.where(is_place, is_place.cumsum(), 0)
    arrays = reader.sequence(index, sizes, np.zeros_like(index), np.ones_like(index, bool))
    read = [reader.read(raw, size) for raw, size in zip(images, sizes, strict=True)]
    rows = {
        name: np.concatenate([none, *(one[name] for one in read)]) for name, none in reader.ragged.items()
    }
    return Prompt(
        np.where(is_place, tokenizer.eos_id, tokens).tolist(),
        rows | {name: np.asarray(array)[None] for name, array in arrays.items()},
        reader.host,
        frozenset(reader.by_token) & arrays.keys(),
    )
