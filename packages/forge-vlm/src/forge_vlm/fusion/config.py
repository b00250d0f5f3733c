"""The section `[model.fusion]`: how visual tokens enter the decoder. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from forge_config import Config, Registry
from forge_model.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


class FusionConfig(Config):
    """Interface of `[model.fusion]`.

    Attributes:
        host: names of `arrays` that stay in host memory.
        passed_on: name of the side input of blocks [B, `tokens_beside`, D] that the module of the fusion
            computes and the first pipeline stage passes to later ones.
    """

    host: ClassVar[frozenset[str]] = frozenset()
    passed_on: ClassVar[str] = ""

    @property
    def tokens_beside(self) -> int:
        """Most visual tokens of a sequence if they are beside its tokens; 0 if they are among them."""
        return 0

    @property
    def ids_behind(self) -> int:
        """Number of ids after the vocabulary that may be the image token; see `image_token_id`."""
        return 0

    def decoder(self, config: DecoderConfig) -> DecoderConfig:
        """Return the decoder of the configuration with the blocks that the fusion needs.

        Raises:
            ValueError: the fusion does not fit this decoder.
        """
        return config

    def seed_of(self, name: str) -> str | None:
        """Return the weight of the text decoder that initializes a weight of `decoder`; None if none does."""
        return name

    def is_of_images(self, name: str) -> bool:
        """Whether only images use a module of `decoder`, so that a run without images does not train it.

        Args:
            name: name of the module, with `*` for numbers, such as `layers.*.ffn`; also called with the
                modules inside of it.
        """
        return False

    def build(self, dim: int) -> nn.Module:
        """Build a module that makes decoder inputs of visual tokens, `dim` wide; see `fusion.joint.Joint`."""
        raise NotImplementedError

    def places(self, visual_tokens: int) -> int:
        """Return the number of tokens in a sequence that stand for an image with so many visual tokens."""
        return visual_tokens

    def arrays(
        self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray, counts: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return the model inputs of a sequence besides, or in place of, `image_index` and `image_places`.

        Args:
            places: [T] int64, 0 for text, else 1 + the number of the place in the sequence.
            images: [T] int64, 0 for text, else 1 + the number of the image in the sequence.
            doc_ids: [T] int64, the sample of each token, not falling; -1 for padding at the end.
            counts: number of visual tokens of each image of the sequence.
        """
        return {}

    def prompt_arrays(self, prompt: np.ndarray, doc_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the model inputs besides `arrays` that depend on which tokens are prompt and which answer.

        Args:
            prompt: [T] bool, the tokens before the first target of their sample; images are among them.
            doc_ids: [T] int64, see `arrays`.
        """
        return {}

    def by_token(self) -> Sequence[str]:
        """Return the names in `arrays` and `prompt_arrays` with a value for each token."""
        return ()

    def side_inputs(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the decoder inputs besides tokens, from the model inputs; called on each pipeline stage.

        Args:
            tokens: [B, T].
            inputs: inputs of the model; without those of `arrays` if there is no image at all.
        """
        return dict(inputs)

    def after_prompt(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the side inputs of the tokens that are generated after a prompt, one at a time.

        Args:
            tokens: [B, T] the prompts.
            inputs: the side inputs that the decoder got with them.
        """
        return {}

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `ModelConfig.require_axes`; the blocks of the decoder are checked separately."""

    def other_flops(self, decoder: DecoderConfig, visual_tokens: int) -> float:
        """Return the matmul FLOPs of a forward pass over visual tokens that the decoder does not count.

        Args:
            decoder: result of `decoder`.
            visual_tokens: number of visual tokens of a batch.
        """
        return 0.0


fusions = Registry("fusion", FusionConfig, default="joint")


@fusions.register("joint")
class JointConfig(FusionConfig):
    """Visual tokens replace the tokens at image places of one sequence (LLaVA, arXiv:2304.08485).

    Attributes:
        attention: which tokens a visual token sees: earlier ones, as text does (`causal`); or also all of its
            `image`, in both directions; or, with `prefix`, all tokens of a prompt see each other, visual ones
            and those of its text, which ends at the first target (PaliGemma, arXiv:2407.07726 figure 2).
    """

    attention: Literal["causal", "image", "prefix"] = "causal"

    def build(self, dim: int) -> nn.Module:
        """See `FusionConfig.build`."""
        from forge_vlm.fusion.joint import Joint

        return Joint()

    def arrays(
        self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray, counts: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """See `FusionConfig.arrays`."""
        return {"span_ids": images} if self.attention == "image" else {}

    def prompt_arrays(self, prompt: np.ndarray, doc_ids: np.ndarray) -> dict[str, np.ndarray]:
        """See `FusionConfig.prompt_arrays`."""
        return {"span_ids": np.where(prompt, 1 + doc_ids, 0)} if self.attention == "prefix" else {}

    def by_token(self) -> Sequence[str]:
        """See `FusionConfig.by_token`."""
        return () if self.attention == "causal" else ("span_ids",)

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `FusionConfig.require_axes`."""
        if cp > 1 and method != "ulysses" and self.attention != "causal":
            raise ValueError(
                "visual tokens that see all of their image, or prompt, see later ones, which context "
                f'parallelism by "{method}" has not; set context_parallel.method = "ulysses", or mesh.cp = 1'
            )
