"""Next-token cross entropy that never allocates all logits. n tokens, D model dim, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forge_model.compiled_calls import call_compiled
from forge_model.error import ModelError

CHUNK_COMPILATIONS = 64
"""How often the work on a chunk is compiled in a process: for formats, vocabularies and token counts."""


class Sum(NamedTuple):
    """A sum and the count that divides it for the mean: [] float32 (float64 if the model is), on the device.

    Over several micro-batches or ranks both are summed first: the mean is sum of values / sum of counts.
    """

    value: Tensor
    count: Tensor


class LossTerms(NamedTuple):
    """The sums that a model returns when it gets labels.

    Attributes:
        total: [] the value to differentiate, a sum over the valid targets: cross entropy, with label
            smoothing if configured, plus weighted z-loss.
        sums: values to report, by name, without the weights of terms. Always has `loss` (cross entropy in
            nats, never smoothed) and `z_loss` (the squared log-normalizers), both counted by valid targets,
            or by the sum of their weights. No gradient flows through them.
        rows: [B] each, the sums of `loss` by sequence, for labels [B, T]; None from losses without them.
        hits: bool in the shape of the labels, whether the target is the likeliest entry; false where there is
            no target. None from losses without hits, and whenever gradients are recorded, which saves time.
    """

    total: Tensor
    sums: dict[str, Sum]
    rows: Sum | None = None
    hits: Tensor | None = None


class VocabularyShard(Protocol):
    """The part of the vocabulary of this rank's head; other ranks have the rest.

    Attributes:
        first: the first id of this part.
    """

    first: int

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the parts, in place."""
        ...

    def max_(self, tensor: Tensor) -> Tensor:
        """Maximum over the parts, in place."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Gather the logits of all parts, [..., V/parts] -> [..., V]."""
        ...


class Loss:
    """The loss of hidden states under a head.

    Args:
        chunk_tokens: number of tokens whose logits are computed at a time; 0 computes all at once.
        z_loss_weight: weight of the squared log-normalizer.
        label_smoothing: fraction of the target that is spread evenly over the vocabulary.
    """

    def __init__(
        self, chunk_tokens: int = 1024, z_loss_weight: float = 0.0, label_smoothing: float = 0.0
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.z_loss_weight = z_loss_weight
        self.label_smoothing = label_smoothing
        self._treat: Treat = _treat

    def compile_chunks(self, backend: str = "inductor") -> None:
        """Compile the work on the logits of a chunk into few kernels: a GPU then moves a fifth of the memory.

        Args:
            backend: backend of `torch.compile`. Vocabularies split over ranks stay uncompiled, since the
                ranks communicate in between.
        """
        compiled = torch.compile(partial(_treat, fused=True), backend=backend, fullgraph=True)
        self._treat = partial(call_compiled, "chunks of the loss were", compiled, CHUNK_COMPILATIONS)

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: VocabularyShard | None = None,
        weights: Tensor | None = None,
        softcap: float | None = None,
    ) -> LossTerms:
        """Return the loss of each position against its label.

        Args:
            hidden: [..., D].
            weight: [V, D], or the rows of this part of the vocabulary.
            labels: [...] int64, already shifted; negative is ignored. No valid label gives zero, with a
                graph.
            vocabulary: the part of the vocabulary in `weight`; None means all. Collective over the parts: the
                loss is that of the full vocabulary, the gradient of `hidden` only this part's share.
            weights: [...] how much each position counts, not negative; None counts each position once.
            softcap: logits become softcap * tanh(logit / softcap) first; None leaves them as they are.

        Raises:
            ModelError: `weights` has another shape than `labels`.
        """
        if weights is not None and weights.shape != labels.shape:
            raise ModelError(
                f"given weights of shape {tuple(weights.shape)} for labels of shape {tuple(labels.shape)}; "
                "give one weight a label"
            )
        options = _Options(
            self.chunk_tokens or max(1, labels.numel()),
            self.z_loss_weight,
            self.label_smoothing,
            torch.is_grad_enabled(),
            vocabulary,
            softcap,
            self._treat if vocabulary is None else _treat,
        )
        weights = None if weights is None else weights.flatten()
        total, cross_entropy, z_loss, count, places, hits = _LinearCrossEntropy.apply(
            hidden.flatten(0, -2), weight, labels.flatten(), weights, options
        )
        counts = (labels >= 0) if weights is None else (labels >= 0) * weights.view_as(labels)
        rows = Sum(places.view_as(labels).sum(-1), counts.sum(-1).to(places.dtype))
        sums = {"loss": Sum(cross_entropy, count), "z_loss": Sum(z_loss, count)}
        return LossTerms(total, sums, rows, None if hits is None else hits.view_as(labels))


