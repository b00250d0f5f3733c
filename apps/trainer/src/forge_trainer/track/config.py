"""What `[track]` holds; `metrics.jsonl` and the console are always there."""

from typing import Literal

from forge_config import ALL_KEYS, Config


class WandbConfig(Config):
    """Weights & Biases.

    Attributes:
        project: the project on the server.
        entity: team or user; absent means the default of the account.
        mode: `offline` writes files into the run directory for a later `wandb sync`.
    """

    project: str = "forge"
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class TrackConfig(Config):
    """Trackers beside `metrics.jsonl` and the console.

    Attributes:
        tensorboard: write event files to `<run>/tensorboard`.
        wandb: report to Weights & Biases; a server that cannot be reached never hurts the run.
    """

    free_keys = (ALL_KEYS,)

    tensorboard: bool = False
    wandb: WandbConfig | None = None
