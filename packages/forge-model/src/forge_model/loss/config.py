"""The section `[loss]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from forge_model.loss.cross_entropy import LossTerms


class LossConfig(Config):
    """Next-token cross entropy, and the base class of other losses.

    Attributes:
        chunk_tokens: number of tokens whose logits are computed at a time; 0 computes all at once.
        z_loss_weight: weight of the squared log-normalizer (PaLM, arXiv:2204.02311 section 5); 0 is off.
        label_smoothing: fraction of each target that is spread evenly over the vocabulary (Szegedy et al.
            2016, arXiv:1512.00567 section 7); the reported `loss` stays the plain cross entropy.
    """

    free_keys = ("chunk_tokens",)
    recorded_keys = ("z_loss_weight", "label_smoothing")

    chunk_tokens: Annotated[int, Meta(ge=0)] = 1024
    z_loss_weight: Annotated[float, Meta(ge=0)] = 0.0
    label_smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def build(self) -> Callable[..., LossTerms]:
        """Build the function of hidden states, head weight and labels; see `loss.cross_entropy.Loss`."""
        from forge_model.loss.cross_entropy import Loss

        return Loss(self.chunk_tokens, self.z_loss_weight, self.label_smoothing)


losses: Registry[Any] = Registry("loss", LossConfig, default="cross-entropy")
losses.register("cross-entropy")(LossConfig)
