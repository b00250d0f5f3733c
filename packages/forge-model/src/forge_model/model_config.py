"""The interface of every kind of `[model]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from forge_config import Config, Meta, Registry

if TYPE_CHECKING:
    from torch import nn

    from forge_model.hf.checkpoint import HuggingFace

Count = Annotated[int, Meta(ge=1)]


class Prompt(NamedTuple):
    """A prompt as inputs of a model.

    Attributes:
        tokens: token ids.
        inputs: further inputs, numpy arrays by name, of a batch of one.
        host: names of inputs that stay on the host.
        by_token: names of inputs [1, ..., T]. A batch pads them on the left with zeros, as it pads tokens,
            and concatenates all other inputs.
    """

    tokens: list[int]
    inputs: Mapping[str, Any] = {}
    host: frozenset[str] = frozenset()
    by_token: frozenset[str] = frozenset()


class ModelConfig(Config):
    """Interface of `[model]`. A model may have `vocab_size` and `max_tokens` as keys, or derive them."""

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows."""
        raise NotImplementedError

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        raise NotImplementedError

    @property
    def item_tokens(self) -> int:
        """Tokens of a sequence that an item such as an image takes; 0 if the model has no items."""
        return 0

    @property
    def tokenizer_ids(self) -> int:
        """The largest number of tokenizer ids; above `vocab_size` if the further ids stand for no text."""
        return self.vocab_size

    def build(self) -> nn.Module:
        """Build the model, without meaningful values; build it under `torch.device("meta")`."""
        raise NotImplementedError

    def parts(self) -> dict[str, ModelConfig]:
        """The models this one is composed of, by the prefix of their weights; empty for a single model."""
        return {}

    def seeds(self) -> dict[str, ModelConfig]:
        """Models whose weights can initialize parts of this one, by the prefix of these parts."""
        return self.parts()

    def seed_of(self, name: str) -> str | None:
        """Return the name, in one of `seeds`, of the weight that initializes `name`; None if none does."""
        return name

    def items(self) -> Any:
        """The reader of items such as images: a `forge_data.sources.items.ItemReader`, or None."""
        return None

    def prompt(self, text: str, images: Sequence[bytes], tokenizer: Any) -> Prompt:
        """Prepare the inputs of a prompt with images.

        Args:
            text: text of the prompt.
            images: the files of its images.
            tokenizer: a `forge_data.tokenizer.tokenizer.Tokenizer`.

        Raises:
            ValueError: the model takes no images, or not these.
        """
        raise ValueError(f"given {len(images)} images, and a {type(self).__name__} takes none")

    def hugging_face(self) -> HuggingFace | None:
        """Converter between these weights and a Hugging Face model; None if there is none."""
        return None

    def flops_per_token(self, tokens: int, causal: bool = True) -> float:
        """Model FLOPs a token of forward and backward, recomputation not counted.

        Args:
            tokens: length of the sequences.
            causal: count only the pairs of tokens that attention needs; otherwise all of them.
        """
        raise NotImplementedError

    def step_flops(
        self, shapes: Mapping[str, Sequence[int]], causal: bool = True, frozen: Collection[str] = ()
    ) -> float:
        """Model FLOPs of forward and backward over a batch.

        Args:
            shapes: shapes of the inputs by name, `tokens` [B, T] among them.
            causal: see `flops_per_token`.
            frozen: names of parts that are not trained.
        """
        batch, tokens = shapes["tokens"]
        return batch * tokens * self.flops_per_token(tokens, causal)

    def layer_flops(self, tokens: int, causal: bool = True) -> list[float]:
        """Matmul FLOPs a token of each block in a forward pass over `tokens`; empty if unknown."""
        return []

    def tensor_sizes(self) -> dict[str, int]:
        """The sizes, by key, that tensor parallelism must divide."""
        return {}

    @property
    def extra_tokens(self) -> int:
        """Number of extra rows in which the first pipeline stage passes features to later stages."""
        return 0

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """Refuse tensor and context parallelism that would compute another model.

        Args:
            tp: ranks that share matrices.
            cp: ranks that share a sequence.
            sequence: whether the residual stream is sharded over the ranks of tp.
            method: method of context parallelism.

        Raises:
            ValueError: they would compute another model.
        """

    def scales_learning(self) -> bool:
        """Whether learning rates of its parameters depend on its width."""
        return False

    def length_borders(self) -> list[int]:
        """Return, rising, the sequence lengths above which the rotation of all positions changes."""
        return []

    def expert_counts(self) -> dict[str, int]:
        """Return the number of experts of each layer with experts, by name."""
        return {}

    def block_kinds(self) -> int:
        """Number of kinds of blocks, each of which is compiled separately."""
        return 1

    def require_cut_experts(self, ranks: int) -> None:
        """Check that each of `ranks` ranks can have a part of the hidden width of every expert.

        Raises:
            ValueError: they cannot, or there are no experts.
        """
        raise ValueError(
            'tensor_parallel.experts = "cut", and this model has no experts that could be; set it to "whole"'
        )

    def expert_groups(self) -> dict[str, int]:
        """Return for each layer of `expert_counts` the number of groups if a token chooses some, else 1."""
        return dict.fromkeys(self.expert_counts(), 1)

    def require_learning(self) -> None:
        """Check that every part of the model can learn, as far as its configuration shows.

        Raises:
            ValueError: one cannot.
        """

    def require_stages(self, layers: Sequence[int], is_v: bool = False) -> None:
        """Check that the model can be cut into the stages of a pipeline.

        Args:
            layers: number of layers of each stage; 0 where that is not set.
            is_v: whether one rank has the first and the last stage.

        Raises:
            ValueError: it cannot.
        """
        raise ValueError(f"a {type(self).__name__} cannot be cut into stages")


