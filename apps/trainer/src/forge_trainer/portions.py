"""How long a run trains, and in what portions. Imports no torch."""

from typing import Annotated

from forge_config import Config, Meta
from forge_data.config import DataConfig


class TrainConfig(Config):
    """How long and in what portions to train.

    Attributes:
        steps: optimizer steps of the whole run.
        global_batch: sequences an optimizer step, whatever the number of ranks; absent where
            `global_batch_tokens` says it.
        global_batch_tokens: the same in tokens: a whole number of sequences of `data.max_tokens`.
        micro_batch: sequences a rank holds at once; the rest of its share is accumulated.
        clip_norm: the global gradient norm is clipped to this; 0 never clips.
        log_every_steps: distance of lines in `metrics.jsonl`, the console and the trackers.
        init_from: folder of Hugging Face weights (`*.safetensors`) to start from instead of random ones.
    """

    free_keys = ("micro_batch", "log_every_steps")
    path_keys = ("init_from",)
    recorded_keys = ("steps", "clip_norm")

    steps: Annotated[int, Meta(ge=1)]
    micro_batch: Annotated[int, Meta(ge=1)]
    global_batch: Annotated[int, Meta(ge=0)] = 0
    global_batch_tokens: Annotated[int, Meta(ge=1)] | None = None
    clip_norm: Annotated[float, Meta(ge=0)] = 1.0
    log_every_steps: Annotated[int, Meta(ge=1)] = 10
    init_from: str | None = None

    def __post_init__(self) -> None:
        if not self.global_batch and self.global_batch_tokens is None:
            raise ValueError("global_batch is missing; say it in sequences, or global_batch_tokens in tokens")

    def sequences(self, max_tokens: int) -> int:
        """Sequences an optimizer step, of so many tokens each."""
        return self.global_batch or (self.global_batch_tokens or 0) // max_tokens


def batch_divides(train: TrainConfig, data: DataConfig) -> None:
    """The global batch is made of whole micro-batches, and of whole sequences where it is said in tokens."""
    tokens, batch = train.global_batch_tokens, train.sequences(data.max_tokens)
    if tokens is not None and batch * data.max_tokens != tokens:
        low = max(1, tokens // data.max_tokens) * data.max_tokens
        raise ValueError(
            f"train.global_batch_tokens = {tokens} is no whole number of sequences of data.max_tokens = "
            f"{data.max_tokens} (train.global_batch = {train.global_batch or 'absent'}); use {low} or "
            f"{low + data.max_tokens}"
        )
    if batch % train.micro_batch:
        raise ValueError(
            f"train.global_batch = {batch} is no multiple of train.micro_batch = {train.micro_batch}; change "
            "one of them"
        )


def uneven(batch: int, micro_batch: int, readers: int) -> str:
    """Says what would go: other micro-batches, ranks or global batches."""
    fitting = [m for m in range(1, batch // readers + 1) if batch % (m * readers) == 0]
    ranks = [n for n in range(1, readers) if batch % (n * micro_batch) == 0]
    low = batch // (readers * micro_batch) * readers * micro_batch
    near = [str(size) for size in (low, low + readers * micro_batch) if size]
    proposals = [f"train.global_batch = {' or '.join(near)}"]
    proposals += [f"train.micro_batch = {fitting[-1]}"] if fitting else []
    proposals += [f"{ranks[-1]} ranks that read"] if ranks else []
    return (
        f"train.global_batch = {batch} over {readers} ranks that read is no whole number of micro-batches of "
        f"{micro_batch}; use {', or '.join(proposals)}"
    )
