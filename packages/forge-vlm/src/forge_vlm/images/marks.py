"""Image marks in texts and place ids in tokens. n tokens. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

MARK = "<image>"
"""The text that marks the place of an image."""


class MarkedTokenizer:
    """A tokenizer that encodes each `MARK` in a text as one additional id, `place_id`.

    If the mark is a control token of the tokenizer, the text is encoded as a whole, like by its processor in
    `transformers`; otherwise the texts before, between and after the marks are encoded one by one, as in
    LLaVA (`tokenizer_image_token`).

    Attributes:
        place_id: id of marks, which is no id of the tokenizer.
        vocab_size: one more than that of the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._inner = tokenizer
        self.place_id: int = tokenizer.vocab_size
        self.vocab_size: int = tokenizer.vocab_size + 1
        self._native: int | None = None
        if MARK in getattr(tokenizer, "control_tokens", ()):
            (native,) = tokenizer.encode(MARK)
            self._native = int(native)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids, [n] int64."""
        return self._encoded(text, ())[0]

    def encode_places(self, text: str, spelled: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [n] and their characters [n, 2]; see `forge_data.tokenizer.tokenizer.Tokenizer`."""
        ids, places = self._encoded(text, spelled, with_places=True)
        assert places is not None
        return ids, places

    def _encoded(
        self, text: str, spelled: Sequence[int], with_places: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if self._native is not None:
            found = self._inner_encoded(text, spelled, with_places)
            return np.where(found[0] == self._native, self.place_id, found[0]), found[1]
        ids, places, at = list[np.ndarray](), list[np.ndarray](), 0
        spans = [match.span() for match in re.finditer(re.escape(MARK), text)]
        for start, stop in [*spans, (len(text), len(text))]:
            if start > at:
                inside = [place - at for place in spelled if at <= place < start]
                found = self._inner_encoded(text[at:start], inside, with_places)
                ids.append(found[0])
                places += [] if found[1] is None else [found[1] + at]
            if stop > start:
                ids.append(np.array([self.place_id]))
                places.append(np.array([[start, stop]]))
            at = stop
        none = np.empty(0, dtype=np.int64)
        joined = np.concatenate([none, *ids])
        return joined, np.concatenate([none.reshape(0, 2), *places]) if with_places else None

    def _inner_encoded(
        self, text: str, spelled: Sequence[int], with_places: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if with_places:
            ids, places = self._inner.encode_places(text, spelled)
            return np.asarray(ids, dtype=np.int64), np.asarray(places, dtype=np.int64)
        return np.asarray(self._inner.encode(text), dtype=np.int64), None


def with_marks(text: str, images: int) -> str:
    """Return the text with as many marks as images; a text without marks gets them at its start.

    Raises:
        ValueError: it has another number of marks.
    """
    marks = text.count(MARK)
    if marks and marks != images:
        raise ValueError(f"given {images} images, and a text with {marks} marks {MARK}; give as many")
    return text if marks else MARK * images + text


PLACE = -1
"""The id in a sample at the place of a visual token."""


def with_places(
    ids: np.ndarray, place_id: int, layouts: Sequence[Sequence[str | int]], tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Replace the ids of images by place ids and layout tokens.

    Args:
        ids: [n] ids from a `MarkedTokenizer`.
        place_id: its id of marks.
        layouts: for each image, texts and numbers of places; as many images as ids of marks.
        tokenizer: encodes these texts.

    Returns:
        Tokens [m] int64 with `PLACE` for places, and [m] the index of the id that each token comes from.
    """
    found, of = list[np.ndarray](), list[np.ndarray]()
    at = 0
    for number, where in enumerate(np.flatnonzero(ids == place_id).tolist()):
        runs = [
            np.full(part, PLACE, dtype=np.int64)
            if isinstance(part, int)
            else np.asarray(tokenizer.encode(part))
            for part in layouts[number]
        ]
        inside = np.concatenate([np.empty(0, dtype=np.int64), *runs])
        found += [ids[at:where].astype(np.int64), inside]
        of += [np.arange(at, where), np.full(len(inside), where)]
        at = where + 1
    tokens = np.concatenate([*found, ids[at:].astype(np.int64)])
    return tokens, np.concatenate([*of, np.arange(at, len(ids))])
