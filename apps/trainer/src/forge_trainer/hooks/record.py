"""Records activations at chosen sites of the model, on the same held-out sequences every N steps."""

from __future__ import annotations

from typing import Annotated, Literal

from forge_config import ConfigError, Meta
from forge_parallel.config import MeshConfig

from forge_trainer.hooks.base import Hook, HookConfig, RunView, hooks


@hooks.register("record")
class RecordConfig(HookConfig):
    """Writes activations to `<run>/activations/step-00000100`, for `forge_interp.ActivationStore`.

    The untrained model is recorded as step 0. Training computes the same bits with and without this hook. A
    recording that cannot be written ends the run, like a checkpoint; the run can then be continued.

    Attributes:
        every_steps: steps between recordings; the last step of the run is always recorded.
        sites: places in the model, `module[:part][#call]` with wildcards; see forge-interp. The head computes
            the loss in training, never all logits: record its input, `norm:out`.
        samples: number of held-out sequences, evenly spaced, the same each time; all, if there are fewer.
        pool: reduction of the tokens of a sequence to one row; default a row for each token.
        dtype: dtype of the recorded numbers; default the dtype of the model.
        summaries: whether to log RMS, largest magnitude and effective rank of each site under `interp/`, from
            up to 512 rows of the recording.
        keep: inputs with a value for each token that are recorded for each row, such as `doc_ids`, or
            `image_index` of a vision-language model (0 for text); see `ActivationStore.kept`.
        folder: folder of the files in the run directory; a different one for each hook of this type.
    """

    every_steps: Annotated[int, Meta(ge=1)] = 100
    sites: tuple[str, ...] = ("layers.*:out",)
    samples: Annotated[int, Meta(ge=1)] = 8
    pool: Literal["mean", "last", "first", "max"] | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    summaries: bool = False
    keep: tuple[str, ...] = ()
    folder: Annotated[str, Meta(pattern="^[A-Za-z0-9_][A-Za-z0-9_-]*$")] = "activations"

    def require_mesh(self, mesh: MeshConfig) -> None:
        """See `HookConfig.require_mesh`: ranks must not share tokens, layers or matrices."""
        for axis in ("tp", "cp", "pp"):
            if (size := getattr(mesh, axis)) > 1:
                raise ConfigError(
                    f"mesh.{axis} = {size} with a hook of type record: each rank would see a part of the "
                    "activations; extract from the checkpoints of this run afterwards, by forge extract"
                )

    def build(self, run: RunView) -> Hook:
        """See `HookConfig.build`. Collective.

        Raises:
            ConfigError: a site names nothing in the model (lists near misses) or cannot be recorded or
                written; two hooks write to one folder; or ranks share tokens, layers or matrices.
        """
        self.require_mesh(run.job.mesh)
        alike = [c for c in run.job.hooks.values() if isinstance(c, RecordConfig) and c.folder == self.folder]
        if len(alike) > 1:
            raise ConfigError(
                f"{len(alike)} hooks of type record write to folder {self.folder!r}; give each its own"
            )
        from forge_trainer.hooks.recorder import Recorder

        return Recorder(self, run)
