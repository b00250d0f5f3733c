"""What `[loss]` holds. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from forge_config import Config, Meta

if TYPE_CHECKING:
    from forge_model.loss import Loss


class LossConfig(Config):
    """Next-token cross entropy.

    Attributes:
        chunk_tokens: logits are made for so many tokens at a time; 0 makes them all at once.
        z_loss_weight: weight of the squared log-normalizer (PaLM, arXiv:2204.02311 section 5); 0 is off.
    """

    free_keys = ("chunk_tokens",)
    recorded_keys = ("z_loss_weight",)

    chunk_tokens: Annotated[int, Meta(ge=0)] = 1024
    z_loss_weight: Annotated[float, Meta(ge=0)] = 0.0

    def build(self) -> Loss:
        """The loss as a function of hidden states, head weight and labels."""
        from forge_model.loss import Loss

        return Loss(self.chunk_tokens, self.z_loss_weight)
