"""The section `[track]`; `metrics.jsonl` and the console always exist."""

from __future__ import annotations

from typing import Annotated, Literal

from forge_config import ALL_KEYS, Config, Meta


class WandbConfig(Config):
    """Settings of Weights & Biases.

    Attributes:
        project: project on the server.
        entity: team or user; default as set in the account.
        mode: `offline` writes files into the run directory for a later `wandb sync`.
        name: name of the run on the server; default `job.name`.
        group: name of a group of runs, such as a sweep.
        tags: words by which the run can be found.
        notes: a longer text about the run.
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
        tensorboard: whether to write event files to `<run>/tensorboard`.
        peak_tflops: dense peak of one device in the number format of the computation, for MFU; default from
            a table of devices in bfloat16. A device that is not in the table has no MFU.
        wandb: settings of Weights & Biases; default none. An unreachable server does not affect the run.
    """

    free_keys = (ALL_KEYS,)

    tensorboard: bool = False
    peak_tflops: Annotated[float, Meta(gt=0)] | None = None
    wandb: WandbConfig | None = None
