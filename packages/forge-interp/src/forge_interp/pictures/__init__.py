"""Pictures of results: one page that needs no server, and static figures by matplotlib."""

from forge_interp.pictures.attention_page import attention_page
from forge_interp.pictures.figures import (
    draw_attention,
    draw_dynamics,
    draw_layers,
    draw_lens,
    draw_patching,
    draw_similarity,
    draw_sweep,
)  # fmt: skip

__all__ = [
    "attention_page", "draw_attention", "draw_dynamics", "draw_layers", "draw_lens", "draw_patching",
    "draw_similarity", "draw_sweep",
]  # fmt: skip
