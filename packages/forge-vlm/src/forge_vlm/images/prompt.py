"""A prompt with images, as a model takes it. T tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from forge_model.model_config import Prompt

from forge_vlm.images.reader import ImageReader

MARK = "<image>"
"""Where an image stands in the text of a prompt."""


def prompt_of(reader: ImageReader, text: str, images: Sequence[bytes], tokenizer: Any) -> Prompt:
    """See `VisionLanguageConfig.prompt`."""
    marks = text.count(MARK)
    if marks and marks != len(images):
        raise ValueError(f"given {len(images)} images, and a text with {marks} marks {MARK}; give as many")
    texts = text.split(MARK) if marks else ["" for _ in images] + [text]
    sizes = [reader.measure(raw) for raw in images]
    tokens = list[int](getattr(tokenizer, "bos_ids", ()))
    places = [0 for _ in tokens]
    for number, part in enumerate(texts):
        ids = [int(token) for token in tokenizer.encode(part)]
        tokens += ids
        places += [0] * len(ids)
        for run in reader.layout(sizes[number]) if number < len(images) else ():
            if isinstance(run, int):
                first = 1 + max(places, default=0)
                tokens += [tokenizer.eos_id] * run
                places += range(first, first + run)
            else:
                ids = [int(token) for token in tokenizer.encode(run)]
                tokens += ids
                places += [0] * len(ids)
    index = np.array(places, dtype=np.int64)
    arrays = reader.sequence(index, sizes, np.zeros_like(index))
    read = [reader.read(raw, size) for raw, size in zip(images, sizes, strict=True)]
    rows = {
        name: np.concatenate([none, *(one[name] for one in read)]) for name, none in reader.ragged.items()
    }
    return Prompt(
        tokens, rows | {name: np.asarray(array)[None] for name, array in arrays.items()}, reader.host
    )