Treat = Callable[..., tuple[Tensor, Tensor, Tensor | float, Tensor | None]]
"""See `_treat`."""


class _Options(NamedTuple):
    chunk: int
    z_weight: float
    smoothing: float
    training: bool
    vocabulary: VocabularyShard | None
    softcap: float | None
    treat: Treat
    differentiated: bool = False


class _Chunk(NamedTuple):
    """Some tokens whose logits were replaced by their exponentials.

    Attributes:
        exponentials: [n, V] exponentials of the logits minus their maximum.
        normalizer: [n, 1] sums of the exponentials over the full vocabulary.
        top: [n] the largest logits.
        lse: [n] the logarithms of the sums of exponentials of the logits.
        picked: [n] the logits of the targets.
        even: [n] the means of the logits; zeros without label smoothing.
        target: [n, 1] index of the target in this part of the vocabulary.
        here: [n, 1] 1 if the target is in this part, else 0.
        entries: number of entries of the full vocabulary.
    """

    exponentials: Tensor
    normalizer: Tensor
    top: Tensor
    lse: Tensor
    picked: Tensor
    even: Tensor | float
    target: Tensor
    here: Tensor | float
    entries: Tensor | int


def _capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return soft-capped logits [n, V] and their derivative by the logits, which is a second buffer."""
    if softcap is None:
        return logits, None
    ratio = logits.div_(softcap).tanh_()
    slope = 1 - ratio.square()
    return ratio.mul_(softcap), slope


def _normalize(logits: Tensor, target: Tensor, options: _Options) -> _Chunk:
    """Compute log-sum-exp in place, without a second buffer [n, V]. Collective over the vocabulary parts."""
    vocabulary, entries = options.vocabulary, logits.shape[1]
    target = target[:, None]
    if vocabulary is None:
        picked = logits.gather(1, target)[:, 0]
        even = logits.mean(1) if options.smoothing else 0.0
        top = logits.amax(1, keepdim=True)
        normalizer = logits.sub_(top).exp_().sum(1, keepdim=True)
        lse = (normalizer.log() + top)[:, 0]
        return _Chunk(logits, normalizer, top[:, 0], lse, picked, even, target, 1.0, entries)
    target = target - vocabulary.first
    here = ((target >= 0) & (target < entries)).to(logits.dtype)
    target = target.clamp(0, entries - 1)
    picked = (logits.gather(1, target) * here)[:, 0]
    parts = [logits.sum(1), torch.full_like(picked, entries)] if options.smoothing else []
    top = vocabulary.max_(logits.amax(1, keepdim=True))
    parts = [logits.sub_(top).exp_().sum(1), picked, *parts]
    normalizer, picked, *rest = vocabulary.sum_(torch.stack(parts)).unbind()
    even = rest[0] / rest[1] if rest else 0.0
    lse = normalizer.log() + top[:, 0]
    number = rest[1][:, None] if rest else entries
    return _Chunk(logits, normalizer[:, None], top[:, 0], lse, picked, even, target, here, number)


def _treat(
    logits: Tensor,
    wide: Tensor | None,
    target: Tensor,
    counts: Tensor,
    options: _Options,
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor | float, Tensor | None]:
    """Replace the logits [n, V] by the gradient of the loss by them, if that is needed.

    Args:
        logits: logits as the model computes them; also the working memory if `wide` is None.
        wide: working memory [n, V]; None if the dtype of `logits` is wide enough or a compiler needs none.
        target: [n] ids; any valid id for tokens that do not count.
        counts: [n] how much each token counts.
        options: options of the loss.
        fused: whether a compiler fuses many operations into one pass.

    Returns:
        `lse`, `picked` and `even` of `_Chunk`, and, except in training, [n] whether `picked` is the largest.
    """
    values = logits
    if wide is not None:
        values = wide.copy_(logits)
    elif fused:
        values = logits.to(counts.dtype, copy=True)
    values, slope = _capped(values, options.softcap)
    made = _normalize(values, target, options)
    if options.differentiated:
        gradient = _differentiate(made, counts, options, fused)
        gradient = gradient if slope is None else gradient.mul_(slope)
        if gradient is not logits:
            logits.copy_(gradient)
    return made.lse, made.picked, made.even, None if options.training else made.picked == made.top


def _differentiate(made: _Chunk, counts: Tensor, options: _Options, fused: bool) -> Tensor:
    """Return the gradient [n, V] of the loss by the logits, in the memory of the exponentials.

    The gradient of lse - picked + z lse^2 is softmax (1 + 2 z lse) - onehot; smoothing spreads a part of the
    onehot over the vocabulary.
    """
    scale = ((1 + 2 * options.z_weight * made.lse) * counts)[:, None] / made.normalizer
    gradient = made.exponentials.mul_(scale)
    if options.smoothing:
        gradient.sub_(counts[:, None] * options.smoothing / made.entries)
        counts = counts * (1 - options.smoothing)
    if fused:  # the same, in the pass of the rest
        entries = torch.arange(gradient.shape[1], device=gradient.device)
        return gradient - torch.where(entries == made.target, counts[:, None], 0)
    return gradient.scatter_add_(1, made.target, -counts[:, None] * made.here)


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and loss in one, a chunk of tokens at a time; computes gradients while the logits are in memory.

    The forward pass does the three matmuls that a head costs anyway and allocates one chunk of logits.

    Source of the idea: Hsu et al. 2024, arXiv:2410.10989 section 3.2.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, options: _Options
    ) -> Any:
        wide = torch.promote_types(weight.dtype, torch.float32)
        need_hidden, need_weight = (needed and options.training for needed in ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        sums = torch.zeros(3, dtype=wide, device=hidden.device)
        smoothed = torch.zeros((), dtype=wide, device=hidden.device)
        places = torch.empty(len(labels), dtype=wide, device=hidden.device)
        hits = None if options.training else torch.empty_like(labels, dtype=torch.bool)
        # chunks share two buffers: for the logits, later their gradient; and for the computation on them
        buffer = hidden.new_empty(min(options.chunk, len(labels)), len(weight))
        wider = None
        if hidden.dtype != wide and options.treat is _treat:
            wider = torch.empty_like(buffer, dtype=wide)
        narrow = hidden.new_empty(len(buffer), hidden.shape[1], dtype=wide) if wider is not None else hidden
        options = options._replace(differentiated=need_hidden or need_weight)
        for start in range(0, len(labels), options.chunk):
            rows = slice(start, start + options.chunk)
            h, target = hidden[rows], labels[rows]
            counts = (target >= 0).to(wide)
            if weights is not None:
                counts = counts * weights[rows]
            logits = torch.mm(h, weight.t(), out=buffer[: len(target)])
            room = None if wider is None else wider[: len(target)]
            lse, picked, even, hit = options.treat(logits, room, target.clamp(min=0), counts, options)
            places[rows] = (lse - picked) * counts
            if hits is not None and hit is not None:
                hits[rows] = hit & (target >= 0)
            sums += torch.stack([places[rows].sum(), (lse.square() * counts).sum(), counts.sum()])
            if options.smoothing:
                smoothed += ((picked - even) * counts).sum() * options.smoothing
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, logits, h, room, narrow[: len(target)])
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        cross_entropy, z_loss, count = sums.unbind()
        ctx.mark_non_differentiable(cross_entropy, z_loss, count, places, *([] if hits is None else [hits]))
        total = cross_entropy + smoothed + options.z_weight * z_loss
        return total, cross_entropy, z_loss, count, places, hits

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, *_: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = (d_hidden * d_total).to(d_hidden.dtype)
        if d_weight is not None:
            # in place, unless another backward pass may come, as in pipelines without bubbles
            again = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
            d_weight = (d_weight * d_total if again else d_weight.mul_(d_total)).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor, wide_a: Tensor | None, wide_b: Tensor) -> None:
    """Add a^T @ b to `total`, accumulated in the dtype of `total`; that of a and b would round each chunk.

    Args:
        total: [V, D].
        a: [n, V].
        b: [n, D].
        wide_a: memory for `a` in the dtype of `total`, or None.
        wide_b: the same for `b`.
    """
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif total.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, a.t(), b, total.dtype, out=total)
    elif wide_a is None:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))
    else:
        total.addmm_(wide_a.copy_(a).t(), wide_b.copy_(b))
