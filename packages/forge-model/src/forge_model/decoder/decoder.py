"""The decoder: embedding, blocks, norm, head. B batch, T tokens, D model dim, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_model.attention.cache import Cache, LayerCache
from forge_model.attention.mask import Attend, Mask, softmax_attention
from forge_model.attention.rope import Rope, RopeTables
from forge_model.decoder.config import DecoderConfig, LayerConfig
from forge_model.decoder.init import Init
from forge_model.decoder.mtp import MTPModule, combined, look_ahead
from forge_model.decoder.plan import plan_of
from forge_model.decoder.roles import Role, parameter_roles
from forge_model.error import ModelError
from forge_model.layers import Embedding
from forge_model.loss.cross_entropy import LossTerms, VocabularyShard
from forge_model.moe.layer import learn_from_load, moe_layers

LossFn = Callable[..., LossTerms]
"""(hidden [B, T, D], head weight [V, D], labels [B, T]) -> terms of the loss; where the head has a part
of the vocabulary, its `VocabularyShard` comes last. `softcap` is given by keyword where logits have one."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); `norm_order` says where the norms are.

    Attributes:
        attention_norm: of what attention is given; None where that is not normalized.
        attention_post_norm: of what it returns.
        ffn_norm: of what the feed-forward is given.
        ffn_post_norm: of what it returns.
    """

    def __init__(self, config: LayerConfig, dim: int) -> None:
        super().__init__()
        before, after = config.norm_order != "reordered", config.norm_order != "pre"
        self.attention_norm = config.norm.build(dim) if before else None
        self.attention = config.attention.build(dim, config.norm)
        self.attention_post_norm = config.norm.build(dim) if after else None
        self.ffn_norm = config.norm.build(dim) if before else None
        self.ffn = config.ffn.build(dim)
        self.ffn_post_norm = config.norm.build(dim) if after else None

    def forward(self, x: Tensor, rope: Rope, mask: Any, cache: LayerCache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; `mask` is what the attention of this block made of the description."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        attended = self.attention(normed, rope, mask, cache)
        x = x + (attended if self.attention_post_norm is None else self.attention_post_norm(attended))
        fed = self.ffn(x if self.ffn_norm is None else self.ffn_norm(x))
        return x + (fed if self.ffn_post_norm is None else self.ffn_post_norm(fed))


class Head(nn.Module):
    """Logits, or the loss: made in here, so that a weight gathered for this module serves both.

    Attributes:
        vocabulary: which rows of the weight this process computes with; None means all.
        softcap: logits become softcap * tanh(logit / softcap); None leaves them as they are.
    """

    roles: ClassVar[dict[str, Role]] = {"weight": "head"}
    vocabulary: VocabularyShard | None = None

    def __init__(self, dim: int, vocab_size: int, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap
        self.weight: nn.Parameter = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, loss_fn: LossFn | None = None, parts: int = 1
    ) -> Any:
        """[B, T, D] -> [B, T, V], or what `loss_fn` returns when there are labels [B, T].

        With several `parts`, of which each has as many rows, a list of what it returns for each.
        """
        if labels is None:
            logits = nn.functional.linear(hidden, self.weight)
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            return logits if self.vocabulary is None else self.vocabulary.gather(logits)
        if loss_fn is None:
            raise ModelError("labels were given without a loss_fn; pass LossConfig().build()")
        part = () if self.vocabulary is None else (self.vocabulary,)
        # a loss that knows no soft cap is not given one, and otherwise fails: it would be another loss
        options = {} if self.softcap is None else {"softcap": self.softcap}
        made = [
            loss_fn(h, self.weight, y, *part, **options)
            for h, y in zip(hidden.chunk(parts), labels.chunk(parts), strict=True)
        ]
        return made if parts > 1 else made[0]


class Decoder(nn.Module):
    """A language model. Parameters mean nothing before `forge_model.initialize` or a checkpoint writes them.

    A part of a model (a pipeline stage) has the same names: set `embed`, `norm` and `head` to None and delete
    `layers` that another stage holds. A stage without `embed` is given the hidden state instead; one without
    `head` returns it. With `mtp`, the embeddings of tokens further on travel along: [B, T, (1 + depths) D].

    Attributes:
        embed: token ids -> hidden state.
        layers: blocks by index.
        norm: of the last hidden state.
        head: hidden state -> logits, or loss.
        mtp: modules that predict tokens after the next one, used where there are labels.
    """

    embed: Embedding | None
    norm: nn.Module | None
    head: Head | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): Block(config.layer(i), config.dim) for i in range(config.num_layers)}
        )
        self.norm = config.norm.build(config.dim)
        self.head = Head(config.dim, config.vocab_size, config.logit_softcap)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight  # type: ignore[assignment]
        self.mtp = nn.ModuleDict(
            {
                str(k): MTPModule(Block(config.layer(-1), config.dim), config.layer(-1).norm, config.dim)
                for k in range(config.mtp.num_modules)
            }
        )
        self._layer_configs = {str(i): config.layer(i) for i in range(config.num_layers)}
        self._rope_tables = RopeTables()
        if config.mtp.num_modules:
            self.register_forward_pre_hook(look_ahead, with_kwargs=True)

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        loss_fn: LossFn | None = None,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        hidden: Tensor | None = None,
        last_logits: int | None = None,
        ahead_tokens: Tensor | None = None,
        ahead_labels: Tensor | None = None,
    ) -> Any:
        """Logits [B, T, V], or the loss when there are labels.

        Args:
            tokens: [B, T] int64; every stage of a pipeline is given them.
            labels: [B, T] int64, the target of each position (already shifted); negative is ignored.
            loss_fn: `LossConfig.build()`.
            doc_ids: [B, T] integer; a token sees only tokens of its own id.
            positions: [T] or [B, T] integer; default 0, 1, 2, ...
            cache: keys and values of earlier tokens, for generation.
            hidden: [B, T, D] for a stage without `embed`.
            last_logits: make the logits of so many last tokens only; absent means all.
            ahead_tokens: [B, K, T] those 1, 2, ... places further on; from `look_ahead`.
            ahead_labels: [B, K, T] their targets.

        Raises:
            ModelError: the sequence is longer than `max_tokens`; a cache was given with `doc_ids` or
                `positions`; or a stage without `embed` was given no hidden state.
        """
        if cache is not None and (doc_ids is not None or positions is not None):
            raise ModelError("a cache knows its positions and has one document a row; give no others with it")
        self._require_room(tokens.shape[1] + (0 if cache is None else cache.length))
        x, *following = self._embedded(tokens, hidden, ahead_tokens)
        if cache is None:
            mask = Mask(tokens.shape[1], tokens.device, doc_ids)
        else:
            mask, positions = cache.mask(tokens.shape[1]), cache.positions(tokens.shape[1])
        shared = self._shared(mask, tokens, positions, x.dtype)
        x = self.run(x, self._tables(shared), None if cache is None else cache.layers)
        if self.head is not None and labels is not None and ahead_labels is not None:
            return self._losses(x, following, shared, torch.stack([labels, *ahead_labels.unbind(1)]), loss_fn)
        if self.head is None and following:
            return torch.cat([x, *following], -1)
        return self.read_out(x if last_logits is None else x[:, -last_logits:], labels, loss_fn)

    def _shared(self, mask: Mask, tokens: Tensor, positions: Tensor | None, dtype: torch.dtype) -> _Shared:
        return _Shared(mask, self._rope_tables, tokens, positions, dtype, self.config.dim)

    def _tables(self, shared: _Shared) -> list[tuple[Rope, Any]]:
        return [shared.of(self._layer_configs[name], block) for name, block in self.layers.items()]

    def run(self, x: Tensor, tables: list[tuple[Rope, Any]], layers: Sequence[LayerCache] | None) -> Tensor:
        """[B, T, D] through all blocks, given the rotations and the mask of each, and the cache of each."""
        for (name, block), (rope, mask) in zip(self.layers.items(), tables, strict=True):
            x = block(x, rope, mask, None if layers is None else layers[int(name)])
        return x

    def _losses(
        self,
        x: Tensor,
        following: list[Tensor],
        shared: _Shared,
        labels: Tensor,
        loss_fn: LossFn | None,
    ) -> LossTerms:
        """The loss of the next token and of those after it; embedding, norm and head run once each.

        Labels are [1 + depths, B, T].
        """
        assert self.norm is not None and self.head is not None
        hidden = [self.norm(x)]
        for module, embedded in zip(self.mtp.values(), following, strict=True):
            rope, resolved = shared.of(self.config.layer(-1), module.get_submodule("block"))
            hidden.append(module(embedded, hidden[-1], rope, resolved))
        terms = self.head(torch.cat(hidden), labels.flatten(0, 1), loss_fn, len(hidden))
        return combined(terms, self.config.mtp.loss_weight)

    def hidden_states(self, tokens: Tensor, cache: Cache) -> Tensor:
        """[B, T] -> [B, T, D]: what the head is given, for tokens after those in the cache."""
        assert self.norm is not None
        return self.norm(self.run(*self.prepared(tokens, cache), cache.layers))

    def prepared(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, list[tuple[Rope, Any]]]:
        """What `run` is given of tokens [B, T] after those in the cache."""
        mask, positions = cache.mask(tokens.shape[1]), cache.positions(tokens.shape[1])
        (x,) = self._embedded(tokens, None)
        return x, self._tables(self._shared(mask, tokens, positions, x.dtype))

    def predict_ahead(
        self, module: nn.Module, tokens: Tensor, hidden: Tensor, cache: LayerCache, mask: Mask
    ) -> Tensor:
        """What one of `mtp` makes of tokens [B, T] further on and hidden states [B, T, D], after a cache."""
        assert mask.padding is not None
        index = torch.arange(mask.cached, mask.cached + mask.tokens, device=tokens.device)
        positions = (index - mask.padding[:, None]).clamp(min=0)
        (x,) = self._embedded(tokens, None)
        rope, resolved = self._shared(mask, tokens, positions, x.dtype).of(
            self.config.layer(-1), module.get_submodule("block")
        )
        return module(x, hidden, rope, resolved, cache)

    def _embedded(
        self, tokens: Tensor, hidden: Tensor | None, ahead: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """[B, T, D] of tokens [B, T] and of those ahead [B, K, T], or what another stage made of them."""
        depths = 0 if ahead is None else ahead.shape[1]
        if self.embed is None:
            if hidden is None:
                raise ModelError("this part of the model has no embedding; pass hidden=[B, T, D]")
            return hidden.chunk(1 + depths, -1)
        x = self.embed(tokens if ahead is None else torch.cat([tokens, *ahead.unbind(1)]))
        if (scale := self.config.embedding_scale) != 1:
            # rounded to the dtype of the model first, as Gemma was trained; made on the device: no copy
            x = x * torch.full((), scale, dtype=x.dtype, device=x.device)
        return x.chunk(1 + depths)

    def read_out(self, x: Tensor, labels: Tensor | None = None, loss_fn: LossFn | None = None) -> Any:
        """Logits or loss of hidden states [B, T, D]; the hidden states themselves where there is no head."""
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x, labels, loss_fn)

    def _require_room(self, total: int) -> None:
        if total > self.config.max_tokens:
            raise ModelError(
                f"a sequence of {total} tokens is longer than max_tokens = {self.config.max_tokens}"
            )

    def parallel_plan(self) -> dict[str, Any]:
        """What may be done to this model in parallel, as plain data; see `forge_parallel.plan`."""
        return plan_of(self)

    def parameter_roles(self) -> dict[str, Role]:
        """What each parameter is for, by name."""
        return parameter_roles(self)

    def before_micro_batches(self, tokens: int) -> None:
        """Be told of how many tokens the next global batch is: what auxiliary losses are divided by."""
        for layer in moe_layers(self).values():
            layer.step_tokens = tokens

    def before_optimizer_step(self, sum_: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Let routers learn from the load of a step; see `learn_from_load`. Collective."""
        return learn_from_load(moe_layers(self), sum_)

    def active_parameters(self) -> int:
        """Parameters that a token uses: of the experts, as many as serve it."""
        idle = sum(layer.idle_parameters() for layer in moe_layers(self).values())
        return sum(parameter.numel() for parameter in self.parameters()) - idle

    def initial_values(self) -> dict[str, Init]:
        """How each parameter starts, by name, by its role; and biases by which routers select."""
        values = {name: self._initial_value(name, role) for name, role in self.parameter_roles().items()}
        biases = [name for name, _ in self.named_buffers() if name.endswith(".router.selection_bias")]
        return values | dict.fromkeys(biases, Init("constant", 0.0))

    def _initial_value(self, name: str, role: Role) -> Init:
        if role in ("norm", "bias"):
            module = self.get_submodule(name.rpartition(".")[0])
            return Init("constant", getattr(module, "initial_weight", 1.0) if role == "norm" else 0.0)
        writes_residual = name.endswith(("wo.weight", "w_down.weight", "w_down"))
        scale = (2 * self.config.num_layers) ** 0.5 if writes_residual else 1.0
        return Init("normal", self.config.init_std / scale)


