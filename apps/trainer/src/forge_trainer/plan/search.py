"""What would fit: meshes, micro-batches, recomputation and number formats around a job."""

from __future__ import annotations
