"""What every kind of `[model]` has, whatever the model is. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Meta(ge=1)]


class ModelConfig(Config):
    """Interface of `[model]`.

    Attributes:
        vocab_size: token ids the model knows.
        max_tokens: longest sequence.
    """

    vocab_size: Count
    max_tokens: Count = 2048

    def build(self) -> nn.Module:
        """The model, with parameters not yet meaningful; build it under `torch.device("meta")`."""
        raise NotImplementedError

    def items(self) -> Any:
        """What reads items of samples that are no text, a `forge_data.sources.items.ItemReader`, or None."""
        return None

    def flops_per_token(self, tokens: int, causal: bool = True) -> float:
        """Model FLOPs a token of forward and backward, recomputation not counted.

        Args:
            tokens: length of the sequences.
            causal: count only the pairs of tokens that attention needs; otherwise all of them.
        """
        raise NotImplementedError

    def layer_flops(self, tokens: int, causal: bool = True) -> list[float]:
        """Matmul FLOPs a token of each block in a forward pass over `tokens`; empty if unknown."""
        return []

    def tensor_sizes(self) -> dict[str, int]:
        """The sizes, by key, that tensor parallelism must divide."""
        return {}

    def require_axes(self, tp: int, cp: int) -> None:
        """See that tensor and context parallelism compute what one process does.

        Args:
            tp: ranks that share matrices.
            cp: ranks that share a sequence.

        Raises:
            ValueError: they do not.
        """

    def expert_counts(self) -> dict[str, int]:
        """The number of experts of each layer that has some, by name."""
        return {}

    def expert_groups(self) -> dict[str, int]:
        """Of each of these layers, how many groups of experts there are if a token chooses in some; or 1."""
        return dict.fromkeys(self.expert_counts(), 1)

    def require_stages(self, layers: Sequence[int]) -> None:
        """See that the model can be cut into the stages of a pipeline.

        Args:
            layers: how many each stage is to have; 0 where that is not said.

        Raises:
            ValueError: it cannot.
        """
        raise ValueError(f"a {type(self).__name__} cannot be cut into stages")


models = Registry("model", ModelConfig, default="decoder")
