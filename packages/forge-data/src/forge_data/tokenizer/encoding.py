"""How a document becomes ids, and which of them are targets. n tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forge_data.error import DataError
from forge_data.store.tokens import store_dtype
from forge_data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forge_data.sources.columns import Document


def encoded(tokenizer: Tokenizer, document: Document, masks: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids of a document, beginning and end tokens included, and whether each is a target.

    The text is encoded as a whole. A token with at least one character of a target is one, even if it begins
    before the target, as in `transformers` (`return_assistant_tokens_mask`).

    Args:
        tokenizer: tokenizer of the text.
        document: the document.
        masks: whether some documents of the same source have parts that are no targets.

    Returns:
        [n] in the dtype of stores, and [n] bool; None if nothing is masked.

    Raises:
        DataError: the tokenizer cannot encode the text, or does not map tokens to characters.
    """
    places = None
    if document.targets is None and not document.spelled:
        ids = tokenizer.encode(document.text)
    elif hasattr(tokenizer, "encode_places"):
        ids, places = tokenizer.encode_places(document.text, document.spelled)
    else:
        raise DataError(
            f"the tokenizer {type(tokenizer).__name__} has no method `encode_places`, which parts of a "
            "document that are no targets need; see forge_data.tokenizer.tokenizer.Tokenizer"
        )
    targets = np.full(len(ids), document.targets is None)
    for start, stop in document.targets or ():
        assert places is not None
        within = np.flatnonzero((places[:, 0] < stop) & (places[:, 1] > start))
        if len(within):
            targets[within[0] : within[-1] + 1] = True
    bos = np.asarray(getattr(tokenizer, "bos_ids", ()), dtype=np.int64)
    begins = not document.is_complete and not np.array_equal(ids[: len(bos)], bos)
    ends = not (document.is_complete and len(ids) and ids[-1] == tokenizer.eos_id)
    last = document.targets is None or any(stop == len(document.text) for _, stop in document.targets)
    before, after = bos if begins else bos[:0], [tokenizer.eos_id] * ends
    ids = np.concatenate([before, ids, after]).astype(store_dtype(tokenizer.vocab_size))
    if not masks:
        return ids, None
    first = [document.targets is None] * len(before)
    return ids, np.concatenate([first, targets, [last] * len(after)]).astype(bool)
