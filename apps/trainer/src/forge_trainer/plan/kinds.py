"""What memory was for, told by when it was taken and freed; and the most of it, place by place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forge_trainer.plan.collectives import kind_of
from forge_trainer.plan.places import Place
from forge_trainer.plan.watch import Storage, Watch

WEIGHTS, BUFFERS, GRADIENTS, MOMENTS = "weights", "buffers", "gradients", "moments"
ACTIVATIONS, RECOMPUTED, GATHERED, LOGITS = "activations", "recomputed", "gathered units", "logits"
INPUTS, WORKSPACE = "inputs", "workspace"
KINDS = (
    WEIGHTS, BUFFERS, GRADIENTS, MOMENTS, ACTIVATIONS, RECOMPUTED, GATHERED, LOGITS, INPUTS, WORKSPACE,
)  # fmt: skip
"""All of them, in the order in which they are told."""

COPIES = ("all_gather_copy_in", "chunk_cat", "_chunk_cat")
"""Operations of FSDP2 that fill what is sent."""


def resolve(watch: Watch) -> None:
    """Give every storage of a step that is over its kind."""
    for made, _, _ in watch.events:
        if made.kind is None:
            made.kind = _kind(made)


def _kind(made: Storage) -> str:
    taken, freed = made.place, made.ended
    if made.resized or made.op in COPIES or kind_of(made.op) is not None:
        return GATHERED
    if made.in_loss:
        return LOGITS
    if taken.phase == "forward":
        return WORKSPACE if freed is not None and freed.phase == "forward" else ACTIVATIONS
    if taken.phase == "backward":
        later = freed is None or freed.phase != "backward" or freed.micro != taken.micro
        return GRADIENTS if later else WORKSPACE
    return WORKSPACE


def peaks(watch: Watch) -> dict[Place, dict[str, float]]:
    """By place, bytes of each kind when most of all was held there since `start`; call `resolve` first."""
    held = dict.fromkeys(KINDS, 0)
    for size, made in watch.begun:
        held[made.kind or WORKSPACE] += size
    total, most = sum(held.values()), dict[Place, int]()
    found: dict[Place, dict[str, float]] = {}
    for made, change, place in watch.events:
        held[made.kind or WORKSPACE] += change
        total += change
        if change > 0 and total > most.get(place, 0):
            most[place], found[place] = total, dict(held)
    return found


def highest(found: Mapping[Place, Mapping[str, float]]) -> tuple[Place, Mapping[str, float]]:
    """The place where most is held, and what it is."""
    return max(found.items(), key=lambda item: sum(item[1].values()))


def total(kinds: Iterable[float]) -> float:
    """Bytes of all kinds."""
    return sum(kinds)
