"""The section `[train]`: length and batch sizes. Imports no torch."""

import itertools
from collections.abc import Iterator
from typing import Annotated

from forge_config import Config, Meta
from forge_data.config import DataConfig

from forge_trainer.schedule import ScheduleConfig


class BatchStage(Config):
    """One stage of the warm-up of the batch size.

    Attributes:
        global_batch: sequences in each optimizer step.
        steps: length of the stage, in steps.
    """

    global_batch: Annotated[int, Meta(ge=1)]
    steps: Annotated[int, Meta(ge=1)]


class TrainConfig(Config):
    """The length of a run and its batch sizes.

    Attributes:
        steps: optimizer steps of the whole run.
        global_batch: sequences in each optimizer step over all ranks; absent if `global_batch_tokens` gives
            the size.
        global_batch_tokens: tokens in each optimizer step: a whole number of sequences of `data.max_tokens`.
        batch_warmup: stages of smaller global batches at the beginning of the run; `global_batch` follows
            them.
        micro_batch: sequences that a rank computes at once; gradients accumulate over its share of the batch.
        clip_norm: largest global gradient norm; larger gradients are clipped to it; 0 never clips.
        log_every_steps: steps between lines in `metrics.jsonl`, the console and the trackers.
        init_from: weights to start from instead of random ones: a folder of Hugging Face weights
            (`*.safetensors`), or a checkpoint of another run, `runs/other@300` for its step 300. A model that
            is composed of others takes a table from the prefix of their weights to their origin.
        init_include: patterns for names of tensors to load; default all. Patterns are as in
            `[[optimizer.groups]]`. The other tensors keep their random values.
        init_exclude: patterns for names of tensors that are not loaded.
        init_resize: patterns for names of tensors whose sizes may differ: the common part is loaded.
    """

    free_keys = ("micro_batch", "log_every_steps")
    path_keys = ("init_from",)
    recorded_keys = ("steps", "clip_norm")

    steps: Annotated[int, Meta(ge=1, le=1 << 40)]
    micro_batch: Annotated[int, Meta(ge=1)]
    global_batch: Annotated[int, Meta(ge=0, le=1 << 22)] = 0
    global_batch_tokens: Annotated[int, Meta(ge=1)] | None = None
    batch_warmup: tuple[BatchStage, ...] = ()
    clip_norm: Annotated[float, Meta(ge=0)] = 1.0
    log_every_steps: Annotated[int, Meta(ge=1)] = 10
    init_from: str | dict[str, str] | None = None
    init_include: tuple[str, ...] = ()
    init_exclude: tuple[str, ...] = ()
    init_resize: tuple[str, ...] = ()

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not self.global_batch and self.global_batch_tokens is None:
            yield ("global_batch is missing; say it in sequences, or global_batch_tokens in tokens")
        if self.init_from is None and self.init_in_parts:
            yield (
                "init_include, init_exclude or init_resize without init_from; say from where to take weights"
            )
        if isinstance(self.init_from, dict) and not (self.init_from and all(self.init_from)):
            yield (
                f"given init_from = {self.init_from}; expected a table of prefixes of weights, none of them "
                "empty, or one place as text"
            )
        warmup = sum(stage.steps for stage in self.batch_warmup)
        if warmup >= self.steps:
            yield (
                f"train.batch_warmup lasts {warmup} steps, and train.steps = {self.steps}; shorten it, or "
                "train longer"
            )

    @property
    def origins(self) -> dict[str, str]:
        """The origin of the weights, by the prefix of their names; "" stands for the whole model."""
        if self.init_from is None:
            return {}
        return self.init_from if isinstance(self.init_from, dict) else {"": self.init_from}

    @property
    def init_in_parts(self) -> bool:
        """Whether the initial weights may come from a different model."""
        return bool(self.init_include or self.init_exclude or self.init_resize)

    def sequences(self, max_tokens: int) -> int:
        """Return the number of sequences in an optimizer step, for sequences of `max_tokens` tokens."""
        return self.global_batch or (self.global_batch_tokens or 0) // max_tokens


def batch_divides(train: TrainConfig, data: DataConfig) -> None:
    """Require that the global batch consists of whole micro-batches, and of whole sequences if in tokens."""
    tokens, batch = train.global_batch_tokens, train.sequences(data.max_tokens)
    if tokens is not None and batch * data.max_tokens != tokens:
        low = max(1, tokens // data.max_tokens) * data.max_tokens
        raise ValueError(
            f"train.global_batch_tokens = {tokens} is no whole number of sequences of data.max_tokens = "
            f"{data.max_tokens} (train.global_batch = {train.global_batch or 'absent'}); use {low} or "
            f"{low + data.max_tokens}"
        )
    batches = [*(stage.global_batch for stage in train.batch_warmup), batch]
    if any(later <= before for before, later in itertools.pairwise(batches)):
        raise ValueError(
            f"train.batch_warmup and train.global_batch are {', '.join(map(str, batches))} sequences a step; "
            "each must be larger than the one before"
        )
    uneven = next((size for size in batches if size % train.micro_batch), batch)
    if uneven != batch:
        raise ValueError(
            f"train.batch_warmup has a global batch of {uneven}, which is no multiple of train.micro_batch = "
            f"{train.micro_batch}; change one of them"
        )
    if batch % train.micro_batch:
        raise ValueError(
            f"train.global_batch = {batch} is no multiple of train.micro_batch = {train.micro_batch}; change "
            "one of them"
        )


def steps_differ_in_length(train: TrainConfig, data: DataConfig, schedule: ScheduleConfig) -> None:
    """Refuse settings in tokens while the batch size grows, as the tokens of a step change then."""
    settings = {
        "data.phases": bool(data.phases),
        "data.sources.max_epochs": any(source.max_epochs is not None for source in data.sources),
        "schedule.warmup_tokens": bool(schedule.warmup_tokens),
    }
    for key in (key for key, is_set in settings.items() if is_set and train.batch_warmup):
        raise ValueError(
            f"{key} with train.batch_warmup: where it begins or ends follows from tokens a step, which "
            "differ then; leave one of them out (schedule.warmup_steps counts steps)"
        )


def uneven(batch: int, micro_batch: int, readers: int) -> str:
    """Return the error for an uneven batch; it suggests micro-batches, ranks or batches that divide."""
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
