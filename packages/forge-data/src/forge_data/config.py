"""What `[data]` holds. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from forge_config import Config, Meta

from forge_data.sources import SourceConfig
from forge_data.tokenizer import BytesConfig, TokenizerConfig


class DataConfig(Config):
    """What a run reads.

    Attributes:
        max_tokens: length of a sequence.
        sources: where text comes from; each sequence is drawn from one of them, by weight.
        tokenizer: how text becomes tokens.
        seed: of the order of sequences.
        mask_documents: keep attention and targets within documents; positions start anew in each.
        validation_samples: held-out sequences an evaluation reads, evenly spaced; 0 reads all.
        workers: processes that prepare batches; 0 prepares them in the training process.
        cache_dir: where tokenized text is kept; absent means `$FORGE_CACHE` or `~/.cache/forge`.
    """

    free_keys = ("validation_samples", "workers", "cache_dir")
    path_keys = ("cache_dir",)

    max_tokens: Annotated[int, Meta(ge=1)]
    sources: list[SourceConfig]
    tokenizer: TokenizerConfig = BytesConfig()
    seed: Annotated[int, Meta(ge=0)] = 0
    mask_documents: bool = False
    validation_samples: Annotated[int, Meta(ge=0)] = 256
    workers: Annotated[int, Meta(ge=0)] = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "sources is empty; name at least one, e.g. [[data.sources]] with type = 'python-stdlib'"
            )

    def has_validation(self) -> bool:
        """Whether any source has text for validation."""
        return any(source.has_validation() for source in self.sources)
