"""Converts the training and evaluation data of KempnerForge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_trainer.migrate.convert import SOURCES, Converted


def convert_data(converted: Converted, settings: Mapping[str, Any]) -> None:
    """Write the sources, their weights and phases, and the tokenizer."""
    listed = [one for one in settings.get("data.datasets") or [_only(settings)] if _name(one)]
    sources = [_source(one, settings) for one in listed]
    if not sources:
        converted.ask("data.sources", "no data is configured (there: random tokens)", SOURCES)
        return
    _tokenizer(converted, settings, any(source["type"] == "hf" for source in sources))
    if any(source.get("streaming") for source in sources):
        converted.put("data.workers", min(1, converted.tree["data"]["workers"]))
    if any(source["type"] == "tokens" for source in sources):
        converted.notes.append(
            "folders of tokens: make stores of them with `forge-data import FOLDER --out STORE`, or of FILES "
            "where no metadata.yaml says what they are"
        )
    temperature = settings.get("data.mix_temperature", 1.0)
    if temperature <= 0:
        converted.problems.append(f"data.mix_temperature = {temperature}: expected more than 0")
        return
    for source in sources:
        source["weight"] = float(source.get("weight", 1.0)) ** (1 / temperature)
    converted.put("data.sources", sources)
    _phases(converted, settings, listed)
    if not settings.get("data.pack_sequences", False):
        converted.notes.append(
            "data.pack_sequences = False: documents are always packed; none is attended across"
        )


def _tokenizer(converted: Converted, settings: Mapping[str, Any], is_needed: bool) -> None:
    if path := settings.get("data.tokenizer_path"):
        converted.put("data.tokenizer", {"type": "hf", "path": path})
    elif is_needed:
        converted.ask(
            "data.tokenizer", "no tokenizer is named (data.tokenizer_path)", "data.tokenizer.type=bytes"
        )
    else:
        converted.notes.append("no tokenizer is named: data.tokenizer = that of the tokens; bytes if absent")


def _only(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "path": settings.get("data.dataset_path", ""),
        "hf_name": settings.get("data.hf_dataset_name"),
        "hf_config": settings.get("data.hf_dataset_config"),
    }


def _name(one: Mapping[str, Any]) -> str:
    """Return the name of a data set in phases; empty if it has none."""
    source = one.get("path") or one.get("hf_name") or ""
    return source and (one.get("name") or source)


def _source(one: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: one[key] for key in ("name", "weight") if one.get(key)}
    if path := one.get("path"):
        return {"type": "tokens", "path": path, **named}
    split = settings.get("data.hf_dataset_split", "train")
    source = {"type": "hf", "path": one["hf_name"], "split": split, "held_out": 0.0, **named}
    source["text"] = settings.get("data.hf_dataset_text_field", "text")
    if subset := one.get("hf_config"):
        source["subset"] = subset
    return source | ({"streaming": True} if settings.get("data.hf_streaming") else {})


def _annealing(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not settings.get("data.anneal_weights") or settings.get("data.anneal_start_step", 0) < 1:
        return []
    return [
        {
            "start_step": settings.get("data.anneal_start_step", 0),
            "dataset_weights": settings["data.anneal_weights"],
        }
    ]


def _phases(converted: Converted, settings: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> None:
    """Convert phases: a data set not named in a phase keeps its weight; the temperature applies, too."""
    phases = settings.get("data.phases") or _annealing(settings)
    names = [_name(one) for one in listed]
    power = 1 / settings.get("data.mix_temperature", 1.0)
    new: list[dict[str, Any]] = []
    for phase in phases:
        weights = phase.get("dataset_weights", {})
        if unknown := sorted(set(weights) - set(names)):
            converted.problems.append(
                f"phases weigh {', '.join(unknown)}; the data sets are {', '.join(names)}"
            )
        shares = {
            one.get("name") or str(place): float(weights.get(names[place], one.get("weight", 1.0))) ** power
            for place, one in enumerate(listed)
        }
        scale = {"lr_scale": phase["lr_scale"]} if "lr_scale" in phase else {}
        new.append({"start_step": phase["start_step"], "weights": shares, **scale})
    if new:
        converted.put("data.phases", new)


def convert_evaluation(converted: Converted, settings: Mapping[str, Any]) -> None:
    """Write the evaluation data; disable evaluation if it is not enabled in the given configuration."""
    if not settings.get("eval.enabled", False):
        converted.put("eval.every_steps", 0)
        return
    converted.put("eval.every_steps", settings.get("eval.interval", 1000))
    only = {
        "path": settings.get("eval.dataset_path"),
        "hf_name": settings.get("eval.hf_dataset_name"),
        "hf_config": settings.get("eval.hf_dataset_config"),
    }
    split = {"data.hf_dataset_split": settings.get("eval.hf_dataset_split", "validation")}
    samples = settings.get("eval.steps", 50) * converted.tree["train"]["micro_batch"]
    if _name(only):
        source = _source(only, dict(settings) | split | {"data.hf_streaming": False})
        converted.put("eval.sets.validation", {"sources": [source], "samples": samples})
