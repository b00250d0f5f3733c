"""Writes how many tokens each expert served, every N steps, to a separate file."""

from __future__ import annotations

import json
from typing import Annotated

from forge_config import Meta

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks
from forge_trainer.progress import Progress
from forge_trainer.steps.base import StepOutput

FILE = "experts.jsonl"


@hooks.register("expert-load")
class ExpertLoadConfig(HookConfig):
    """Appends to `experts.jsonl` in the run directory how many tokens each expert of each layer got.

    A line is `{"step": 100, "layers.1.ffn": [12, 7, ...], ...}`, over all ranks, including dropped tokens.
    After a rollback, the last line of a step counts.

    Attributes:
        every_steps: steps between lines; the last step of the run is always written.
    """

    every_steps: Annotated[int, Meta(ge=1)] = 100

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`."""
        return ExpertLoad(run, self.every_steps)


class ExpertLoad(Hook):
    """See `ExpertLoadConfig`.

    Args:
        run: the run.
        every: steps between lines.
    """

    span = "expert load"

    def __init__(self, run: RunView, every: int) -> None:
        from forge_model.moe.layer import expert_layers

        self.every, self._run = every, run
        self._layers = {name: layer for part in run.parts for name, layer in expert_layers(part).items()}

    def on_step(self, progress: Progress, out: StepOutput) -> None:
        """See `Hook.on_step`. Waits for the device. Collective."""
        import torch.distributed as dist

        mine = {
            name: [round(count) for count in layer.tally.last[: layer.num_experts].tolist()]
            for name, layer in self._layers.items()
            if layer.tally.last is not None
        }
        everyone, group = [mine], self._run.mesh.control_group
        if group is not None:
            everyone = [mine] * dist.get_world_size(group)
            dist.all_gather_object(everyone, mine, group=group)
        if self._run.env.rank:
            return
        layers = {name: counts for one in everyone for name, counts in one.items()}
        with (self._run.directory / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": progress.step} | layers) + "\n")
