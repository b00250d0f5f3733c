"""Logs norms of each layer every N steps: weights, gradient, and update relative to the weights."""

from __future__ import annotations

from typing import Annotated, Literal

from forge_config import Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("norms")
class NormsConfig(HookConfig):
    """Logs `norms/weight/<layer>`, `norms/grad/<layer>` and `norms/update_ratio/<layer>`.

    Norms are 2-norms over all ranks, of weights before the step and gradients before clipping; the ratio is
    the norm of the update divided by the norm of the weights. A measured step needs a copy of the weights.
    Training computes the same bits.

    Attributes:
        every_steps: steps between measurements; the last step of the run is always measured.
        by: unit of a norm: a `layer` is a block (`layers.3`) or a module outside blocks; or a `parameter`.
    """

    every_steps: Annotated[int, Meta(ge=1)] = 100
    by: Literal["layer", "parameter"] = "layer"

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`. Collective."""
        from forge_trainer.hooks.norm_watch import NormWatch

        return NormWatch(run, self.every_steps, layer_of if self.by == "layer" else str)


def layer_of(name: str) -> str:
    """Return the block of a parameter, such as `layers.3`, or its outermost module if it is in no block."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