class ComposedConfig(ModelConfig):
    """A model around a language model: its other parts turn images and the like into features.

    The language model and `other_flops` answer questions about sizes, layouts and costs.
    """

    def language_model(self) -> tuple[str, ModelConfig]:
        """The prefix of its weights, and its configuration."""
        raise NotImplementedError

    def parts(self) -> dict[str, ModelConfig]:
        """See `ModelConfig.parts`."""
        return dict([self.language_model()])

    @property
    def vocab_size(self) -> int:
        """See `ModelConfig.vocab_size`."""
        return self.language_model()[1].vocab_size

    @property
    def max_tokens(self) -> int:
        """See `ModelConfig.max_tokens`."""
        return self.language_model()[1].max_tokens

    def flops_per_token(self, tokens: int, causal: bool = True) -> float:
        """See `ModelConfig.flops_per_token`."""
        return self.language_model()[1].flops_per_token(tokens, causal)

    def layer_flops(self, tokens: int, causal: bool = True) -> list[float]:
        """See `ModelConfig.layer_flops`."""
        return self.language_model()[1].layer_flops(tokens, causal)

    def tensor_sizes(self) -> dict[str, int]:
        """See `ModelConfig.tensor_sizes`."""
        prefix, model = self.language_model()
        return {f"{prefix}.{name}": size for name, size in model.tensor_sizes().items()}

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """See `ModelConfig.require_axes`."""
        model = self.language_model()[1]
        ahead = getattr(getattr(model, "mtp", None), "num_modules", 0)
        if cp > 1 and ahead:
            raise ValueError(
                f"mtp.num_modules = {ahead} in a model around a decoder: the tokens are cut before the "
                "decoder looks ahead; use mesh.cp = 1, or no such modules"
            )
        model.require_axes(tp, cp, sequence, method)

    def scales_learning(self) -> bool:
        """See `ModelConfig.scales_learning`."""
        return self.language_model()[1].scales_learning()

    def length_borders(self) -> list[int]:
        """See `ModelConfig.length_borders`."""
        return self.language_model()[1].length_borders()

    def other_flops(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Matmul FLOPs of a forward pass over a batch of each other part, in the order of computation.

        The entry of the language model holds costs that it does not count itself.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its parts beside the language model cost; give it a "
            "method other_flops(shapes)"
        )

    def step_flops(
        self, shapes: Mapping[str, Sequence[int]], causal: bool = True, frozen: Collection[str] = ()
    ) -> float:
        """See `ModelConfig.step_flops`.

        A frozen part computes no gradients of weights, a third of its cost; where nothing before it is
        trained, it has no backward pass at all.
        """
        parts, (name, _) = self.other_flops(shapes), self.language_model()
        language = parts.pop(name, 0.0) + super().step_flops(shapes, causal) / 3
        total, trains = 0.0, False
        for part, forward in [*parts.items(), (name, language)]:
            passes = 3 if part not in frozen else 2 if trains else 1
            total, trains = total + passes * forward, trains or part not in frozen
        return total

    def expert_counts(self) -> dict[str, int]:
        """See `ModelConfig.expert_counts`."""
        return self.language_model()[1].expert_counts()

    def block_kinds(self) -> int:
        """See `ModelConfig.block_kinds`; the blocks of other parts count as one kind."""
        return self.language_model()[1].block_kinds() + 1

    def require_cut_experts(self, ranks: int) -> None:
        """See `ModelConfig.require_cut_experts`."""
        self.language_model()[1].require_cut_experts(ranks)

    def expert_groups(self) -> dict[str, int]:
        """See `ModelConfig.expert_groups`."""
        return self.language_model()[1].expert_groups()

    def require_learning(self) -> None:
        """See `ModelConfig.require_learning`."""
        self.language_model()[1].require_learning()

    def require_stages(self, layers: Sequence[int], is_v: bool = False) -> None:
        """See `ModelConfig.require_stages`."""
        self.language_model()[1].require_stages(layers, is_v)


models = Registry("model", ModelConfig, default="decoder")
