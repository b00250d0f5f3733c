"""How did a model arrange tensors before it called attention, and where does it compute attention itself?

With fewer key and value heads than query heads, models repeat keys and values for all heads, or, for one new
token, pack the query heads that share keys as so many queries of one head. The shapes of the call do not
show which of these was done; the operations before it do. A product whose left factor comes from a softmax
[B, N, T, S] over keys is attention, too. Such a softmax is taken of scores of each query with each key; a
softmax over features, as in linear attention, is taken of a projection.

Letters: B sequences, N query heads, K key and value heads, G = N / K, T queries, S keys, H head dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from forge_interp.attention.placement import is_dtensor, unrepeated


def _both(*names: str) -> set[Any]:
    """Return the functions of torch and the methods of tensors with these names."""
    return {getattr(owner, name) for owner in (torch, Tensor) for name in names if hasattr(owner, name)}


_RESHAPES = _both("reshape", "flatten", "view", "unflatten")
_REPEATS = _both("repeat_interleave")
_SOFTMAX = _both("softmax") | {F.softmax}
_PRODUCTS = _both("matmul", "__matmul__", "bmm")
_DROPOUT = {F.dropout, torch.dropout}
_CASTS = {Tensor.to, Tensor.type_as, Tensor.type, Tensor.half, Tensor.float, Tensor.contiguous}
_CONTRACTIONS = _PRODUCTS | _both("baddbmm", "cdist", "einsum")
_BROADCASTS = _both("add", "sub", "mul", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")


@dataclass(frozen=True)
class Softmax:
    """Origin of attention weights: their scores [B, N, T, S], and the dropout of the weights since.

    `weights` [.., T, S] are set where the softmax went over more keys than there are values (sinks).
    """

    scores: Tensor
    dtype: torch.dtype  # of the softmax
    dropout: float = 0.0
    weights: Tensor | None = None


class Lineage:
    """Operations on tensors that are still alive, on one thread."""

    def __init__(self) -> None:
        self._repeats, self._packed, self._softmax, self._flattened, self._scores, self._weights = (
            WeakTensorKeyDictionary() for _ in range(6)
        )  # `_scores` of queries with keys, and what follows from these; `_weights`: a weight, cast or turned

    def weights(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Softmax | None:
        """Return the origin of a product's left factor if it is a softmax over keys, else None.

        None also if the right factor is made of scores. Query heads that share keys may be rows of one
        product: [B, K, G T, S].
        """
        if function not in _PRODUCTS or len(args) != 2 or not isinstance(args[0], Tensor):
            return None
        found, values = self._softmax.get(args[0]), args[1]
        if found is None or not isinstance(values, Tensor) or values.dim() not in (3, 4):
            return None
        batch, heads, queries, keys = found.scores.shape
        if values.shape[-2] != keys or values in self._scores:
            return None
        kv_heads = values.shape[1] if values.dim() == 4 else heads
        if args[0].dim() == 4 and args[0].shape == (batch, kv_heads, heads // kv_heads * queries, keys):
            return found if values.shape[:2] == (batch, kv_heads) else None
        fits = args[0].shape[-2:] == (queries, keys)
        return found if fits and values.numel() == batch * heads * keys * values.shape[-1] else None

    def note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Record an operation that makes weights, repeats keys for the heads, or packs query heads."""
        made = _tensors(args[:1] if function is Tensor.__setitem__ else (result,))
        if not made:  # a shape, a dtype: most of what is seen
            return
        self._note_scores(function, _tensors((*args, *kwargs.values())), made)
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or not isinstance(result, Tensor):
            return
        second = args[1] if len(args) > 1 else kwargs.get("repeats" if function in _REPEATS else "dim")
        if function in _SOFTMAX:
            heads = x.shape[:2] if x.dim() == 4 else self._flattened.get(x)
            if second in (-1, x.dim() - 1) and x in self._scores and heads is not None:
                self._softmax[result] = Softmax(x.reshape(*heads, *x.shape[-2:]), result.dtype)
        elif (before := self._softmax.get(x)) is not None:
            self._note_weights(function, before, args, kwargs, result)
        if function in _RESHAPES:
            self._note_reshape(x, result)
        elif (
            function in _REPEATS
            and isinstance(second, int)
            and x.dim() == result.dim() == 4
            and result.shape[1] == x.shape[1] * second > x.shape[1]
        ):
            self._repeats[result] = second, _version(result)

    def _note_weights(
        self, function: Callable[..., Any], before: Softmax, args: Any, kwargs: Any, result: Tensor
    ) -> None:
        """Record a result that is still weights: cast, reshaped, dropped out, or those of some keys."""
        if function in _CASTS or function in _RESHAPES:
            self._softmax[result] = before
        elif function in _DROPOUT:
            self._softmax[result] = replace(before, dropout=max(before.dropout, _dropout(*args, **kwargs)))
        elif function is Tensor.__getitem__ and _picks_keys(args[0], args[1], result):
            self._softmax[result] = replace(before, scores=before.scores[..., args[1][-1]], weights=result)

    def _note_scores(self, function: Callable[..., Any], given: list[Tensor], made: list[Tensor]) -> None:
        """Record a result that is scores of queries with keys, or follows from scores or from one weight."""
        given = [x for x in given if not x.is_nested]
        if not given:
            return
        weights = [x for x in given if self._is_weight(x)]
        if len(given) == len(weights) == 1:
            self._weights.update(dict.fromkeys(made, True))
        elif self._joins(function, given, weights) or self._goes_on(function, given, weights, made[0]):
            self._scores.update(dict.fromkeys(made, True))

    def _joins(self, function: Callable[..., Any], given: list[Tensor], weights: list[Tensor]) -> bool:
        """Whether a function combines each of several queries, perhaps learned, with each of several keys."""
        if function is torch.einsum:
            return len(given) > 1 and not weights
        if function in _CONTRACTIONS:
            return len(given) > 1 and not any(given[-1] is x for x in weights)
        if function not in _BROADCASTS or len(given) != 2 or weights:
            return False
        sizes = list(zip(*(reversed(x.shape) for x in given), strict=False))
        return any(a == 1 < b for a, b in sizes) and any(b == 1 < a for a, b in sizes)

    def _goes_on(
        self, function: Callable[..., Any], given: list[Tensor], weights: list[Tensor], made: Tensor
    ) -> bool:
        """Whether scores stay scores: not if they are projected, or smaller than another argument."""
        if function is Tensor.__setitem__:
            return given[-1] in self._scores
        numbers = [x for x in given if x.is_floating_point()]
        largest = max((x.numel() for x in numbers), default=0)
        is_projected = bool(weights) and (function in _CONTRACTIONS or made.dim() < 4)
        return not is_projected and any(x in self._scores for x in numbers if x.numel() == largest)

    def _is_weight(self, x: Tensor) -> bool:
        """Whether a tensor is a parameter, a view of a parameter, or made of one parameter alone."""
        return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or x in self._weights

    def _note_reshape(self, x: Tensor, result: Tensor) -> None:
        if x.dim() == 4 and result.shape == (x.shape[0] * x.shape[1], *x.shape[2:]):
            self._flattened[result] = x.shape[:2]
        if result.dim() != 4:
            return
        batch, heads = result.shape[:2]
        if x.dim() == 5 and x.shape[2] > 1 and x.stride(2) == 0:
            if heads == x.shape[1] * x.shape[2] and result.shape == (batch, heads, *x.shape[3:]):
                self._repeats[result] = x.shape[2], _version(result)
        elif x.dim() == 4 and x.shape[2] == 1 and result.shape[::3] == x.shape[::3] and heads < x.shape[1]:
            self._packed[result] = x.shape[1]

    def repeats(self, values: Tensor) -> int:
        """Return how many times keys or values were repeated for the heads; 1 if changed in place since."""
        times, version = self._repeats.get(values) or (1, None)
        if times == 1 or is_dtensor(values):
            return times
        if version is not None:
            return times if version == _version(values) else 1
        return times if torch.equal(values, unrepeated(values, times).repeat_interleave(times, 1)) else 1

    def undone(self, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return arguments with queries [B, N, T, H], keys and values [B, K, S, H], and what was undone.

        The latter are the fields `packed` and `repeats` of an `AttentionCall`.
        """
        query, key, value = (given[name] for name in ("query", "key", "value"))
        if query.dim() != 4:
            return given, {"packed": None}
        packed = self._packed.get(query)
        if packed is not None and key.shape[1] == (heads := query.shape[1]) < packed:
            plain = {name: unpack(given[name], heads) for name in ("query", "attn_mask")}
            return given | plain, {"packed": heads}
        repeats = self.repeats(key), self.repeats(value)
        plain = {"key": unrepeated(key, repeats[0]), "value": unrepeated(value, repeats[1])}
        return given | plain, {"packed": None, "repeats": repeats}


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results, and in lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [x for x in value if isinstance(x, Tensor)]
    return found


def _version(x: Tensor) -> int | None:
    """Return a number that every in-place change changes; None for inference tensors, which have none."""
    return None if x.is_inference() else x._version


def _picks_keys(x: Tensor, index: Any, result: Tensor) -> bool:
    """Whether an index takes a slice of the last dimension and all of the others."""
    if not isinstance(index, tuple) or not index:
        return False
    is_last = index[0] is Ellipsis or len(index) == x.dim()
    return is_last and isinstance(index[-1], slice) and result.shape[:-1] == x.shape[:-1]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> float:
    """Return the probability of a dropout call; both functions of torch order their arguments like this."""
    return p if training else 0.0


def unpack(x: Tensor | None, heads: int) -> Tensor | None:
    """Reshape [B, K, G, ...] to [B, N, 1, ...]; a tensor that all heads share stays as it is."""
    if x is None or x.dim() != 4 or x.shape[1] != heads:
        return x
    return x.reshape(x.shape[0], -1, 1, x.shape[-1])


def pack(x: Tensor | None, heads: int) -> Tensor | None:
    """Reshape [B, N, 1, ...] to [B, K, G, ...]; a tensor that all heads share stays as it is."""
    if x is None or x.dim() != 4 or x.shape[1] == 1:
        return x
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])


def bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """Bind arguments as `F.scaled_dot_product_attention` does."""
    return dict(locals())


def product_with_values(
    product: Callable[..., Tensor], weights: Tensor, values: Tensor, query: Tensor, *arguments: Any, **_: Any
) -> Tensor:
    """Multiply the model's weights with other values: an attention function for `AttentionCall.run`."""
    value = arguments[1]
    return product(weights, value.reshape(values.shape)).reshape(*query.shape[:3], -1)
