"""The section `[data]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from forge_config import Config, Meta

from forge_data.order.phases import PhaseConfig, lr_scale
from forge_data.order.skips import SkipConfig
from forge_data.sources.config import SourceConfig
from forge_data.sources.hf import HfConfig as HfConfig  # registers its type
from forge_data.tokenizer.hf import HfTokenizerConfig as HfTokenizerConfig  # as above
from forge_data.tokenizer.tokenizer import BytesConfig, TokenizerConfig


class DataConfig(Config):
    """The data of a run.

    Attributes:
        max_tokens: length of a sequence.
        sources: the sources of text; each sequence is drawn from one of them, by weight.
        tokenizer: how text becomes tokens.
        seed: seed of the order of sequences.
        mask_documents: keep attention and targets within documents; positions start anew in each.
        mask_boundaries: keep targets within documents, even where attention crosses them.
        packing: how documents become sequences. `concat`: laid end to end and cut. `bestfit`: only documents
            longer than a sequence are cut, and sequences are filled with the best-fitting pieces. `pad`: each
            document alone. `crop`: sequences begin with a document, and the rest of the last one is dropped.
        validation_samples: held-out sequences that an evaluation reads, evenly spaced; 0 reads all.
        workers: processes that prepare batches; 0 prepares them in the training process.
        tokenize_workers: processes that tokenize text at the start of a run, started by one rank of a
            machine; 0 is one for each core that the rank may use, or one alone for little text.
        phases: steps from which on other weights hold.
        temperature: multiplies each weight by the size of its source to the power of 1 / temperature: 1 reads
            each source in proportion to its size, infinity all alike; absent leaves the weights as they are.
            It does not change the weights of phases.
        when_exhausted: what happens when a source has been read `max_epochs` times: an error before training,
            or the run ends there, or the other sources go on in proportion to their weights.
        skip: steps or samples to leave out.
        cache_dir: the folder of tokenized text; absent means `$FORGE_CACHE` or `~/.cache/forge`.
    """

    free_keys = ("validation_samples", "workers", "tokenize_workers", "cache_dir")
    path_keys = ("cache_dir",)
    recorded_keys = ("phases", "skip")
    growing_keys = ("sources",)

    max_tokens: Annotated[int, Meta(ge=1)]
    sources: list[SourceConfig]
    tokenizer: TokenizerConfig = BytesConfig()
    seed: Annotated[int, Meta(ge=0)] = 0
    mask_documents: bool = False
    mask_boundaries: bool = False
    packing: Literal["concat", "bestfit", "pad", "crop"] = "concat"
    validation_samples: Annotated[int, Meta(ge=0)] = 256
    workers: Annotated[int, Meta(ge=0)] = 0
    tokenize_workers: Annotated[int, Meta(ge=0)] = 0
    phases: list[PhaseConfig] = []
    temperature: Annotated[float, Meta(ge=0.1, le=1e6)] | None = None
    when_exhausted: Literal["error", "stop", "reweight"] = "error"
    skip: list[SkipConfig] = []
    cache_dir: str | None = None

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not self.sources:
            yield ("sources is empty; name at least one, e.g. [[data.sources]] with type = 'python-stdlib'")
        names = self.source_names()
        if len(set(names)) < len(names):
            yield (f"the sources are named {', '.join(names)}; give each a name of its own")
        if self.sources and not any(source.weight for source in self.sources):
            yield (f"the weights of {', '.join(names)} are all 0; give at least one above 0")
        if unknown := {name for phase in self.phases for name in phase.weights} - set(names):
            yield (f"phases name {', '.join(sorted(unknown))}; the sources are named {', '.join(names)}")
        if self.streamed_names():
            yield from self._unstreamable()

    def _unstreamable(self) -> Iterator[str]:
        """Yield options that need random access, which streamed sources do not have."""
        contradictions = {
            f'packing = "{self.packing}" (a stream is packed by "concat")': self.packing != "concat",
            "temperature (how long a stream is, is not known)": self.temperature is not None,
            "skip with samples (a stream leaves out whole steps)": any(skip.samples for skip in self.skip),
            f"workers = {self.workers} (a stream is prepared by 1 process, or with 0 in training)": (
                self.workers > 1
            ),
        }
        if wrong := [message for message, is_so in contradictions.items() if is_so]:
            yield (
                f"a source has streaming = true, given {' and '.join(wrong)}; change that, or set "
                "streaming = false"
            )

    def source_names(self) -> list[str]:
        """The name of each source."""
        return [source.name or str(number) for number, source in enumerate(self.sources)]

    def streamed_names(self) -> list[str]:
        """The name of each streamed source."""
        named = zip(self.source_names(), self.sources, strict=True)
        return [name for name, source in named if source.is_streamed()]

    def lr_scale(self, step: int, steps: int, global_batch: int) -> float:
        """The factor of phases on the learning rate of a step; see `forge_data.order.phases.lr_scale`."""
        return lr_scale(self.phases, step, steps, global_batch * self.max_tokens)

    def has_validation(self) -> bool:
        """Whether any source has text for validation."""
        return any(source.has_validation() for source in self.sources)
