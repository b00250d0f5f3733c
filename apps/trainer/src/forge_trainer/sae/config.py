"""The file of `forge sae train`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from forge_config import Config, Meta

Count = Annotated[int, Meta(ge=1)]
Steps = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class SourceConfig(Config):
    """The source of activations: a store of extracted activations, or a run whose model computes them.

    Attributes:
        site: site whose values are encoded, such as `layers.1:out`.
        target: site that a transcoder predicts.
        store: folder written by `extract_representations` or a hook `record`.
        window_rows: rows of a store in memory at a time.
        block_rows: neighbouring rows of a store that are read together.
        run: a run directory, or the folder of a Hugging Face model; the text is its training text.
        step: step of the checkpoint; default the newest.
        samples: number of sequences of text of a run, from the first in its order.
        samples_per_window: number of sequences whose rows are in memory at a time.
        batch_size: number of sequences in a forward pass.
        seed: seed of the order.
    """

    site: str
    target: str | None = None
    store: str | None = None
    window_rows: Count = 1 << 17
    block_rows: Count = 256
    run: str | None = None
    step: Steps | None = None
    samples: Count = 4096
    samples_per_window: Count = 256
    batch_size: Count = 8
    seed: int = 0

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if (self.store is None) == (self.run is None):
            yield f"store is {self.store!r} and run is {self.run!r}; expected one of them"
        if self.step is not None and self.run is None:
            yield "step is given without run; expected the step of a checkpoint of a run"
        if self.batch_size > self.samples_per_window:
            yield f"batch_size {self.batch_size} is more than samples_per_window {self.samples_per_window}"
        if self.block_rows > self.window_rows:
            yield f"block_rows {self.block_rows} is more than window_rows {self.window_rows}"


class AutoencoderConfig(Config):
    """The autoencoder; a transcoder if the source has a target. See `forge_interp.sae.SAEConfig`.

    Attributes:
        d_sae: number of features.
        activation: activation function of the features.
        k: number of active features: of each row (topk), or on average (batch_topk).
        skip: whether a transcoder adds a linear map of its input.
        apply_b_dec_to_input: see `SAEConfig`; default true except for a transcoder.
        rescale_acts_by_decoder_norm: see `SAEConfig`; default true for topk and batch_topk.
    """

    d_sae: Count
    activation: Literal["relu", "topk", "batch_topk", "jumprelu", "gated"] = "batch_topk"
    k: Positive | None = None
    skip: bool = False
    apply_b_dec_to_input: bool | None = None
    rescale_acts_by_decoder_norm: bool | None = None

    @property
    def is_topk(self) -> bool:
        """Whether the activation needs k."""
        return self.activation in ("topk", "batch_topk")

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.is_topk != (self.k is not None):
            wanted = "a number of active features" if self.is_topk else "none: delete the key"
            yield f"k is {self.k} for {self.activation}; expected {wanted}"
        if self.k is not None and self.k > self.d_sae:
            yield f"k {self.k} is more than d_sae {self.d_sae}"


class PenaltyConfig(Config):
    """The sparsity penalty. See `forge_interp.sae.activations.Penalty`.

    Attributes:
        coefficient: coefficient of the L1 (relu, gated) or L0 (jumprelu) penalty.
        bandwidth: bandwidth of the straight-through estimator of jumprelu.
        pre_act: coefficient of the loss that revives dead features of jumprelu.
        auxiliary: coefficient of the loss of dead features (topk, batch_topk).
    """

    coefficient: NotNegative = 1.0
    bandwidth: Positive = 0.05
    pre_act: NotNegative = 0.0
    auxiliary: NotNegative = 1.0


class TrainConfig(Config):
    """How to train. See `forge_interp.sae.SAETraining`.

    Attributes:
        steps: number of steps of Adam.
        batch_rows: rows of a batch over all ranks.
        lr: peak learning rate.
        betas: decay rates of the moments of Adam.
        lr_warmup_steps: steps over which the learning rate rises from 0.
        lr_decay_steps: steps at the end over which the learning rate falls towards 0.
        penalty: the sparsity penalty.
        sparsity_warmup_steps: steps over which the coefficient of the penalty rises from 0.
        dead_after_steps: number of steps without activity after which a feature is dead.
        unit_decoder: whether to keep decoder rows at norm 1.
        scale_input: whether to train on inputs scaled to a mean norm of sqrt(d_in).
        save_every: steps between saves.
        log_every: steps between log entries.
        seed: seed of initial weights and the order.
    """

    steps: Count
    batch_rows: Count = 4096
    lr: Positive = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    lr_warmup_steps: Steps = 0
    lr_decay_steps: Steps = 0
    penalty: PenaltyConfig = PenaltyConfig()
    sparsity_warmup_steps: Steps = 0
    dead_after_steps: Count = 1000
    unit_decoder: bool = False
    scale_input: bool = False
    save_every: Count = 1000
    log_every: Count = 100
    seed: int = 0


class SAEJob(Config):
    """The whole file.

    Attributes:
        out: folder for the state, the metrics and the autoencoder.
        source: source of the activations.
        sae: the autoencoder.
        train: settings of the training.
    """

    out: str
    source: SourceConfig
    sae: AutoencoderConfig
    train: TrainConfig
