"""Norms of each layer every N steps: of its weights, its gradient, and its update beside its weights."""

from __future__ import annotations

from typing import Annotated, Literal

from forge_config import Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("norms")
class NormsConfig(HookConfig):
    """Logs `norms/weight/<layer>`, `norms/grad/<layer>` and `norms/update_ratio/<layer>`.

    Norms are 2-norms of all that ranks hold together, of weights before the step, gradients before clipping;
    the ratio is that of the norms of update and weights. Costs a copy of the weights in steps that are looked
    at; training computes the same bits.

    Attributes:
        every_steps: distance of the steps that are looked at, the last one included.
        by: what is one layer: a block of the model (`layers.3`) or what is beside them, or each parameter.
    """

    every_steps: Annotated[int, Meta(ge=1)] = 100
    by: Literal["layer", "parameter"] = "layer"

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`. Collective."""
        from forge_trainer.hooks.norm_watch import NormWatch

        return NormWatch(run, self.every_steps, layer_of if self.by == "layer" else str)


def layer_of(name: str) -> str:
    """The block that a parameter is in, such as `layers.3`; the first module of its name if it is in none."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
