"""Linear and embedding layers that draw no initial values: `forge_model.initialize` does.

torch draws them even on the meta device, and loads its compiler for that, which takes seconds.
"""

from torch import nn


class Linear(nn.Linear):
    """`nn.Linear` whose parameters mean nothing until they are filled."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class Embedding(nn.Embedding):
    """`nn.Embedding` whose weight means nothing until it is filled."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is."""
