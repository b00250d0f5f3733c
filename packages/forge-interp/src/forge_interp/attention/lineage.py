"""What had a model done to tensors before it called attention, and where does it compute that itself?

With fewer key and value heads than query heads, models repeat keys and values for all heads, or, for one new
token, pack the query heads that share keys as so many queries of one head. Which of these was done cannot be
told from the shapes of the call; it is told from the operations before it. A product whose left factor comes
from a softmax [B, N, T, S] over keys is attention, too.

Letters: B sequences, N query heads, K key and value heads, G = N / K, T queries, S keys, H head dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from forge_interp.attention.placement import is_dtensor, unrepeated
from forge_interp.errors import InterpError

_RESHAPES = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("reshape", "flatten", "view", "unflatten")
    if hasattr(owner, name)
}
_REPEATS = {torch.repeat_interleave, Tensor.repeat_interleave}
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_DROPOUT = {F.dropout, torch.dropout}
_KEEPS = (
    {Tensor.to, Tensor.type_as, Tensor.type, Tensor.half, Tensor.float, Tensor.contiguous}
    | _RESHAPES
    | _DROPOUT
)
_CATENATIONS = {torch.cat, torch.concat, torch.concatenate}
_ELEMENTWISE = (
    _KEEPS
    | {
        getattr(owner, name)
        for owner in (torch, Tensor)
        for name in ("mul", "div", "add", "sub", "clone")
        if hasattr(owner, name)
    }
    | {Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__}
)


@dataclass(frozen=True)
class Softmax:
    """Where weights of attention come from: of which scores [B, N, T, S]; dropout of weights since.

    `weights` [.., T, S] are given where the softmax went over more keys than have values, such as sinks.
    """

    scores: Tensor
    dropout: float = 0.0
    weights: Tensor | None = None


class Lineage:
    """What was done to tensors that are still alive, on one thread."""

    def __init__(self) -> None:
        self._repeats = WeakTensorKeyDictionary()
        self._packed = WeakTensorKeyDictionary()
        self._softmax = WeakTensorKeyDictionary()
        self._flattened = WeakTensorKeyDictionary()
        self._products = WeakTensorKeyDictionary()  # of two tensors of which none is a weight
        self._outputs = WeakTensorKeyDictionary()  # of attention that was given to taps

    def weights(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Softmax | None:
        """Where the left factor of a product comes from, if that is a softmax over keys.

        Not if the right factor is a product, too: as in linear attention, that softmax is over features.
        Query heads that share keys may be rows of one product: [B, K, G T, S]. Raises InterpError: the right
        factor is what attention gave, so that this was not all of attention.
        """
        if function not in _PRODUCTS or len(args) != 2 or not isinstance(args[0], Tensor):
            return None
        found, values = self._softmax.get(args[0]), args[1]
        if isinstance(values, Tensor) and values in self._outputs:
            raise in_pieces("the product of a softmax and values is mixed again over its queries")
        if found is None or not isinstance(values, Tensor) or values.dim() not in (3, 4):
            return None
        batch, heads, queries, keys = found.scores.shape
        if values in self._products or values.shape[-2] != keys:
            return None
        kv_heads = values.shape[1] if values.dim() == 4 else heads
        if args[0].dim() == 4 and args[0].shape == (batch, kv_heads, heads // kv_heads * queries, keys):
            return found if values.shape[:2] == (batch, kv_heads) else None
        fits = args[0].shape[-2:] == (queries, keys)
        return found if fits and values.numel() == batch * heads * keys * values.shape[-1] else None

    def note_output(self, function: Callable[..., Any], output: Tensor) -> None:
        """This is what a call of attention gave that was shown to taps; products alone can be pieces."""
        if function in _PRODUCTS:
            self._outputs[output] = True

    def note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Look at an operation: are these weights, keys repeated for the heads, or query heads packed?"""
        self._note_product(function, args, kwargs, result)
        if function in _SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            scores = args[0] if args else kwargs["input"]
            if dim in (-1, scores.dim() - 1) and not result.is_nested:
                heads = scores.shape[:2] if scores.dim() == 4 else self._flattened.get(scores)
                if heads is not None:
                    self._softmax[result] = Softmax(scores.reshape(*heads, *scores.shape[-2:]))
        elif function in _KEEPS and args and isinstance(args[0], Tensor) and args[0] in self._softmax:
            before = self._softmax[args[0]]
            dropout = _dropout(*args, **kwargs) if function in _DROPOUT else 0.0
            self._softmax[result] = replace(before, dropout=max(before.dropout, dropout))
        elif (
            function is Tensor.__getitem__
            and args[0] in self._softmax
            and _picks_keys(args[0], args[1], result)
        ):
            before = self._softmax[args[0]]
            self._softmax[result] = replace(before, scores=before.scores[..., args[1][-1]], weights=result)
        if function in _RESHAPES:
            self._note_reshape(args[0] if args else kwargs["input"], result)
        elif function in _REPEATS and args and isinstance(result, Tensor) and result.dim() == 4:
            x, times = args[0], kwargs.get("repeats", args[1] if len(args) > 1 else None)
            if isinstance(times, int) and x.dim() == 4 and result.shape[1] == x.shape[1] * times > x.shape[1]:
                self._repeats[result] = times, _version(result)

    def _note_product(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Follow products and outputs of attention; InterpError: an output is joined with what is none."""
        if function in _PRODUCTS or function is torch.einsum:
            factors = args if function in _PRODUCTS else args[1:]
            if len(factors) == 2 and not any(map(_is_weight, factors)):
                self._products[result] = True
        elif function in _ELEMENTWISE and args and isinstance(args[0], Tensor):
            for known in (self._products, self._outputs):
                if args[0] in known:
                    known[result] = True
        elif function in _CATENATIONS and args and isinstance(result, Tensor):
            parts, *rest = args
            dim = kwargs.get("dim", rest[0] if rest else 0)
            is_output = [isinstance(part, Tensor) and part in self._outputs for part in parts]
            is_by_query = isinstance(dim, int) and result.dim() // 2 <= dim % result.dim() < result.dim() - 1
            if any(is_output) and not all(is_output) and is_by_query:
                raise in_pieces(f"{sum(is_output)} of {len(is_output)} tensors that make its output are seen")

    def _note_reshape(self, x: Tensor, result: Tensor) -> None:
        if not isinstance(result, Tensor):
            return
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
        """How many times keys or values were repeated for the heads, and not changed in place since."""
        times, version = self._repeats.get(values) or (1, None)
        if times == 1 or is_dtensor(values):
            return times
        if version is not None:
            return times if version == _version(values) else 1
        return times if torch.equal(values, unrepeated(values, times).repeat_interleave(times, 1)) else 1

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        """What was done before a call, as the fields `packed` and `repeats` of its `AttentionCall`."""
        if query.dim() != 4:
            return {}
        packed = self._packed.get(query)
        is_packed = packed is not None and key.shape[1] == query.shape[1] < packed
        repeats = (1, 1) if is_packed else (self.repeats(key), self.repeats(value))
        return {"packed": query.shape[1] if is_packed else None, "repeats": repeats}


def in_pieces(what: str) -> InterpError:
    """Of attention of which only a part is softmax(scores) V as it can be seen."""
    return InterpError(
        f"attention is computed in pieces: {what}; expected softmax(scores) V: for a Hugging Face model that "
        "has it choose full attention (BigBird: attention_type='original_full'), or capture the module's :out"
    )


def _is_weight(x: Any) -> bool:
    """Whether a factor is a parameter, or a view of one."""
    return isinstance(x, nn.Parameter) or (isinstance(x, Tensor) and isinstance(x._base, nn.Parameter))


def _version(x: Tensor) -> int | None:
    """Another number after each change in place; None of tensors of inference mode, which have none."""
    return None if x.is_inference() else x._version


def _picks_keys(x: Tensor, index: Any, result: Tensor) -> bool:
    """Whether an index takes some of the last dimension and all of the others."""
    if not isinstance(index, tuple) or not index:
        return False
    is_last = index[0] is Ellipsis or len(index) == x.dim()
    return is_last and isinstance(index[-1], slice) and result.shape[:-1] == x.shape[:-1]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> float:
    """The probability of a call of dropout: both functions of torch have these arguments in this order."""
    return p if training else 0.0


def unpack(x: Tensor | None, heads: int) -> Tensor | None:
    """[B, K, G, ...] -> [B, N, 1, ...]; what is shared by all heads stays as it is."""
    if x is None or x.dim() != 4 or x.shape[1] != heads:
        return x
    return x.reshape(x.shape[0], -1, 1, x.shape[-1])


def pack(x: Tensor | None, heads: int) -> Tensor | None:
    """[B, N, 1, ...] -> [B, K, G, ...]; what is shared by all heads stays as it is."""
    if x is None or x.dim() != 4 or x.shape[1] == 1:
        return x
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])


def canonical(given: Mapping[str, Any], packed: int | None, repeats: tuple[int, int]) -> dict[str, Any]:
    """The arguments of a call with queries [B, N, T, H], and keys and values [B, K, S, H]."""
    changed = dict(given)
    if packed is not None:
        changed |= {"query": unpack(given["query"], packed), "attn_mask": unpack(given["attn_mask"], packed)}
    for name, times in zip(("key", "value"), repeats, strict=True):
        if times > 1:
            changed[name] = unrepeated(given[name], times)
    return changed


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
    """The signature of `F.scaled_dot_product_attention`."""
    return dict(locals())


def product_with_values(
    product: Callable[..., Tensor], weights: Tensor, values: Tensor, query: Tensor, *arguments: Any, **_: Any
) -> Tensor:
    """The model's product of its weights with other values: for attention in `AttentionCall.run`."""
    value = arguments[1]
    return product(weights, value.reshape(values.shape)).reshape(*query.shape[:3], -1)
