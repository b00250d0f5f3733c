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
        host: those of `arrays` that stay in the memory of the host.
        passed_on: the side input of blocks [B, `tokens_beside`, D] that the module of the fusion makes, and
            that the first stage of a pipeline passes on to the others.
    """

    host: ClassVar[frozenset[str]] = frozenset()
    passed_on: ClassVar[str] = ""

    @property
    def tokens_beside(self) -> int:
        """Most visual tokens of a sequence, given beside its tokens; 0 where they stand among them."""
        return 0

    @property
    def ids_behind(self) -> int:
        """How many ids behind the vocabulary may be that of the token at places; see `image_token_id`."""
        return 0

    def decoder(self, config: DecoderConfig) -> DecoderConfig:
        """The decoder that is built: the one of the configuration, with the blocks that the fusion needs.

        Raises:
            ValueError: the fusion cannot be put into it.
        """
        return config

    def seed_of(self, name: str) -> str | None:
        """The weight of the decoder without images from which one of `decoder` starts; None if none does."""
        return name

    def is_of_images(self, name: str) -> bool:
        """Whether images alone reach a module of `decoder`: a run without any does not train it.

        Args:
            name: of the module, with `*` for numbers, such as `layers.*.ffn`; modules inside of it are asked
                for too.
        """
        return False

    def build(self, dim: int) -> nn.Module:
        """A module that makes inputs of a decoder, `dim` wide, of visual tokens; see `fusion.joint.Joint`."""
        raise NotImplementedError

    def places(self, visual_tokens: int) -> int:
        """Tokens of a sequence that stand for an image of so many visual tokens."""
        return visual_tokens

    def arrays(
        self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray, counts: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """What the model takes of a sequence beside `image_index` and `image_places`, by name; or these.

        Args:
            places: [T] int64, 0 for text, else 1 + the number of the place in the sequence.
            images: [T] int64, 0 for text, else 1 + the number of the image in the sequence.
            doc_ids: [T] int64, the sample of each token, not falling; -1 for padding at the end.
            counts: the visual tokens of each image of the sequence.
        """
        return {}

    def prompt_arrays(self, prompt: np.ndarray, doc_ids: np.ndarray) -> dict[str, np.ndarray]:
        """What the model takes beside `arrays`, made of which tokens are read and which are to be written.

        Args:
            prompt: [T] bool, the tokens before the first target of their sample; images are among them.
            doc_ids: [T] int64, see `arrays`.
        """
        return {}

    def by_token(self) -> Sequence[str]:
        """The names in `arrays` and `prompt_arrays` with a value for each token."""
        return ()

    def side_inputs(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the decoder takes beside tokens, made of the inputs of the model; on each stage of a pipeline.

        Args:
            tokens: [B, T].
            inputs: of the model; those of `arrays` are missing where there is no image at all.
        """
        return dict(inputs)

    def after_prompt(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Side inputs of the tokens that are written after a prompt, one at a time.

        Args:
            tokens: [B, T] the prompts.
            inputs: the side inputs that the decoder was given with them.
        """
        return {}

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `ModelConfig.require_axes`; the blocks of the decoder are asked beside."""

    def other_flops(self, decoder: DecoderConfig, visual_tokens: int) -> float:
        """Matmul FLOPs of a forward pass over so many visual tokens, beside those that the decoder counts.

        Args:
            decoder: what `decoder` made.
            visual_tokens: of a batch.
        """
        return 0.0


fusions = Registry("fusion", FusionConfig, default="joint")


@fusions.register("joint")
class JointConfig(FusionConfig):
    """Visual tokens take the places of tokens, and the decoder sees one sequence (LLaVA, arXiv:2304.08485).

    Attributes:
        attention: what a visual token sees: `causal` as text does, or all of its `image`, in both directions;
            or that all tokens of a prompt, `prefix`, see each other, visual ones and those of its text, which
            end at the first target (PaliGemma, arXiv:2407.07726 figure 2).
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
