"""The decoder: embedding, pre-norm blocks, norm, head. B batch, T tokens, D model dim, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from forge_model.cache import Cache, LayerCache
from forge_model.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.init import Init
from forge_model.layers import Embedding
from forge_model.mask import Mask, build_mask
from forge_model.roles import Role, parameter_roles
from forge_model.rope import Rope, rope_table

R = TypeVar("R")
LossFn = Callable[[Tensor, Tensor, Tensor], R]
"""(hidden [B, T, D], head weight [V, D], labels [B, T]) -> loss terms."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = config.norm.build(config.dim)
        self.attention = config.attention.build(config.dim, config.norm)
        self.ffn_norm = config.norm.build(config.dim)
        self.ffn = config.ffn.build(config.dim)

    def forward(self, x: Tensor, rope: Rope, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), rope, mask, cache)
        return x + self.ffn(self.ffn_norm(x))


class Head(nn.Module):
    """Logits, or the loss: made in here, so that a weight gathered for this module serves both."""

    roles: ClassVar[dict[str, Role]] = {"weight": "head"}

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, loss_fn: LossFn[Any] | None = None
    ) -> Any:
        """[B, T, D] -> [B, T, V], or what `loss_fn` returns when there are labels [B, T]."""
        if labels is None:
            return nn.functional.linear(hidden, self.weight)
        if loss_fn is None:
            raise ModelError("labels were given without a loss_fn; pass LossConfig().build()")
        return loss_fn(hidden, self.weight, labels)


class Decoder(nn.Module):
    """A language model. Parameters mean nothing until `forge_model.initialize` or a checkpoint fills them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.norm = config.norm.build(config.dim)
        self.head = Head(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight  # type: ignore[assignment]
        self._head_dim = config.attention.rotary_dim(config.dim)
        self._window: int | None = getattr(config.attention, "sliding_window", None)
        self._tables: dict[tuple[int, torch.device, torch.dtype], Rope] = {}

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        loss_fn: LossFn[Any] | None = None,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """Logits [B, T, V], or the loss when there are labels.

        Args:
            tokens: [B, T] int64.
            labels: [B, T] int64, the target of each position (already shifted); negative is ignored.
            loss_fn: `LossConfig.build()`.
            doc_ids: [B, T] integer; a token sees only tokens of its own id.
            positions: [B, T] integer; default 0, 1, 2, ...
            cache: keys and values of earlier tokens, for generation.

        Raises:
            ModelError: the sequence is longer than `max_tokens`.
        """
        x = self.embed(tokens)
        rope, mask = self._context(x, doc_ids, positions, cache)
        for index, block in enumerate(self.layers.values()):
            x = block(x, rope, mask, None if cache is None else cache.layers[index])
        return self.head(self.norm(x), labels, loss_fn)

    def _context(
        self, x: Tensor, doc_ids: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> tuple[Rope, Mask]:
        """What all blocks share: the rotations and the mask."""
        length = x.shape[1]
        total = length + (0 if cache is None else cache.length)
        if total > self.config.max_tokens:
            raise ModelError(
                f"a sequence of {total} tokens is longer than max_tokens = {self.config.max_tokens}"
            )
        if cache is not None:
            mask = Mask(causal=False, visible=cache.visible(length, self._window))
            return self._rope(x, cache.positions(length)), mask
        return self._rope(x, positions), build_mask(length, x.device, doc_ids, self._window)

    def _rope(self, x: Tensor, positions: Tensor | None) -> Rope:
        """The rotations; those of 0, 1, 2, ... are kept for the next forward pass."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if positions is not None:
            return rope_table(self.config.rope, self._head_dim, positions, wide)
        key = (x.shape[1], x.device, wide)
        if key in self._tables:
            return self._tables[key]
        # Made under inference mode, a kept table could not be used in training later.
        with torch.inference_mode(False):
            index = torch.arange(x.shape[1], device=x.device)
            table = rope_table(self.config.rope, self._head_dim, index, wide)
        if type(table[0]) is Tensor:  # no fake tensor of a dry run
            self._tables = {key: table}
        return table

    def parallel_plan(self) -> dict[str, Any]:
        """What may be done to this model in parallel, as plain data; see `forge_parallel.plan`."""
        tied = self.config.tie_embeddings
        return {
            "blocks": "layers.*",
            "units": [] if tied else [["embed"], ["norm", "head"]],
            "tensor": {
                "embed": "embed",
                "layers.*.attention.w[qkv]": "colwise",
                "layers.*.attention.wo": "rowwise",
                "layers.*.ffn.w_down": "rowwise",
                "layers.*.ffn.w_[gu]*": "colwise",
                "layers.*.*norm": "norm",
                "norm": "norm",
                "head": "head",
            },
            "attention": "layers.*.attention",
            "no_fp8": ["head"],
        }

    def parameter_roles(self) -> dict[str, Role]:
        """What each parameter is for, by name."""
        return parameter_roles(self)

    def initial_values(self) -> dict[str, Init]:
        """How each parameter starts, by name; follows from its role."""
        return {name: self._initial_value(name, role) for name, role in self.parameter_roles().items()}

    def _initial_value(self, name: str, role: Role) -> Init:
        if role in ("norm", "bias"):
            return Init("constant", 1.0 if role == "norm" else 0.0)
        writes_residual = name.endswith(("wo.weight", "w_down.weight"))
        scale = (2 * self.config.num_layers) ** 0.5 if writes_residual else 1.0
        return Init("normal", self.config.init_std / scale)
