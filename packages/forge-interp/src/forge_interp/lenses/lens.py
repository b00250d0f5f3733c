"""What would the model predict if it stopped here?

The logit lens reads a hidden state x of any site with the model's own final layers: logits = head(norm(x)).
Letters: L sites, B batch, T tokens, D model dim, V vocabulary, k kept tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError
from forge_interp.hooks.capture import capture
from forge_interp.lenses.unembedding import Readout, Unembedding
from forge_interp.model_inputs import output_logits, run_model

Decode = Callable[[str, Tensor], Tensor]
"""Function from (site, hidden [..., D]) to logits [..., V]."""

_COPIES = 6
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
_LOW_PRECISION_TOLERANCE = 5e-2
_REMEDY = (
    "expected the model's own logits: pass the right norm= and head=, head as a function if the model does "
    "more at its end (a soft cap: head=lambda x: cap * torch.tanh(model.lm_head(x) / cap)), or check=False"
)


@dataclass(frozen=True)
class LensResult:
    """Predictions of each site; the leading axes [...] are those of the hidden states, mostly [B, T].

    `target_rank` counts the tokens with a higher logit than the target (0: the target is the top token).
    Where the target is negative, the rank is -1 and the log-probability NaN.
    """

    sites: tuple[str, ...]  # L site keys, along the first axis of every tensor
    top_ids: Tensor  # [L, ..., k] int64, the most likely tokens, the likeliest first
    top_probs: Tensor  # [L, ..., k] their probabilities
    entropy: Tensor  # [L, ...] of the predicted distribution, in nats
    kl: Tensor | None  # [L, ...] KL(final || site) in nats, final being the model's own; None if unknown
    target_rank: Tensor | None  # [L, ...] int64; None without targets
    target_log_prob: Tensor | None  # [L, ...] in nats; None without targets
    logits: dict[str, Tensor] | None  # {site: [..., V]}, only if asked for


@torch.no_grad()
def logit_lens(
    model: nn.Module,
    sites: str | Iterable[str],
    *args: Any,
    norm: Readout | None = None,
    head: Readout | None = None,
    targets: Tensor | None = None,
    top_k: int = 5,
    keep_logits: bool = False,
    check: bool = True,
    max_bytes: int = 1 << 28,
    **kwargs: Any,
) -> LensResult:
    """Run the model once and read every site with the model's own final norm and head.

    At the output of the last block the lens gives the model's own prediction. With `check` every call tests
    this: norm and head, applied to the norm's input, must give the logits that the model returned. The test
    fails for a model that does more at its end (Gemma-2's soft cap, T5's and Granite's scale): then give
    `head` as a function that does it too, see `Unembedding`.

    Memory holds the activations of all sites, [L, B, T, D], and logits of one site at a time, in pieces of
    `max_bytes` (all logits with `keep_logits`).

    Args:
        model: any module that returns logits (a tensor, `.logits`, or a tuple that starts with them).
        sites: sites to read, such as "layers.*:out"; values [..., D] with the leading axes of the logits.
        *args: positional inputs of the model.
        norm: name or function of the final norm; default: see `Unembedding`.
        head: name or function of the unembedding; default: see `Unembedding`.
        targets: [...] integer, the token to rank at each position; negative ones are left out.
        top_k: number of tokens to keep.
        keep_logits: also return all logits, L times [..., V].
        check: compare norm and head with the model's own logits.
        max_bytes: memory limit of the distributions in work.
        **kwargs: named inputs of the model.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    unembedding = Unembedding(model, norm, head)
    end = unembedding.norm_name if unembedding.norm_name is not None else unembedding.head_name
    ends = capture(model, f"{end}:in") if check and end is not None else nullcontext({})
    with capture(model, sites) as acts, ends as given:
        final = output_logits(run_model(model, args, kwargs))
    if given:
        _check_end(list(given.values())[-1], final, unembedding)
    how: dict[str, Any] = {"top_k": top_k, "keep_logits": keep_logits, "max_bytes": max_bytes}
    return read_lens(acts, lambda site, hidden: unembedding(hidden), final=final, targets=targets, **how)


@torch.no_grad()
def read_lens(
    activations: Mapping[str, Tensor],
    decode: Decode,
    *,
    final: Tensor | None = None,
    targets: Tensor | None = None,
    top_k: int = 5,
    keep_logits: bool = False,
    max_bytes: int = 1 << 28,
) -> LensResult:
    """Read activations {site: [..., D]}, which all have the same leading axes, with a lens.

    `decode` returns the logits; for the logit lens, `lambda site, x: unembedding(x)` with an `Unembedding`.
    `final` [..., V] are the model's own logits, for the divergence; other options: see `logit_lens`.
    """
    shapes = {site: tuple(hidden.shape[:-1]) for site, hidden in activations.items()}
    shapes |= {} if final is None else {"the model's logits": tuple(final.shape[:-1])}
    shapes |= {} if targets is None else {"targets": tuple(targets.shape)}
    if not activations or len(set(shapes.values())) != 1:
        raise InterpError(f"leading axes are {shapes}; expected the same for all, and at least one site")
    final = None if final is None else final.flatten(0, -2)
    targets = None if targets is None else targets.flatten()
    pieces, logits = list[dict[str, Tensor]](), dict[str, Tensor]()
    for site, hidden in activations.items():
        flat = hidden.flatten(0, -2)
        size = _rows_at_once(decode(site, flat[:1]), top_k, max_bytes)
        if keep_logits:
            logits[site] = decode(site, hidden)
        for start in range(0, len(flat), size):
            cut = slice(start, start + size)
            part = logits[site].flatten(0, -2)[cut] if keep_logits else decode(site, flat[cut])
            pieces.append(_summarize(part, top_k, *(None if x is None else x[cut] for x in (final, targets))))
    axes = (len(activations), *next(iter(shapes.values())))
    found: dict[str, Any] = dict.fromkeys(("kl", "target_rank", "target_log_prob"))
    found |= {name: torch.cat([piece[name] for piece in pieces]).unflatten(0, axes) for name in pieces[0]}
    return LensResult(tuple(activations), **found, logits=logits if keep_logits else None)


def _check_end(given: Tensor, final: Tensor, unembedding: Unembedding) -> None:
    """Apply norm and head to the last hidden state, and compare with the model's logits."""
    names = f"norm={unembedding.norm_name or '(given)'}, head={unembedding.head_name or '(given)'}"
    try:
        own = unembedding.head(given) if unembedding.norm_name is None else unembedding(given)
    except RuntimeError as error:
        raise InterpError(f"{names} do not fit together ({error}); {_REMEDY}") from error
    if own.shape != final.shape:
        shapes = f"shape {tuple(own.shape)}; expected {tuple(final.shape)}"
        raise InterpError(f"{names} give logits of {shapes}, what the model returns; {_REMEDY}")
    wide = torch.promote_types(torch.float32, final.dtype)
    difference = (own.to(wide) - final.to(wide)).abs().where(own != final, 0.0).max()
    scale = final.to(wide).abs().where(final.isfinite(), 0.0).max()
    coarse = max(own.dtype, final.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    if not bool(difference <= _TOLERANCE.get(coarse, _LOW_PRECISION_TOLERANCE) * scale):
        by = f"by up to {difference.item():.3g}"
        raise InterpError(f"{names} differ from the model's own logits {by}; {_REMEDY}")


def _rows_at_once(logits: Tensor, top_k: int, max_bytes: int) -> int:
    vocabulary = logits.shape[-1]
    if not 1 <= top_k <= vocabulary:
        raise InterpError(f"top_k is {top_k}; expected 1 to {vocabulary}, the size of the vocabulary")
    return max(1, max_bytes // (_COPIES * vocabulary * max(4, logits.element_size())))


def _summarize(logits: Tensor, top_k: int, final: Tensor | None, targets: Tensor | None) -> dict[str, Tensor]:
    """Reduce [rows, V] logits to {name: [rows] or [rows, k]}."""
    logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
    log_probs = logits.log_softmax(-1)
    top = log_probs.topk(top_k, dim=-1)
    found = {
        "top_ids": top.indices,
        "top_probs": top.values.exp(),
        "entropy": torch.special.entr(log_probs.exp()).sum(-1),
    }
    if final is not None:
        own = final.to(device=log_probs.device, dtype=log_probs.dtype).log_softmax(-1)
        found["kl"] = (own.exp() * (own - log_probs)).where(own > -torch.inf, 0.0).sum(-1)
    if targets is not None:
        targets = targets.to(logits.device)
        valid = targets >= 0
        index = targets.clamp_min(0).long()[:, None]
        rank = (logits > logits.gather(1, index)).sum(-1)
        found["target_rank"] = rank.where(valid, -torch.ones_like(rank))
        found["target_log_prob"] = log_probs.gather(1, index)[:, 0].where(valid, torch.nan)
    return found
