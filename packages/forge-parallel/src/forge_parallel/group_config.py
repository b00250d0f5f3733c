"""The section `[process_group]`: how ranks reach each other. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from forge_config import ALL_KEYS, Config

Axis = Literal["tp", "cp", "ep", "fsdp"]


class ProcessGroupConfig(Config):
    """How ranks reach each other. The timeout of all backends is `resilience.collective_timeout_s`.

    Attributes:
        backend: the backend of torch, such as `nccl2`, or one for each kind of device, such as
            "cpu:gloo,cuda:nccl"; `auto` is gloo on CPUs; on GPUs NCCL, with gloo for tensors on the CPU.
        high_priority: NCCL uses high-priority streams, so that its kernels start before waiting kernels of
            the model.
        within_node: axes of the mesh whose ranks must be on one node each; a run with other placements ends
            at its start. `fsdp` is dp_shard times cp.
    """

    free_keys = (ALL_KEYS,)

    backend: str = "auto"
    high_priority: bool = False
    within_node: list[Axis] = []

    def backends(self, device_type: str) -> dict[str, str]:
        """Return the backend for each kind of tensor device, on ranks that compute on a `device_type`."""
        if self.backend == "auto":
            return {"cpu": "gloo"} if device_type == "cpu" else {"cpu": "gloo", device_type: "nccl"}
        if ":" not in self.backend:
            return {"cpu": "gloo"} | {device_type: self.backend}
        return dict(part.split(":", 1) for part in self.backend.split(","))  # type: ignore[misc]

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        pairs = [part.split(":") for part in self.backend.split(",")]
        named = all(name and name == name.strip() for pair in pairs for name in pair)
        kinds = {pair[0] for pair in pairs if len(pair) == 2}
        if not named or (":" in self.backend and len(kinds) < len(pairs)):
            yield (
                f'backend = "{self.backend}"; expected one name, such as "nccl", or one for each kind of '
                'device without spaces, such as "cpu:gloo,cuda:nccl"'
            )
        if self.high_priority and self.backend == "gloo":
            yield 'high_priority = true is for NCCL, and backend = "gloo" has no streams; leave one out'
