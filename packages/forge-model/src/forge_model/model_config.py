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
    """A prompt as a model takes it.

    Attributes:
        tokens: ids.
        inputs: what else it takes, numpy arrays by name, of a batch of one.
        host: names of inputs that stay on the host.
        by_token: names of inputs [1, ..., T]. In a batch they are padded on the left with zeros, as tokens
            are; others are laid one behind the other.
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
        """Tokens of a sequence that an item takes which is no text, such as an image; 0 if there are none."""
        return 0

    @property
    def tokenizer_ids(self) -> int:
        """The largest number of tokenizer ids; above `vocab_size` if the further ids stand for no text."""
        return self.vocab_size

    def build(self) -> nn.Module:
        """The model, with parameters not yet meaningful; build it under `torch.device("meta")`."""
        raise NotImplementedError

    def parts(self) -> dict[str, ModelConfig]:
        """The models that this one is composed of, by the prefix of their weights; empty if it is one."""
        return {}

    def seeds(self) -> dict[str, ModelConfig]:
        """The models whose weights parts of this one may start from, by the prefix of these parts."""
        return self.parts()

    def seed_of(self, name: str) -> str | None:
        """The weight of one of `seeds`, behind its prefix, from which a weight starts; None if none does."""
        return name

    def items(self) -> Any:
        """The reader of items that are no text: a `forge_data.sources.items.ItemReader`, or None."""
        return None

    def prompt(self, text: str, images: Sequence[bytes], tokenizer: Any) -> Prompt:
        """Prepare the inputs of a prompt with images.

        Args:
            text: of the prompt.
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
            shapes: of the inputs by name, `tokens` [B, T] among them.
            causal: see `flops_per_token`.
            frozen: parts by name of which nothing is trained.
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
        """Rows beside the tokens in which the first stage of a pipeline passes on what later ones need."""
        return 0

    def require_axes(self, tp: int, cp: int, sequence: bool, method: str) -> None:
        """Refuse tensor and context parallelism that would compute another model.

        Args:
            tp: ranks that share matrices.
            cp: ranks that share a sequence.
            sequence: whether the residual stream is cut over the ranks of tp.
            method: of context parallelism.

        Raises:
            ValueError: they do not.
        """

    def scales_learning(self) -> bool:
        """Whether learning rates of its parameters follow from its width."""
        return False

    def length_borders(self) -> list[int]:
        """The numbers of tokens above which all positions of a sequence turn otherwise, rising."""
        return []

    def expert_counts(self) -> dict[str, int]:
        """The number of experts of each layer that has some, by name."""
        return {}

    def block_kinds(self) -> int:
        """How many kinds of blocks there are, each compiled for itself."""
        return 1

    def require_cut_experts(self, ranks: int) -> None:
        """See that so many ranks can each have a part of the hidden width of every expert.

        Raises:
            ValueError: they cannot, or there are no experts.
        """
        raise ValueError(
            'tensor_parallel.experts = "cut", and this model has no experts that could be; set it to "whole"'
        )

    def expert_groups(self) -> dict[str, int]:
        """Of each of these layers, how many groups of experts there are if a token chooses in some; or 1."""
        return dict.fromkeys(self.expert_counts(), 1)

    def require_learning(self) -> None:
        """See that every part of the model can learn, as far as its configuration tells.

        Raises:
            ValueError: one cannot.
        """

    def require_stages(self, layers: Sequence[int], is_v: bool = False) -> None:
        """See that the model can be cut into the stages of a pipeline.

        Args:
            layers: how many each stage is to have; 0 where that is not said.
            is_v: one rank has the first and the last stage.

        Raises:
            ValueError: it cannot.
        """
        raise ValueError(f"a {type(self).__name__} cannot be cut into stages")


class ComposedConfig(ModelConfig):
    """A model around a language model: its other parts make features of what is no text.

    What is asked of sizes, layouts and costs is answered by the language model and `other_flops`.
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

        Under the name of the language model stands what it costs beside what it counts itself.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its parts beside the language model cost; give it a "
            "method other_flops(shapes)"
        )

    def step_flops(
        self, shapes: Mapping[str, Sequence[int]], causal: bool = True, frozen: Collection[str] = ()
    ) -> float:
        """See `ModelConfig.step_flops`.

        A part that is frozen has no gradients of weights, a third of its cost; where nothing before it is
        trained, no backward pass at all.
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
