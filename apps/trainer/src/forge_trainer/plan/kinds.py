"""Attributes memory to kinds by when it is allocated and freed, and finds the peak of each place."""

from __future__ import annotations

from collections.abc import Mapping

from forge_trainer.plan.collectives import kind_of
from forge_trainer.plan.places import Place
from forge_trainer.plan.watch import COPIES, Storage, Watch

WEIGHTS, BUFFERS, GRADIENTS, MOMENTS = "weights", "buffers", "gradients", "moments"
ACTIVATIONS, GATHERED, LOGITS = "activations", "gathered units", "logits"
INPUTS, WORKSPACE = "inputs", "workspace"
KINDS: tuple[str, ...] = (
    WEIGHTS, BUFFERS, GRADIENTS, MOMENTS, ACTIVATIONS, GATHERED, LOGITS, INPUTS, WORKSPACE,
)  # fmt: skip
"""All kinds, in the order in which they are printed."""


def resolve(watch: Watch) -> None:
    """Assign a kind to every storage of a finished step."""
    for storage, _, _ in watch.events:
        if storage.kind is None:
            storage.kind = _kind(storage)


def _kind(storage: Storage) -> str:
    taken, freed = storage.place, storage.ended
    if storage.resized or storage.op in COPIES or kind_of(storage.op) is not None:
        return GATHERED
    if storage.in_loss:
        return LOGITS
    if taken.phase == "forward":
        return WORKSPACE if freed is not None and freed.phase == "forward" else ACTIVATIONS
    if taken.phase == "backward":
        later = freed is None or freed.phase != "backward" or freed.micro != taken.micro
        return GRADIENTS if later else WORKSPACE
    return WORKSPACE


def resident(watch: Watch) -> dict[str, float]:
    """Return the bytes of each kind between steps; moments, made in the first step, count as present."""
    found: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for size, storage in watch.begun:
        found[storage.kind or WORKSPACE] += size
    for storage, change, _ in watch.events:
        if storage.kind == MOMENTS:
            found[MOMENTS] += change
    return found


def kept(watch: Watch) -> dict[str, dict[str, float]]:
    """Return by kind the bytes that forward passes keep for backward passes, and that backward passes send.

    Torch frees the sent bytes only after the last micro-batch of a pipeline.
    """
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for storage, change, _ in watch.events:
        phase, ended = storage.place.phase, storage.ended
        later = storage.kind in (ACTIVATIONS, LOGITS) and ended is not None and ended.phase == "backward"
        if change > 0 and phase in found and (storage.sent if phase == "backward" else later):
            kind = storage.kind or WORKSPACE
            found[phase][kind] = found[phase].get(kind, 0.0) + change
    return found


def peaks(watch: Watch) -> dict[Place, dict[str, float]]:
    """Return for each place the bytes of each kind at its peak since `start`; call `resolve` first."""
    now = resident(watch)
    total, most = sum(now.values()), dict[Place, float]()
    found: dict[Place, dict[str, float]] = {}
    for storage, change, place in watch.events:
        if storage.kind == MOMENTS:
            continue
        now[storage.kind or WORKSPACE] += change
        total += change
        if change > 0 and total > most.get(place, 0):
            most[place], found[place] = total, dict(now)
    return found


def highest(found: Mapping[Place, Mapping[str, float]]) -> tuple[Place, Mapping[str, float]]:
    """Return the place with the most memory, and its bytes by kind."""
    return max(found.items(), key=lambda item: sum(item[1].values()))
