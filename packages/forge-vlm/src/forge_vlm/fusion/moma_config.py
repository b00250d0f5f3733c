"""The section `[model.fusion]` with `type = "moma"`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from forge_config import Config, Meta
from forge_model.config import DecoderConfig, FfnConfig, LayerConfig, LayerOverride, MLPConfig, SwiGLUConfig
from forge_model.decoder.config import INDICES
from forge_model.side_inputs import Needs
from msgspec.structs import replace

from forge_vlm.fusion.config import fusions
from forge_vlm.fusion.modalities_config import MODALITIES, ModalitiesConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

Count = Annotated[int, Meta(ge=1)]


class ExpertsConfig(Config):
    """The number of experts of each modality."""

    text: Count = 4
    image: Count = 4


@fusions.register("moma")
class MomaConfig(ModalitiesConfig):
    """Feed-forwards are groups of experts, one group for each modality; one attention is shared.

    Lin et al. 2024, arXiv:2407.21770. An expert is the feed-forward of the decoder; its weight for a token is
    the sigmoid of a router.

    Attributes:
        layers: layers whose feed-forwards become experts, as in `[[model.decoder.overrides]]`.
        experts: number of experts of each modality.
        capacity_factor: experts of a token on average: each of E experts has this over E of the tokens of its
            modality. 1 costs as much as the decoder.
        routing: `choice`: while training, each expert chooses its tokens within a sequence
            (arXiv:2202.09368), which leaks information of later tokens; evaluation and generation use
            auxiliary routers, which see one token alone. `threshold`: a token goes to the experts whose score
            for it is above a running threshold (arXiv:2603.11535), in training too.
        normalize: divide the weights of the experts of a token by their sum.
        gumbel_noise: scale of the noise that `choice` adds to logits in training, a difference of two Gumbel
            variables.
        aux_dim: hidden width of the auxiliary routers.
        aux_weight: weight of their loss, whose gradient reaches nothing else.
        threshold_decay: decay, per step, of the running mean of thresholds.
    """

    host: ClassVar[frozenset[str]] = frozenset()

    layers: Annotated[str, Meta(pattern=INDICES)] = ":"
    experts: ExpertsConfig = ExpertsConfig()
    capacity_factor: Annotated[float, Meta(gt=0)] = 1.0
    routing: Literal["choice", "threshold"] = "choice"
    normalize: bool = False
    gumbel_noise: bool = False
    aux_dim: Count = 32
    aux_weight: Annotated[float, Meta(ge=0)] = 1.0
    threshold_decay: Annotated[float, Meta(ge=0, lt=1)] = 0.99

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        for name in MODALITIES:
            if self.capacity_factor > (count := getattr(self.experts, name)):
                yield (
                    f"capacity_factor = {self.capacity_factor} experts a token, of experts.{name} = {count}; "
                    "use more experts, or a smaller factor"
                )
        if self.gumbel_noise and self.routing != "choice":
            yield 'gumbel_noise = true is noise on what experts choose; use routing = "choice"'

    def decoder(self, config: DecoderConfig) -> DecoderConfig:
        """See `FusionConfig.decoder`."""
        self.require_layers(config)
        chosen = LayerOverride(layers=self.layers).indices(config.num_layers)
        if not chosen:
            raise ValueError(
                f"fusion.layers = {self.layers!r} names no layer of the {config.num_layers} of the decoder"
            )
        experts = [
            LayerOverride(layers=str(index), ffn=MomaFfnConfig(expert=config.layer(index).ffn, moma=self))
            for index in chosen
        ]
        return replace(config, overrides=[*config.overrides, *experts])

    def seed_of(self, name: str) -> str | None:
        """See `FusionConfig.seed_of`; experts are copies (upcycling, arXiv:2212.05055), routers are new."""
        layer, found, inner = name.partition(".ffn.")
        modality, _, inner = inner.partition(".")
        if not found or modality not in MODALITIES:
            return name
        part, _, tensor = inner.partition(".")
        kinds = {"w": "weight", "b": "bias"}
        return f"{layer}.ffn.w{tensor[1:]}.{kinds[tensor[0]]}" if part == "experts" else None

    def require_layer(self, index: int, layer: LayerConfig) -> None:
        """See `ModalitiesConfig.require_layer`."""
        if not isinstance(layer.ffn, SwiGLUConfig | MLPConfig):
            raise ValueError(
                f"layer {index} has a {type(layer.ffn).__name__}; an expert is a feed-forward of type "
                "swiglu, geglu or mlp"
            )

    def arrays(
        self, places: np.ndarray, images: np.ndarray, doc_ids: np.ndarray, counts: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """See `FusionConfig.arrays`; without sizes, since no tokens are sorted here."""
        made = super().arrays(places, images, doc_ids, counts)
        del made["modality_sizes"]
        return made

    def side_inputs(self, tokens: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """See `FusionConfig.side_inputs`; adds `modality`, in which padding is neither text nor image."""
        given = {"modality": tokens.new_zeros(tokens.shape)} | dict(inputs)
        if (doc_ids := given.get("doc_ids")) is not None:
            given["modality"] = given["modality"].masked_fill(doc_ids < 0, len(MODALITIES))
        return given

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `FusionConfig.require_axes`."""
        if cp > 1:
            raise ValueError(
                "experts choose among all tokens of a sequence, of which a rank has a part; set mesh.cp = 1"
            )


class MomaFfnConfig(FfnConfig):
    """The groups of experts of one layer.

    Attributes:
        expert: the feed-forward of an expert.
        moma: number of experts, and their routing.
    """

    needs: ClassVar[Needs] = {"modality": "token"}

    expert: FfnConfig
    moma: MomaConfig

    def hidden(self, dim: int) -> int:
        """See `FfnConfig.hidden`; the width of one expert."""
        return self.expert.hidden(dim)

    def build(self, dim: int) -> nn.Module:
        """See `FfnConfig.build`."""
        from forge_vlm.fusion.moma import MomaFfn

        return MomaFfn(self, dim)

    def tensor_sizes(self, dim: int) -> dict[str, int]:
        """See `FfnConfig.tensor_sizes`; experts are not sharded."""
        return {}

    def expert_counts(self) -> dict[str, int]:
        """See `FfnConfig.expert_counts`."""
        return {name: getattr(self.moma.experts, name) for name in MODALITIES}

    def forward_flops(self, dim: int) -> float:
        """See `FfnConfig.forward_flops`; both routers process every token."""
        experts = sum(self.expert_counts().values())
        routers = 2 * dim * experts
        if self.moma.routing == "choice":
            routers += 2 * self.moma.aux_dim * (len(MODALITIES) * dim + experts)
        return self.moma.capacity_factor * self.expert.forward_flops(dim) + routers
