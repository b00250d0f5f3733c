"""The section `[track]`; `metrics.jsonl` and the console are always there."""

from __future__ import annotations

from typing import Annotated, Literal

from forge_config import ALL_KEYS, Config, Meta


class WandbConfig(Config):
    """Weights & Biases.

    Attributes:
        project: the project on the server.
        entity: team or user; absent means the default of the account.
        mode: `offline` writes files into the run directory for a later `wandb sync`.
        name: of the run there; absent means `job.name`.
        group: runs that belong together, such as those of a sweep.
        tags: words to find the run by.
        notes: a longer text about it.
    """

    project: str = "forge"
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None


class TrackConfig(Config):
    """Trackers beside `metrics.jsonl` and the console.

    Attributes:
        tensorboard: write event files to `<run>/tensorboard`.
        peak_tflops: dense peak of one device in the number format that is computed in, for MFU; absent means
            that of a table of devices in bfloat16. A device that is not in it has no MFU, never a guess.
        wandb: report to Weights & Biases; a server that cannot be reached never hurts the run.
    """

    free_keys = (ALL_KEYS,)

    tensorboard: bool = False
    peak_tflops: Annotated[float, Meta(gt=0)] | None = None
    wandb: WandbConfig | None = None