class _Shared:
    """What blocks need beside the hidden state: each table and each mask is made once a forward pass."""

    def __init__(
        self,
        mask: Mask,
        tables: RopeTables,
        tokens: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        dim: int,
    ) -> None:
        self._mask, self._tables, self._dim = mask, tables, dim
        self._where = (tokens, positions, torch.promote_types(dtype, torch.float32))
        self._ropes: list[tuple[Any, int, Rope]] = []
        self._masks: list[tuple[Attend, int | None, Any]] = []

    def of(self, config: LayerConfig, block: nn.Module) -> tuple[Rope, Any]:
        """The rotations and the resolved mask of one layer."""
        attend = getattr(block.attention, "attend", softmax_attention)
        return self._rope(config), self._resolved(attend, config.attention.window)

    def _rope(self, config: LayerConfig) -> Rope:
        width = config.attention.rotary_dim(self._dim)
        for rope, head_dim, made in self._ropes:
            if head_dim == width and rope == config.rope:
                return made
        made = self._tables(config.rope, width, *self._where)
        self._ropes.append((config.rope, width, made))
        return made

    def _resolved(self, attend: Attend, window: int | None) -> Any:
        for known, of, made in self._masks:
            if known is attend and of == window:
                return made
        made = attend.resolve(self._mask, window)
        self._masks.append((attend, window, made))
        return made
