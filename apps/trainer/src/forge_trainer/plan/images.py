"""Makes images for the plan of a micro-batch: half of each sequence, in the image size of the tower.

B sequences, T tokens, P patches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from forge_config import ConfigError
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import _disable_current_modes

from forge_trainer.config.job import Job


class OnHost(Tensor):
    """A tensor with values for the host to read, among fake tensors without values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with values."""
        with _disable_current_modes(), DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if isinstance(out, Tensor) else out


def inputs_of_images(job: Job, reader: Any) -> dict[str, Tensor]:
    """Return the inputs of a micro-batch other than tokens, by name.

    Args:
        job: the configuration.
        reader: `job.model.items()`.

    Raises:
        ConfigError: the reader does not read images.
    """
    from forge_data.sources.items import Size

    if not hasattr(reader, "visual_tokens"):
        raise ConfigError(
            f"a {type(reader).__name__} reads items that are no images, of which nothing is known on paper"
        )
    size, tokens = Size(1, reader.image_size, reader.image_size), job.data.max_tokens
    visual = reader.visual_tokens(size)
    places = reader.fusion.places(visual)
    count = max(1, tokens // 2 // max(places, 1))
    if reader.tokens_beside:
        count = max(1, min(count, reader.tokens_beside // visual))
    doc_ids = np.zeros(tokens, np.int64)
    where = np.zeros(tokens, np.int64)
    where[: count * places] = np.arange(1, count * places + 1)
    row = reader.sequence(where, [size] * count, doc_ids)
    rows = job.train.micro_batch
    grids = np.array([[1, *grid] for grid in reader.grids(size)] * (count * rows))
    found = {name: np.stack([np.asarray(array)] * rows) for name, array in row.items()}
    patches = int(grids.prod(1).sum())
    given = {name: _tensor(array, name in reader.host) for name, array in found.items()}
    return given | {
        "patches": torch.zeros(patches, reader.ragged["patches"].shape[1], dtype=torch.uint8),
        "grids": _tensor(grids, True),
    }


def _tensor(array: np.ndarray, on_host: bool) -> Tensor:
    if not on_host:
        return torch.tensor(array)
    with _disable_current_modes():
        return torch.from_numpy(array.copy()).as_subclass(OnHost)
