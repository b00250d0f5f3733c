"""One attention call: its inputs, and the check that softmax(scores) V equals its output.

Letters: B sequences, N query heads, K key and value heads, T queries, S keys, H head dim; b and t are parts
of B and T. Query head n uses key and value head n // (N / K). A call with tensors of three dimensions is read
as B = 1, and its values lose that dimension again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from forge_interp.attention.lineage import Lineage, Softmax, bind, pack, unpack
from forge_interp.attention.placement import is_dtensor, local_parts, placed_like, unrepeated
from forge_interp.attention.statistics import STATISTICS, collecting
from forge_interp.attention.tiles import HIDES, Gate, Tile, autocast_dtype, four, grouped
from forge_interp.errors import InterpError

TENSORS = {"q": "query", "k": "key", "v": "value", "z": "output"}
DENSE = ("raw", "scores", "pattern")
TILE_BYTES = 8 * 2**20
Check = Literal["nothing", "some", "all"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Inputs and output of one `F.scaled_dot_product_attention` call.

    A bool mask is True where a query may attend; any other mask is added to the scores. Where the model
    computed the softmax itself, query and key have head dim 0, and `edits` holds the scores.
    """

    query: Tensor  # [B, N, T, H], after rotary positions and norms
    key: Tensor  # [B, K, S, H], before they were repeated for the heads, if they were
    value: Tensor  # [B, K, S, H'], the same
    mask: Tensor | None  # broadcastable to [B, N, T, S]
    is_causal: bool  # query t sees keys 0..t, aligned at the first query and key when T != S
    scale: float  # factor of q k^T
    dropout: float  # probability with which weights were dropped
    grouped: bool  # whether K < N was announced (`enable_gqa`)
    output: Tensor  # [B, N, T, H']
    edits: Mapping[str, Tensor] = field(default_factory=dict)  # raw, scores, pattern, in place of computed
    is_softmax: bool = False
    has_sinks: bool = False  # whether that softmax went over more keys than have values
    shape: torch.Size | None = None  # of the output in the model, if it differs
    packed: int | None = None  # K if the query heads that share keys were packed into queries of one head
    repeats: tuple[int, int] = (1, 1)  # number of repetitions of keys, and of values
    computed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)  # for `read`

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Tensor | None = None,
        lineage: Lineage | None = None,
    ) -> AttentionCall:
        """Read the arguments of `F.scaled_dot_product_attention`; `output` is None before the call ran.

        `lineage` knows how the model had arranged the heads.
        """
        given = bind(*args, **kwargs)
        query, key = given["query"], given["key"]
        if query.is_nested or key.is_nested:
            raise InterpError("attention was called with nested tensors; expected padded ones: pad the batch")
        if query.dim() not in (3, 4):
            raise InterpError(f"attention has queries {list(query.shape)}; expected 3 or 4 dimensions")
        given, heads = lineage.undone(given) if lineage else (given, dict[str, Any](packed=None))
        output = output if output is None or heads["packed"] is None else unpack(output, heads["packed"])
        query, mask, is_causal, scale = (given[k] for k in ("query", "attn_mask", "is_causal", "scale"))
        biases = sys.modules.get("torch.nn.attention.bias")  # whose import would load the compiler
        if biases is not None and isinstance(mask, biases.CausalBias):
            queries, keys, is_causal = mask.seq_len_q, mask.seq_len_kv, mask.variant.name == "UPPER_LEFT"
            seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
            mask = None if is_causal else seen
        return cls(
            query=query,
            key=given["key"],
            value=given["value"],
            mask=mask,
            is_causal=bool(is_causal),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            dropout=float(given["dropout_p"]),
            grouped=bool(given["enable_gqa"]),
            output=query.to(autocast_dtype(query)) if output is None else output,
            **heads,
        )

    @classmethod
    def of_softmax(
        cls,
        softmax: Softmax,
        weights: Tensor,
        values: Tensor,
        *,
        output: Tensor | None = None,
        lineage: Lineage | None = None,
    ) -> AttentionCall:
        """Read a product of values with weights from a softmax of scores [B, N, T, S] or [B N, T, S].

        Values are [B, N, S, H'] or [B N, S, H'], or [B, K, S, H'] for weights [B, K, N / K T, S]; `output` is
        the product, None before it was computed.
        """
        batch, heads, queries, keys = softmax.scores.shape
        repeats = 1 if lineage is None else lineage.repeats(values)
        scores = softmax.scores.to(torch.promote_types(torch.float32, softmax.dtype))
        shape = torch.Size((*weights.shape[:-1], values.shape[-1]))
        output = values.new_empty(shape, device="meta") if output is None else output
        empty = scores.new_empty(batch, heads, max(queries, keys), 0)
        edits, chosen = {"scores": scores}, softmax.weights
        if chosen is not None:
            edits["pattern"] = chosen.reshape(scores.shape).to(scores.dtype)
        return cls(
            query=empty[:, :, :queries],
            key=empty[:, :, :keys],
            value=unrepeated(values.reshape(batch, -1, keys, values.shape[-1]), repeats),
            mask=scores > 0.9 * HIDES,
            is_causal=False,
            scale=1.0,
            dropout=softmax.dropout,
            grouped=False,
            output=output.reshape(batch, heads, queries, -1),
            edits=edits,
            is_softmax=True,
            has_sinks=chosen is not None,
            shape=shape,
            repeats=(1, repeats),
        )

    @property
    def is_rearranged(self) -> bool:
        """Whether the model had rearranged heads for the call."""
        return self.packed is not None or self.repeats != (1, 1) or self.is_softmax

    @property
    def returned(self) -> Tensor:
        """The output with its heads arranged as in the queries that the model passed."""
        if self.shape is not None:
            return self.output.reshape(self.shape)
        return self.output if self.packed is None else pack(self.output, self.packed)  # type: ignore[return-value]

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """B, N, T, S."""
        query, key = four(self.query), four(self.key)
        batch, heads = (max(query.shape[i], key.shape[i]) for i in (0, 1))
        return batch, heads, query.shape[2], key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of raw, scores, pattern and statistics: float64 for float64 queries, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def read(self, name: str, max_bytes: int) -> Tensor:
        """Return one tensor; InterpError for an unknown name, more than `max_bytes`, or dropout.

        q, k, v, z are the tensors of the call; raw, scores, pattern are [B, N, T, S]; entropy, sink,
        previous, lag.K are [B, N, T] and never hold T x S numbers (see `attention_statistics`).
        """
        self.check_known(name)
        if name in TENSORS:
            return getattr(self, TENSORS[name])
        if name not in self.computed:
            self.compute([name], max_bytes)
        value = self.computed.pop(name)
        value = value if self.query.dim() == 4 else value.squeeze(0)
        return placed_like(value, self.query) if is_dtensor(self.query) else value

    @torch.no_grad()
    def compute(
        self, names: Sequence[str], max_bytes: int, check: Check = "nothing", tolerance: float | None = None
    ) -> None:
        """Compute tensors that follow from scores in one pass, which `read` then returns; errors: see `read`.

        `check` selects the queries at which the method `check` compares softmax(scores) V with the output.
        """
        call = self.local()
        dense: dict[str, Tensor] = {}
        for name in (name for name in DENSE if name in names):
            call._check_budget(name, max_bytes)
            dense[name] = call.query.new_empty(call.grid, dtype=call.dtype)
        others = [name for name in dict.fromkeys(names) if name not in TENSORS and name not in DENSE]
        statistics, add = collecting(call, others)
        is_checked = check != "nothing" and not self.query.is_meta and bool(call.key.shape[-2])
        gate = Gate(call, tolerance) if is_checked else None
        for tile in call.tiles() if dense or others or (gate is not None and check == "all") else ():
            for name, value in dense.items():
                part = getattr(tile, name)
                if part.shape == call.grid and len(dense) == 1 and not call.edits:
                    dense[name] = part  # which nobody else holds
                else:
                    value[tile.batch, :, tile.queries] = part
            add(tile)
            if gate is not None and check == "all":
                gate.add(tile)
        if gate is not None:
            for tile in call.samples() if check == "some" else ():
                gate.add(tile)
            gate.verify()
        self.computed.update(dense | statistics)

    def check(self, tolerance: float | None = None) -> None:
        """Compare softmax(scores) V with the output, streamed; InterpError where they differ.

        Queries that see no key are left out. The error of a head at a query may reach (tolerance + 16 eps max
        |score|) times the largest of sum_s pattern_s |V_s| over H': the error that rounding can make. The
        default relative tolerance depends on the output's dtype (float32: 1e-5, bfloat16: 2e-2; more where
        the user allows TF32 or bfloat16 in float32 products).
        """
        self.compute((), 0, check="all", tolerance=tolerance)

    def local(self) -> AttentionCall:
        """Return this rank's sequences and heads of a call with DTensors, else the call itself."""
        if not is_dtensor(self.query):
            return self
        if self.is_softmax:
            raise InterpError(
                "the model takes a softmax of DTensors itself; expected F.scaled_dot_product_attention: call "
                "model.set_attn_implementation('sdpa'), or capture attn.v or attn.z, which are gathered"
            )
        tensors = {name: getattr(self, name) for name in TENSORS.values()}
        return replace(self, **local_parts(tensors, self.mask))

    def run(self, attention: Callable[..., Tensor]) -> Tensor:
        """Run another attention function on the tensors as the model arranged them; returns [B, N, T, H']."""
        key, value = (
            x.repeat_interleave(times, 1) if times > 1 else x
            for x, times in zip((self.key, self.value), self.repeats, strict=True)
        )
        query, mask = self.query, self.mask
        if self.packed is not None:
            query, mask = pack(query, self.packed), pack(mask, self.packed)
        options = {"dropout_p": self.dropout, "is_causal": self.is_causal, "scale": self.scale}
        output = attention(query, key, value, attn_mask=mask, enable_gqa=self.grouped, **options)
        return output if self.packed is None else unpack(output, self.packed)  # type: ignore[return-value]

    def edited(self, name: str, change: Callable[[Tensor], Tensor]) -> AttentionCall:
        """Return this call with changed raw, scores or pattern, and the output that follows; differentiable.

        `change` is given the tensor `name`, dense [B, N, T, S] in `dtype`. Errors: see `tiles`.
        """
        self.check_known(name)
        whole = self.local()._whole(name)
        value = change(whole if self.query.dim() == 4 else whole.squeeze(0))
        later = DENSE[DENSE.index(name) + 1 :]
        kept = {key: edit for key, edit in self.edits.items() if key not in later}
        call = replace(self, edits={**kept, name: four(value)})
        values = call.used(self.value).to(self.dtype)
        output = grouped(call._whole("pattern"), values).to(self.output.dtype)
        return replace(call, output=output if self.query.dim() == 4 else output.squeeze(0))

    def tiles(self, max_bytes: int = TILE_BYTES) -> Iterator[Tile]:
        """Yield tiles [b, N, t, S] of at most `max_bytes`, or one query; InterpError with dropout.

        A tile has several whole sequences, or some queries of one.
        """
        self._check_dropout()
        batch, heads, queries, keys = self.grid
        fit = max(1, max_bytes // max(1, heads * keys * self.dtype.itemsize))
        num_sequences, num_queries = max(1, fit // max(1, queries)), max(1, min(fit, queries))
        key = self.used(self.key).expand(batch, -1, -1, -1)
        for first in range(0, batch, num_sequences):
            rows = slice(first, first + num_sequences)
            part = key[rows].to(self.dtype)
            for start in range(0, queries, num_queries):
                yield Tile(self, rows, slice(start, start + num_queries), part)

    def samples(self) -> Iterator[Tile]:
        """Yield a tile of all heads at the middle and the last query; errors: see `tiles`."""
        self._check_dropout()
        batch, _, queries, _ = self.grid
        key = self.used(self.key).expand(batch, -1, -1, -1).to(self.dtype)
        if queries:
            middle, last = queries // 2, queries - 1
            yield Tile(self, slice(None), slice(middle, None, max(1, last - middle)), key)

    def used(self, x: Tensor) -> Tensor:
        """Return [B, ...] in the dtype in which autocast passes it to the kernel."""
        return four(x).to(self.output.dtype)

    def check_known(self, name: str) -> None:
        """Raise InterpError for a tensor that is unknown because the model computes the softmax itself."""
        if self.has_sinks and name == "scores":
            raise InterpError(
                "attn.scores do not make the weights alone: the softmax goes over more than these keys, over "
                "sinks; expected pattern, v, z or a statistic"
            )
        if self.is_softmax and name in ("q", "k", "raw"):
            raise InterpError(
                f"attn.{name} is not seen: the model takes the softmax of its scores itself; expected "
                "scores, pattern, v, z or a statistic: capture the projections of the module, or call "
                "model.set_attn_implementation('sdpa') where the model has that"
            )

    def _check_dropout(self) -> None:
        if self.dropout > 0:
            raise InterpError(
                f"attention was called with dropout {self.dropout}; expected none: call model.eval()"
            )

    def _check_budget(self, name: str, max_bytes: int) -> None:
        needed = math.prod(self.grid) * self.dtype.itemsize
        streamed = ", ".join(f"attn.{statistic}" for statistic in STATISTICS)
        if needed > max_bytes:
            raise InterpError(
                f"attn.{name} {list(self.grid)} takes {needed:,} bytes; the budget is {max_bytes:,}: capture "
                f"statistics ({streamed}), raise attention_bytes=, or select fewer sequences or tokens"
            )

    def _whole(self, name: str) -> Tensor:
        """Return all [B, N, T, S] at once, differentiable."""
        return getattr(next(self.tiles(2**62)), name)
