"""The decoder: embedding, blocks, norm, head. B batch, T tokens, D model dim, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_model.attention.cache import Cache, LayerCache, positions_after
from forge_model.attention.mask import Mask
from forge_model.attention.rope import RopeTables
from forge_model.decoder.config import DecoderConfig
from forge_model.decoder.context import Context
from forge_model.decoder.head import Head, LossFn
from forge_model.decoder.mtp import MTPModule, combined, look_ahead
from forge_model.decoder.pass_tables import PassTables, attention_of
from forge_model.decoder.plan import blocks_of, plan_of
from forge_model.error import ModelError
from forge_model.layers import Embedding
from forge_model.loss.cross_entropy import LossTerms
from forge_model.model import Model


class Decoder(Model):
    """A language model. Its parameters are uninitialized until `initialize` or a checkpoint writes them.

    A part of a model (a pipeline stage) has the same names: set absent modules outside of blocks to None and
    delete `layers` of other stages. A stage without `embed` gets the hidden state instead; one without `head`
    returns it. With `mtp`, embeddings of later tokens are passed along: [B, T, (1 + depths) D].

    Attributes:
        embed: token ids -> hidden state.
        position_embed: positions -> vectors added to the hidden state; None without `learned_positions`.
        layers: blocks by index.
        norm: norm of the last hidden state.
        head: hidden state -> logits, or loss.
        mtp: modules that predict tokens after the next one, used if there are labels.
    """

    tensor_roles: ClassVar[dict[str, str]] = {
        "embed": "embed",
        "position_embed": "embed",
        "norm": "norm",
        "head": "head",
    }
    embed: Embedding | None
    position_embed: Embedding | None
    norm: nn.Module | None
    head: Head | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config, self.init_std, self.depth = config, config.init_std, config.num_layers
        self.scaling = config.scaled
        self.embed = Embedding(config.vocab_size, config.dim)
        self.position_embed = Embedding(config.max_tokens, config.dim) if config.learned_positions else None
        self.layers = nn.ModuleDict({str(i): _block(config, i) for i in range(config.num_layers)})
        self.norm = config.norm.build(config.dim)
        self.head = Head(config.dim, config.vocab_size, config.logit_softcap, config.divisor)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight  # type: ignore[assignment]
        self.mtp = nn.ModuleDict(
            {
                str(k): MTPModule(_block(config, -1), config.layer(-1).norm, config.dim)
                for k in range(config.mtp.num_modules)
            }
        )
        self._layer_configs = {str(i): config.layer(i) for i in range(config.num_layers)}
        self._attentions = {name: attention_of(block) for name, block in blocks_of(self).items()}
        self._needs = {name: tuple(layer.needs()) for name, layer in self._layer_configs.items()}
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
        span_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        hidden: Tensor | None = None,
        last_logits: int | None = None,
        ahead_tokens: Tensor | None = None,
        ahead_labels: Tensor | None = None,
        **side: Tensor,
    ) -> Any:
        """Return logits [B, T, V], or the loss if there are labels.

        Args:
            tokens: [B, T] int64; every stage of a pipeline gets them.
            labels: [B, T] int64, the target of each position (already shifted); negative is ignored.
            loss_fn: `LossConfig.build()`.
            doc_ids: [B, T] integer; a token sees only tokens with its own id. Negative ids mark padding,
                which counts in no statistic and no loss of experts.
            span_ids: [B, T] integer; tokens with the same id other than 0 see each other in both directions.
            positions: [T], [B, T] or, for rotations by several axes, [B, axes, T] integer; default 0, 1, ...,
                or the next positions of the cache.
            cache: keys and values of earlier tokens, for generation.
            hidden: [B, T, D] in place of embeddings: the result of `embedded`, possibly changed, or the
                output of the stage before.
            last_logits: number of last tokens whose logits are computed; absent means all.
            ahead_tokens: [B, K, T] the tokens 1, 2, ... places further on; from `look_ahead`.
            ahead_labels: [B, K, T] their targets.
            side: the side inputs that blocks need, by name; see `BlockConfig.needs`.

        Raises:
            ModelError: the sequence is longer than `max_tokens`; `doc_ids` is given with a cache, or
                `span_ids` with a cache that is not empty; a stage without `embed` gets no hidden state; or a
                side input is missing or not needed.
        """
        if cache is not None and doc_ids is not None:
            raise ModelError("a cache has one document a row; give no doc_ids with it")
        self._require_room(tokens.shape[1] + (0 if cache is None else cache.length))
        sides = self._sides(side, cache)
        x, *following = self._embedded(tokens, hidden, ahead_tokens)
        if cache is None:
            mask = Mask(tokens.shape[1], tokens.device, doc_ids, span_ids=span_ids)
        else:
            mask = cache.mask(tokens.shape[1], span_ids)
            positions = cache.positions(tokens.shape[1]) if positions is None else positions
        x = self._placed(x, tokens, positions)
        tables = self._tables(mask, tokens, positions, x.dtype)
        x = self.run(x, self._contexts(tables, cache, sides))
        if self.head is not None and labels is not None and ahead_labels is not None:
            return self._losses(x, following, tables, torch.stack([labels, *ahead_labels.unbind(1)]), loss_fn)
        if self.head is None and following:
            return torch.cat([x, *following], -1)
        return self.read_out(x if last_logits is None else x[:, -last_logits:], labels, loss_fn, sides)

    def _tables(self, mask: Mask, tokens: Tensor, positions: Tensor | None, dtype: torch.dtype) -> PassTables:
        return PassTables(mask, self._rope_tables, tokens, positions, dtype, self.config.dim)

    def _sides(self, inputs: Mapping[str, Tensor], cache: Cache | None) -> Mapping[str, Tensor]:
        """Return the side inputs of a pass: the given ones and, after the first pass, the cached ones."""
        if cache is not None and cache.length:
            inputs = {**cache.side, **inputs}
        known_names = {*self.config.norm.needs, *(name for needs in self._needs.values() for name in needs)}
        if unknown := inputs.keys() - known_names:
            known = ", ".join(sorted(known_names)) or "none"
            raise ModelError(
                f"given {', '.join(sorted(unknown))}, which nothing in this model needs; its blocks need "
                f"{known}"
            )
        needed = {name for layer in self.layers for name in self._needs[layer]}
        needed |= set(self.config.norm.needs) if self.norm is not None else set()
        if missing := needed - inputs.keys():
            raise ModelError(
                f"this model needs {', '.join(sorted(missing))} beside its tokens; give it by name"
            )
        return inputs

    def _contexts(self, tables: PassTables, cache: Cache | None, side: Mapping[str, Tensor]) -> list[Context]:
        """The context of each block of this part."""
        return [
            tables.context(
                self._layer_configs[name],
                self._attentions[f"layers.{name}"],
                None if cache is None else cache.layers[int(name)],
                {key: side[key] for key in self._needs[name]},
            )
            for name in self.layers
        ]

    def run(self, x: Tensor, contexts: Sequence[Context]) -> Tensor:
        """Pass [B, T, D] through all blocks with their contexts."""
        for block, context in zip(self.layers.values(), contexts, strict=True):
            x = block(x, context)
        return x

    def _losses(
        self,
        x: Tensor,
        following: list[Tensor],
        tables: PassTables,
        labels: Tensor,
        loss_fn: LossFn | None,
    ) -> LossTerms:
        """Return the loss of the next token and of later ones; embedding, norm and head run once each.

        Labels are [1 + depths, B, T].
        """
        assert self.norm is not None and self.head is not None
        hidden = [self.norm(x)]
        for (name, module), embedded in zip(self.mtp.items(), following, strict=True):
            context = tables.context(self.config.layer(-1), self._attentions[f"mtp.{name}.block"])
            hidden.append(module(embedded, hidden[-1], context))
        terms = self.head(torch.cat(hidden), labels.flatten(0, 1), loss_fn, len(hidden))
        return combined(terms, self.config.mtp.loss_weight)

    @property
    def writer(self) -> Decoder:
        """The module that takes one new token at a time after `begin`."""
        return self

    def new_cache(self, capacity: int, padding: Tensor | None, device: torch.device) -> Cache:
        """Return an empty cache for so many tokens; see `Cache`."""
        return Cache(self.config.num_layers, capacity, padding, device)

    def begin(self, tokens: Tensor, cache: Cache, **inputs: Tensor) -> Tensor:
        """Read prompts [B, T] into an empty cache; return the logits [B, V] of the next token.

        Args:
            tokens: [B, T], padded on the left as declared in the cache.
            cache: from `new_cache`.
            inputs: further inputs of `forward` for the prompts.
        """
        return self(tokens, cache=cache, last_logits=1, **inputs)[:, -1]

    def hidden_states(self, tokens: Tensor, cache: Cache) -> Tensor:
        """[B, T] -> [B, T, D]: inputs of the head, for tokens that follow the cached ones."""
        return self._normalized(self.run(*self.prepared(tokens, cache)), cache.side)

    def prepared(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, list[Context]]:
        """Return the arguments of `run` for tokens [B, T] that follow the cached ones."""
        mask, positions = cache.mask(tokens.shape[1]), cache.positions(tokens.shape[1])
        x = self._placed(self.embedded(tokens), tokens, positions)
        return x, self._contexts(
            self._tables(mask, tokens, positions, x.dtype), cache, self._sides({}, cache)
        )

    def predict_ahead(
        self, module: nn.Module, tokens: Tensor, hidden: Tensor, cache: LayerCache, mask: Mask
    ) -> Tensor:
        """Apply a module of `mtp`, after a cache, to later tokens [B, T] and hidden states [B, T, D]."""
        assert mask.padding is not None
        index = torch.arange(mask.cached, mask.cached + mask.tokens, device=tokens.device)
        positions = positions_after(index, mask.padding, None)
        x = self.embedded(tokens)
        tables = self._tables(mask, tokens, positions, x.dtype)
        context = tables.context(self.config.layer(-1), attention_of(module.get_submodule("block")), cache)
        return module(x, hidden, context)

    def embedded(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]: the scaled vectors of tokens; see `_placed` for positions.

        Raises:
            ModelError: this part of the model has no embedding.
        """
        if self.embed is None:
            raise ModelError("this part of the model has no embedding; pass hidden=[B, T, D]")
        x = self.embed(tokens)
        if (scale := self.config.embedding_scale) != 1:
            # rounded to the dtype of the model first, as Gemma was trained; made on the device: no copy
            x = x * torch.full((), scale, dtype=x.dtype, device=x.device)
        return x

    def _placed(self, x: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the input of the first block: [B, T, D] plus the learned vectors of positions, if any.

        Raises:
            ModelError: positions have several axes.
        """
        if self.position_embed is None:
            return x
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if positions.ndim > 2:
            raise ModelError(f"positions {list(positions.shape)} of several axes; learned ones have one")
        return x + self.position_embed(positions.expand(tokens.shape))

    def _embedded(
        self, tokens: Tensor, hidden: Tensor | None, ahead: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the vectors [B, T, D] of tokens [B, T] and of those ahead [B, K, T], or `hidden` instead."""
        depths = 0 if ahead is None else ahead.shape[1]
        if hidden is None:
            x = self.embedded(tokens if ahead is None else torch.cat([tokens, *ahead.unbind(1)]))
            return x.chunk(1 + depths)
        if self.embed is None or ahead is None:
            return hidden.chunk(1 + depths, -1)
        return hidden, *self.embedded(torch.cat(ahead.unbind(1))).chunk(depths)

    def read_out(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        loss_fn: LossFn | None = None,
        side: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Return logits or loss of hidden states [B, T, D]; without a head, the hidden states."""
        x = x if self.norm is None else self._normalized(x, side or {})
        return x if self.head is None else self.head(x, labels, loss_fn)

    def _normalized(self, x: Tensor, side: Mapping[str, Tensor]) -> Tensor:
        """Apply the last norm to [B, T, D], possibly of the last tokens only."""
        assert self.norm is not None
        needs = self.config.norm.needs
        return self.norm(
            x, **{n: side[n][..., -x.shape[1] :] if kind == "token" else side[n] for n, kind in needs.items()}
        )

    def _require_room(self, total: int) -> None:
        if total > self.config.max_tokens:
            raise ModelError(
                f"a sequence of {total} tokens is longer than max_tokens = {self.config.max_tokens}"
            )

    def parallel_plan(self) -> dict[str, Any]:
        """Return the parallel plan of this model as plain data; see `forge_parallel.plan`."""
        return plan_of(self)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the blocks, with those of multi-token prediction; see `Model.blocks`."""
        return blocks_of(self)


def _block(config: DecoderConfig, index: int) -> nn.Module:
    layer = config.layer(index)
    return layer.block.build(layer, config.dim)
