"""The section `[eval]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from forge_config import ALL_KEYS, Config, Meta
from forge_data.config import DataConfig as DataConfig  # registers the types of sources
from forge_data.sources.config import SourceConfig

MEASURES = ("loss", "perplexity", "bits_per_byte", "accuracy", "answers")
"""The metrics of an evaluation set."""
TAKEN = (*MEASURES, "tasks")
"""Names that a set must not have: they have the same place in the names of metrics."""


class EvalSetConfig(Config):
    """Text to evaluate on beside the held-out text of `[data]`; it is cut into sequences in the same way.

    Attributes:
        sources: sources of the text; all of their text is evaluated.
        samples: number of sequences of an evaluation, evenly spaced; 0 reads all.
    """

    sources: list[SourceConfig]
    samples: Annotated[int, Meta(ge=0)] = 256

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        names = [source.name or str(number) for number, source in enumerate(self.sources)]
        if not names or len(set(names)) < len(names):
            yield (
                f"the sources are named {', '.join(names) or 'not at all'}; give at least one, each a name "
                "of its own"
            )


class TasksConfig(Config):
    """Tasks of lm-evaluation-harness that a run is evaluated on while it trains.

    Attributes:
        names: names of tasks or groups of tasks; logged as `eval/tasks/<task>/<metric>`.
        folder: folder with YAML files of your own tasks.
        every_steps: steps between these evaluations; default `eval.every_steps`.
        num_fewshot: examples before each question; the default is the number that the task defines.
        limit: largest number of questions of a task; default all.
        batch_size: sequences that a rank computes at once; default `train.micro_batch`.
    """

    path_keys = ("folder",)

    names: list[str]
    folder: str | None = None
    every_steps: Annotated[int, Meta(ge=1)] | None = None
    num_fewshot: Annotated[int, Meta(ge=0)] | None = None
    limit: Annotated[int, Meta(ge=1)] | None = None
    batch_size: Annotated[int, Meta(ge=1)] | None = None

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not self.names:
            yield 'names is empty; name at least one task, e.g. ["arc_easy"]'


class EvalConfig(Config):
    """Evaluation during training: on held-out text, on sets of other text, and on tasks.

    Attributes:
        every_steps: steps between evaluations; the last step is always evaluated. 0 never evaluates.
        sets: text to evaluate on beside the held-out text, by name; logged as `eval/<name>/...`.
        tasks: tasks of lm-evaluation-harness; default none.
    """

    free_keys = (ALL_KEYS,)

    every_steps: Annotated[int, Meta(ge=0)] = 500
    sets: dict[str, EvalSetConfig] = {}
    tasks: TasksConfig | None = None

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        for name in self.sets:
            if name in TAKEN or not name or "/" in name:
                yield (
                    f"a set is named {name!r}; expected a name without / that is none of "
                    f"{', '.join(TAKEN)}, e.g. [eval.sets.news]"
                )


def prefixed(name: str, results: dict[str, float]) -> dict[str, float]:
    """Return the results of a set under their names in the log."""
    return {f"eval/{name}/{key}" if name else f"eval/{key}": value for key, value in results.items()}


def losses_of(record: Mapping[str, float]) -> dict[str, float]:
    """Return the losses of an evaluation in nats a token, by set; the held-out text is `validation`."""
    found: dict[str, float] = {}
    for key, value in record.items():
        match key.split("/"):
            case ["eval", "loss"]:
                found["validation"] = value
            case ["eval", name, "loss"] if name not in MEASURES:
                found[name] = value
            case _:
                pass
    return found
