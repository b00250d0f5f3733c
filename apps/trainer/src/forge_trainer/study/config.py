"""The study file: the runs of a study, and rules for their sizes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from forge_config import Config, ConfigError, Meta, load

Tree = dict[str, Any]
Positive = Annotated[float, Meta(gt=0)]
Measure = Literal["parameters", "flops", "tokens", "batch_tokens", "width"]
RULES = "rules."
"""The prefix of keys of a point that change a rule instead of the job."""


class PowerRule(Config):
    """A power law: value * (x / at) ** power, where x is a measure of the run.

    Attributes:
        value: result if the measure equals `at`.
        of: the measure x.
        at: reference value of the measure.
        power: exponent; 0 gives a constant.
    """

    value: Positive
    of: Measure = "parameters"
    at: Positive = 1.0
    power: float = 0.0

    def __call__(self, measures: dict[str, float]) -> float:
        """Return the value for a run.

        Raises:
            ConfigError: the model of the run does not have the measure.
        """
        if not measures[self.of]:
            raise ConfigError(
                f'a rule of = "{self.of}" with a model that has no {self.of}; name another measure'
            )
        return self.value * (measures[self.of] / self.at) ** self.power


class RulesConfig(Config):
    """How the length of a run, its batch and its learning rate follow from its size.

    At most one of `tokens`, `tokens_per_parameter` and `flops` sets the length of a run; without any,
    `train.steps` sets it. The number of steps is rounded.

    Attributes:
        tokens: tokens that a run trains on.
        tokens_per_parameter: tokens that a run trains on, as a multiple of its parameters.
        flops: budget of training FLOPs of a run, as the model counts them; equal budgets make an IsoFLOP
            curve.
        parameters: the parameters that count: `all`, or all but embedding and head.
        batch_tokens: tokens of a step; rounded to whole micro-batches.
        lr: peak learning rate.
    """

    tokens: Positive | None = None
    tokens_per_parameter: Positive | None = None
    flops: Positive | None = None
    parameters: Literal["all", "without_embeddings"] = "without_embeddings"
    batch_tokens: PowerRule | None = None
    lr: PowerRule | None = None

    @property
    def lengths(self) -> list[str]:
        """The keys that set the length of a run."""
        keys = ("tokens", "tokens_per_parameter", "flops")
        return [f"{key} = {getattr(self, key):g}" for key in keys if getattr(self, key) is not None]

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if len(self.lengths) > 1:
            yield f"{' and '.join(self.lengths)} say the same thing; keep one of them"
        if self.batch_tokens is not None and self.batch_tokens.of == "batch_tokens":
            yield "batch_tokens of batch_tokens: a rule cannot follow from itself; name another measure"


class AnalysisConfig(Config):
    """How runs are analysed.

    Attributes:
        loss: name of the metric by which runs are compared.
        bootstrap: number of bootstrap samples for the intervals.
        level: confidence level of the intervals.
        seed: seed of the samples.
        predict: pairs of parameters and tokens for which the loss is predicted.
    """

    loss: str = "eval/loss"
    bootstrap: Annotated[int, Meta(ge=10, le=100_000)] = 200
    level: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    seed: Annotated[int, Meta(ge=0)] = 0
    predict: list[tuple[Positive, Positive]] = []


class StudyConfig(Config):
    """A study: one base configuration and the changes of its runs.

    The runs are all combinations of `axes` and `grid`, and after them `points`. Keys are those of the job;
    `rules.KEY` changes a rule for a run.

    Attributes:
        name: name of the study.
        base: path of the common configuration of all runs, relative to the study file.
        root: folder of the runs, results and pictures; default `runs/<name>`.
        axes: axes by name; each has variants by name, each with several keys.
        grid: keys, each with a list of values.
        points: further runs, each a table of keys with an optional `name`.
        rules: rules for length, batch and learning rate.
        analysis: settings of the analysis.
    """

    path_keys = ("base",)

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_][A-Za-z0-9._-]{0,40}$")]
    base: str
    root: str | None = None
    axes: dict[str, dict[str, Tree]] = {}
    grid: Tree = {}
    points: list[Tree] = []
    rules: RulesConfig = RulesConfig()
    analysis: AnalysisConfig = AnalysisConfig()

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        for axis, variants in self.axes.items():
            if not variants:
                yield f"axes.{axis} has no variants; give at least one table, e.g. [axes.{axis}.small]"
        for key, values in flattened(self.grid).items():
            if not isinstance(values, list) or not values:
                yield f"grid.{key} = {values!r}; expected a list of values, one run for each"
            elif len({repr(value) for value in values}) < len(values):
                yield f"grid.{key} = {values!r} has a value twice; each value makes a run of its own"


def flattened(tree: Tree, prefix: str = "") -> Tree:
    """Return dotted keys and their values; a table is never a value."""
    found: Tree = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= flattened(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def nested(flat: Tree) -> Tree:
    """Convert dotted keys to nested tables."""
    tree: Tree = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        inner = tree
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[last] = value
    return tree


def load_study(path: Path | str) -> tuple[StudyConfig, Path]:
    """Load a study; return it and the folder of its runs.

    Raises:
        ConfigError: the study is not valid; lists every problem.
    """
    study = load(StudyConfig, path).value
    base = Path(path).parent / study.base
    if not base.is_file():
        raise ConfigError(f"{path}: base = {study.base!r}; there is no file {base}")
    root = Path(study.root) if study.root else Path("runs") / study.name
    return study, root.absolute()


def choices(study: StudyConfig) -> Iterator[tuple[Tree, Tree]]:
    """Yield for each run the parts of its name (axis and variant, or key and value), and its keys.

    Raises:
        ConfigError: two axes set the same key.
    """
    axes = [
        [({axis: name}, flattened(keys)) for name, keys in variants.items()]
        for axis, variants in study.axes.items()
    ]
    axes += [
        [({key: value}, {key: value}) for value in values] for key, values in flattened(study.grid).items()
    ]
    for combination in product(*axes) if axes else ():
        called: Tree = {}
        keys: Tree = {}
        for name, changed in combination:
            if twice := keys.keys() & changed.keys():
                raise ConfigError(f"{study.name}: two axes set {', '.join(sorted(twice))}; leave it in one")
            called |= name
            keys |= changed
        yield called, keys
    for point in study.points:
        keys = flattened(point)
        named = keys.pop("name", None)
        yield keys if named is None else {"name": named}, keys
