"""Converts the training and evaluation data of KempnerForge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_trainer.migrate.convert import SOURCES, Converted


def convert_data(made: Converted, given: Mapping[str, Any]) -> None:
    """Write the sources, their weights and phases, and the tokenizer."""
    listed = [one for one in given.get("data.datasets") or [_only(given)] if _name(one)]
    sources = [_source(one, given) for one in listed]
    if not sources:
        made.ask("data.sources", "no data is configured (there: random tokens)", SOURCES)
        return
    _tokenizer(made, given, any(source["type"] == "hf" for source in sources))
    if any(source.get("streaming") for source in sources):
        made.put("data.workers", min(1, made.tree["data"]["workers"]))
    if any(source["type"] == "tokens" for source in sources):
        made.notes.append(
            "folders of tokens: make stores of them with `forge-data import FOLDER --out STORE`, or of FILES "
            "where no metadata.yaml says what they are"
        )
    temperature = given.get("data.mix_temperature", 1.0)
    if temperature <= 0:
        made.problems.append(f"data.mix_temperature = {temperature}: expected more than 0")
        return
    for source in sources:
        source["weight"] = float(source.get("weight", 1.0)) ** (1 / temperature)
    made.put("data.sources", sources)
    _phases(made, given, listed)
    if not given.get("data.pack_sequences", False):
        made.notes.append("data.pack_sequences = False: documents are always packed; none is attended across")


def _tokenizer(made: Converted, given: Mapping[str, Any], is_needed: bool) -> None:
    if path := given.get("data.tokenizer_path"):
        made.put("data.tokenizer", {"type": "hf", "path": path})
    elif is_needed:
        made.ask("data.tokenizer", "no tokenizer is named (data.tokenizer_path)", "data.tokenizer.type=bytes")
    else:
        made.notes.append("no tokenizer is named: data.tokenizer = that of the tokens; bytes if absent")


def _only(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "path": given.get("data.dataset_path", ""),
        "hf_name": given.get("data.hf_dataset_name"),
        "hf_config": given.get("data.hf_dataset_config"),
    }


def _name(one: Mapping[str, Any]) -> str:
    """Return the name of a data set in phases; empty if it has none."""
    source = one.get("path") or one.get("hf_name") or ""
    return source and (one.get("name") or source)


def _source(one: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: one[key] for key in ("name", "weight") if one.get(key)}
    if path := one.get("path"):
        return {"type": "tokens", "path": path, **named}
    split = given.get("data.hf_dataset_split", "train")
    made = {"type": "hf", "path": one["hf_name"], "split": split, "held_out": 0.0, **named}
    made["text"] = given.get("data.hf_dataset_text_field", "text")
    if subset := one.get("hf_config"):
        made["subset"] = subset
    return made | ({"streaming": True} if given.get("data.hf_streaming") else {})


def _annealing(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not given.get("data.anneal_weights") or given.get("data.anneal_start_step", 0) < 1:
        return []
    return [
        {
            "start_step": given.get("data.anneal_start_step", 0),
            "dataset_weights": given["data.anneal_weights"],
        }
    ]


def _phases(made: Converted, given: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> None:
    """Convert phases: a data set not named in a phase keeps its weight; the temperature applies, too."""
    phases = given.get("data.phases") or _annealing(given)
    names = [_name(one) for one in listed]
    power = 1 / given.get("data.mix_temperature", 1.0)
    new: list[dict[str, Any]] = []
    for phase in phases:
        weights = phase.get("dataset_weights", {})
        if unknown := sorted(set(weights) - set(names)):
            made.problems.append(f"phases weigh {', '.join(unknown)}; the data sets are {', '.join(names)}")
        shares = {
            one.get("name") or str(place): float(weights.get(names[place], one.get("weight", 1.0))) ** power
            for place, one in enumerate(listed)
        }
        scale = {"lr_scale": phase["lr_scale"]} if "lr_scale" in phase else {}
        new.append({"start_step": phase["start_step"], "weights": shares, **scale})
    if new:
        made.put("data.phases", new)


def convert_evaluation(made: Converted, given: Mapping[str, Any]) -> None:
    """Write the evaluation data; disable evaluation if it is not enabled in the given configuration."""
    if not given.get("eval.enabled", False):
        made.put("eval.every_steps", 0)
        return
    made.put("eval.every_steps", given.get("eval.interval", 1000))
    only = {
        "path": given.get("eval.dataset_path"),
        "hf_name": given.get("eval.hf_dataset_name"),
        "hf_config": given.get("eval.hf_dataset_config"),
    }
    split = {"data.hf_dataset_split": given.get("eval.hf_dataset_split", "validation")}
    samples = given.get("eval.steps", 50) * made.tree["train"]["micro_batch"]
    if _name(only):
        source = _source(only, dict(given) | split | {"data.hf_streaming": False})
        made.put("eval.sets.validation", {"sources": [source], "samples": samples})
