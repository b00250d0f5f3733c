"""The section `[fp8]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from forge_config import ALL_KEYS, Config, Meta

from forge_parallel.error import ParallelError


class FP8Config(Config):
    """Matmuls of linear layers in 8-bit floats, by torchao; weights and checkpoints stay as they are.

    Attributes:
        recipe: `none`; one scale a tensor (`tensorwise`), one a row and column (`rowwise`), or `rowwise` with
            the gradient of the weight in high precision (`rowwise_with_gw_hp`); one scale for 32 neighbouring
            numbers, on GPUs from Blackwell on (`mxfp8`).
        exclude: layers that stay in high precision, as dotted names in which `*` stands for one component.
        min_size: layers with fewer inputs or outputs stay in high precision, because 8 bits would be slower.
            Layers whose sizes are no multiples of 16 (`mxfp8`: 32) always do.
        experts: the matrices of experts too, with `rowwise` and `mxfp8`. The rows of each expert are padded
            to multiples of 16 (`mxfp8`: 32).
        gather: FSDP2 gathers weights in 8 bits too, with one scale a tensor that is found for all weights at
            once: half the traffic of bfloat16. Only with `tensorwise`.
        emulate: round to 8 bits and compute in high precision, for tests on machines without 8-bit matmuls.
    """

    recorded_keys = (ALL_KEYS,)

    recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "none"
    exclude: list[str] = []
    min_size: Annotated[int, Meta(ge=16)] = 1024
    experts: bool = False
    gather: bool = False
    emulate: bool = False

    @property
    def multiple(self) -> int:
        """The number that sizes of 8-bit products must be multiples of."""
        return 32 if self.recipe == "mxfp8" else 16

    @property
    def multiple_of_tokens(self) -> int:
        """The number that the token count of 8-bit weight gradients must be a multiple of."""
        return 1 if self.recipe in ("none", "rowwise_with_gw_hp") else self.multiple

    def require_tokens(self, tokens: int) -> None:
        """Check that no layer has to pad its tokens for the gradients of weights, which costs a copy of them.

        Args:
            tokens: number of text tokens that a layer sees at once on one rank.

        Raises:
            ParallelError: the number is no multiple of what such products need.
        """
        if tokens % self.multiple_of_tokens == 0:
            return
        raise ParallelError(
            f'fp8.recipe = "{self.recipe}" with {tokens} tokens of a micro-batch on each rank, over which '
            "the gradients of weights sum (train.micro_batch times data.max_tokens, over mesh.cp); "
            f"expected a multiple of {self.multiple}: change one of them, "
            'or use recipe = "rowwise_with_gw_hp"'
        )

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.experts and self.recipe not in ("rowwise", "mxfp8"):
            yield (
                f'experts = true with recipe = "{self.recipe}": grouped products in 8 bits need a scale for '
                'each row; give recipe = "rowwise" or "mxfp8", or experts = false'
            )
        if self.gather and self.recipe != "tensorwise":
            yield (
                f'gather = true with recipe = "{self.recipe}": only weights with one scale a tensor are '
                'gathered in 8 bits; give recipe = "tensorwise", or gather = false'
            )
