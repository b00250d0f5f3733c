"""Which layer predicts recordings of a brain? From words with onsets to scores of held-out voxels."""

from forge_interp.recordings.encoding import EncodingScores, encode, noise_ceiling
from forge_interp.recordings.words import (
    at_scans,
    canonical_response,
    delayed,
    lanczos,
    pool_words,
    word_samples,
)  # fmt: skip

__all__ = [
    "EncodingScores", "at_scans", "canonical_response", "delayed", "encode", "lanczos", "noise_ceiling",
    "pool_words", "word_samples",
]  # fmt: skip
