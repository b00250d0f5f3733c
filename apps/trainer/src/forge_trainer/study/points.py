"""Derives the runs of a study: their names, the keys that they set, and their lengths by rules."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_config import ConfigError
from forge_config.toml import dumps, inline
from forge_model.config import ModelConfig
from msgspec import convert, to_builtins

from forge_trainer.config.job import Job, load_job
from forge_trainer.study.config import RULES, RulesConfig, StudyConfig, Tree, choices, flattened, nested

TAKEN = ("analysis", "configs", "logs", "results.csv", "results.parquet")
"""Files and folders beside the folders of the runs."""

LONGEST = 100
"""The most letters in the name of a run; a longer name is cut and ends with a digest."""


@dataclass(frozen=True)
class Point:
    """A run of a study.

    Attributes:
        name: name of the run, made from its choices.
        choice: axes with variants, and keys with values, that define the run; for a named run, its keys.
        keys: keys that it sets in the job, including keys set by rules.
        job: configuration of the run.
        measures: `parameters`, `flops`, `tokens`, `batch_tokens`, `width`, as rules and analyses count them.
    """

    name: str
    choice: Tree
    keys: Tree
    job: Job
    measures: dict[str, float]

    def toml(self, base: Path) -> str:
        """Return the TOML text of the run for `forge train`."""
        return dumps({"extends": str(base.resolve()), **nested(self.keys)})


def points_of(study: StudyConfig, path: Path, root: Path) -> list[Point]:
    """Return all runs of a study, in order. Builds models without values to count parameters.

    Args:
        study: the configuration.
        path: path of its file.
        root: folder of its runs.

    Raises:
        ConfigError: a run is not valid, or two have the same name.
    """
    base, found = path.parent / study.base, dict[str, Point]()
    for called, keys in choices(study):
        name = name_of(called)
        if name in TAKEN:
            raise ConfigError(
                f"{path}: a run is called {name}, as what the study itself keeps in {root}; name it otherwise"
            )
        if name in found:
            raise ConfigError(f"{path}: two runs are called {name}; leave one of them out")
        try:
            found[name] = _point(study.rules, base, root, name, called, keys)
        except ConfigError as error:
            raise ConfigError(f"{path}, run {name}: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no runs; give axes, a grid, or points")
    return list(found.values())


def name_of(called: Tree) -> str:
    """Return the name of a run, such as `size-small-lr-0.001-seed-0`; it does not depend on other runs."""
    parts = [
        _spelled(value) if key == "name" else f"{key.rpartition('.')[2]}-{_spelled(value)}"
        for key, value in called.items()
    ]
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts)).strip("._-") or "run"
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _spelled(value: Any) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, list):
        return "_".join(map(_spelled, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _point(rules: RulesConfig, base: Path, root: Path, name: str, called: Tree, keys: Tree) -> Point:
    choice = keys if "name" in called else called
    ours = {key.removeprefix(RULES): value for key, value in keys.items() if key.startswith(RULES)}
    rules = _changed(rules, ours)
    keys = {key: value for key, value in keys.items() if not key.startswith(RULES)}
    keys |= {"job.name": name, "job.root": str(root)}
    job = load_job(base, overrides_of(keys)).value
    measures = measures_of(job, rules)
    follow = ruled(job, rules, measures)
    if twice := keys.keys() & follow.keys():
        raise ConfigError(
            "; ".join(f"{key} = {keys[key]!r}, and a rule gives {follow[key]!r}" for key in sorted(twice))
            + "; leave out the key, or the rule"
        )
    keys |= follow
    job = load_job(base, overrides_of(keys)).value
    return Point(name, choice, keys, job, measures_of(job, rules))


def _changed(rules: RulesConfig, keys: Tree) -> RulesConfig:
    if not keys:
        return rules
    try:
        settings = {key: value for key, value in flattened(to_builtins(rules)).items() if value is not None}
        return convert(nested(settings | keys), RulesConfig)
    except ValueError as error:
        raise ConfigError(f"{', '.join(f'rules.{key} = {keys[key]!r}' for key in keys)}: {error}") from None


def overrides_of(keys: Tree) -> list[str]:
    """Return the command-line flags that set these keys."""
    return [f"--{key}={inline(value)}" for key, value in keys.items()]


def measures_of(job: Job, rules: RulesConfig) -> dict[str, float]:
    """Return the measures of a run that are known before it runs."""
    parameters, without = counted(job.model)
    flops = job.model.flops_per_token(job.data.max_tokens)
    samples = job.batch_sizes.samples(job.train.steps)
    tokens = float(samples * job.data.max_tokens)
    return {
        "parameters": float(parameters if rules.parameters == "all" else without),
        "flops": flops * tokens,
        "tokens": tokens,
        "batch_tokens": float(job.step_tokens),
        "width": float(getattr(getattr(job.model, "decoder", job.model), "dim", 0)),
    }


_known: dict[str, tuple[int, int]] = {}


def counted(model: ModelConfig) -> tuple[int, int]:
    """Count the parameters of a model: all, and all but embedding and head."""
    if (key := repr(model)) not in _known:
        import torch

        with torch.device("meta"):
            made = model.build()
        roles: dict[str, str] = made.parameter_roles()  # type: ignore[operator]
        sizes = {name: parameter.numel() for name, parameter in made.named_parameters()}
        outer = sum(size for name, size in sizes.items() if roles.get(name) in ("embedding", "head"))
        _known[key] = sum(sizes.values()), sum(sizes.values()) - outer
    return _known[key]


def ruled(job: Job, rules: RulesConfig, measures: dict[str, float]) -> Tree:
    """Return the keys that the rules set.

    Raises:
        ConfigError: the run would have less than one step.
    """
    if not rules.lengths and rules.batch_tokens is None and rules.lr is None:
        return {}
    flops = measures["flops"] / measures["tokens"]
    lengths = {
        "tokens": rules.tokens,
        "tokens_per_parameter": (rules.tokens_per_parameter or 0) * measures["parameters"],
        "flops": (rules.flops or 0) / flops,
    }
    tokens = next((n for n in lengths.values() if n), measures["tokens"])
    known = measures | {"tokens": tokens, "flops": flops * tokens}
    found: Tree = {}
    if rules.batch_tokens is not None:
        micro = job.train.micro_batch * job.data.max_tokens
        batch = max(1, round(rules.batch_tokens(known) / micro)) * job.train.micro_batch
        found |= {"train.global_batch": batch}
        known["batch_tokens"] = float(batch * job.data.max_tokens)
    stages = job.train.batch_warmup
    warm_steps, warm = sum(s.steps for s in stages), sum(s.steps * s.global_batch for s in stages)
    steps = round(warm_steps + (tokens - warm * job.data.max_tokens) / known["batch_tokens"])
    if steps < 1:
        raise ConfigError(
            f"rules give it {tokens:.3g} tokens, less than half of a step of {known['batch_tokens']:.0f}; "
            "give more tokens, or smaller batches"
        )
    found |= {"train.steps": steps} if rules.lengths or rules.batch_tokens is not None else {}
    return found | ({"optimizer.lr": float(f"{rules.lr(known):.6g}")} if rules.lr is not None else {})
