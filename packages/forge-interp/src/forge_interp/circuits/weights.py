"""Which maps do the weights of a head make, and which heads do they connect?

Weights are found by probing: each attention is given unit vectors, so that fused, transposed or shared
weights need no names. Letters: N heads, D model dim, H head dim; x is a row, so that a head adds x W_V W_O,
and query and key positions have the score (x W_Q) (y W_K)^T (times a scale).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.canonical import canonical_sites
from forge_interp.errors import InterpError
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import Edit, edit

Kind = Literal["q", "k", "v"]


@dataclass(frozen=True)
class HeadWeights:
    """Weights of the heads of a block, float64, without biases; keys and values for each query head."""

    q: Tensor | None  # [N, D, H] W_Q at position 0, where rotary embeddings turn nothing; None: no linear map
    k: Tensor | None  # [N, D, H], of models with norms of queries and keys None, too
    v: Tensor  # [N, D, H']
    o: Tensor  # [N, H', D]

    def copying(self) -> Tensor:
        """Return [N], the eigenvalue sum of W_V W_O over the sum of sizes: 1 copies, -1 suppresses."""
        found = torch.linalg.eigvals(self.o @ self.v)  # of W_O W_V, the same but for zeros
        return found.sum(-1).real / found.abs().sum(-1)


@torch.no_grad()
def head_weights(model: nn.Module, tokens: Tensor) -> dict[str, HeadWeights]:
    """Return the weights of all heads by canonical name of the block (`blocks.0`), of a model of ids.

    Runs two passes over batches of D and N H' sequences of one token; `tokens` [B, T] are any input.
    InterpError where values or output are no linear map of the input of attention, or another module holds
    the output projection. Queries and keys are None where they are no linear map (QK norms) or are not seen
    (the model does not call `F.scaled_dot_product_attention`: set "sdpa", if it can).
    """
    sites = canonical_sites(model, tokens).items()
    modules = {
        name.removesuffix(".attn.z"): site.rpartition(":")[0]
        for name, site in sites
        if name.endswith("attn.z")
    }
    names = [f"{module}:{part}" for module in modules.values() for part in ("in", "attn.z")]
    with capture(model, names) as at:
        model(tokens[:1, :1])
    found: dict[str, dict[str, Tensor | None]] = {block: {} for block in modules}
    for end, parts in (("in", ("attn.q", "attn.k", "attn.v")), ("attn.z", ("out",))):
        sizes = {module: at[f"{module}:{end}"].numel() for module in modules.values()}
        many = tokens[:1, :1].expand(max(sizes.values()) + 2, 1)
        edits = {f"{module}:{end}": _units(size, len(many)) for module, size in sizes.items()}
        for wanted in (parts, parts[-1:]):
            try:
                with (
                    edit(model, edits),
                    capture(model, [f"{m}:{part}" for m in sizes for part in wanted]) as acts,
                ):
                    model(many)
                break
            except InterpError:  # a softmax of the model's own shows neither queries nor keys
                if wanted == parts[-1:]:
                    raise
        for block, module in modules.items():
            for part in wanted:
                found[block][part] = _linear(acts[f"{module}:{part}"], sizes[module])
    return {
        block: _by_head(block, at[f"{modules[block]}:attn.z"].shape[1], maps) for block, maps in found.items()
    }


def composition_scores(weights: dict[str, HeadWeights], kind: Kind) -> tuple[np.ndarray, list[str]]:
    """Measure how much of each head's output (row) enters queries, keys or values of later heads (columns).

    |A B| / (|A| |B|), Frobenius norms, with A = W_V W_O of the first head, and of the second B = W_Q W_K^T
    ("q"), W_K W_Q^T ("k") or W_V W_O ("v"); NaN for heads of the same or an earlier block. Random maps have
    about 1 / sqrt(D). Exact by QR of the factors, in O(D H^2). Returns [heads, heads], and names such as
    `blocks.0.head.1`.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", on composition.
    """
    if kind not in ("q", "k", "v"):
        raise InterpError(f"kind is {kind!r}; expected 'q', 'k' or 'v'")
    if kind != "v" and any(of.q is None or of.k is None for of in weights.values()):
        raise InterpError(f"kind is {kind!r}, and queries or keys are no linear map (a norm); expected 'v'")
    names = [f"{block}.head.{n}" for block, of in weights.items() for n in range(len(of.v))]
    scores, row = np.full((len(names), len(names)), np.nan), 0
    for number, first in enumerate(weights.values()):
        end = row + len(first.v)
        left, column = _triangle(first.v), end
        size = torch.linalg.matrix_norm(left @ _triangle(first.o.mT).mT)
        for second in list(weights.values())[number + 1 :]:
            factors = {"q": (second.q, second.k), "k": (second.k, second.q), "v": (second.v, second.o.mT)}
            start, back = factors[kind]
            assert start is not None and back is not None
            right = _triangle(back).mT
            whole = torch.linalg.matrix_norm(_triangle(start) @ right)
            made = left[:, None] @ (first.o[:, None] @ start[None]) @ right[None]
            part = torch.linalg.matrix_norm(made) / (size[:, None] * whole[None])
            scores[row:end, column : column + len(second.v)] = part.cpu().numpy()
            column += len(second.v)
        row = end
    return scores, names


def _triangle(factor: Tensor) -> Tensor:
    """Return R of [N, D, H] = Q R; R has the same products with itself."""
    return torch.linalg.qr(factor, mode="r").R


def _probe(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _units(size: int, count: int) -> Edit:
    """Make an edit that replaces the value of one token by zeros, unit vectors, and a random vector."""
    rows = torch.zeros(count, size)
    rows[1 : 1 + size].fill_diagonal_(1.0)
    rows[-1] = _probe(size)
    return lambda old: rows.to(old).view(count, *old.shape[1:])


def _linear(made: Tensor, size: int) -> Tensor | None:
    """Return the images [size, ...] of unit vectors; None where the random vector shows no linear map."""
    close = 1e-3 if made.dtype in (torch.float32, torch.float64) else 5e-2
    made = made.double()
    matrix, wanted = made[1 : 1 + size] - made[:1], made[-1] - made[0]
    error = (torch.einsum("d,d...->...", _probe(size).to(made), matrix) - wanted).abs()
    is_linear = made.numel() > 0 and bool((error <= close * wanted.abs().amax()).all())
    return matrix if is_linear else None


def _by_head(block: str, heads: int, maps: dict[str, Tensor | None]) -> HeadWeights:
    q, k, v = (
        None if x is None else x[:, :, 0].movedim(1, 0).repeat_interleave(heads // x.shape[1], 0)
        for x in (maps.get(f"attn.{name}") for name in "qkv")
    )
    o = maps["out"]
    if v is None or o is None:
        raise InterpError(
            f"values or output of attention in {block} are no linear map of what it is given; expected one, "
            "by F.scaled_dot_product_attention: call model.set_attn_implementation('sdpa')"
        )
    if o.shape[0] == o.shape[-1] and torch.equal(o[:, 0], torch.eye(len(o)).to(o)):
        raise InterpError(
            f"attention in {block} gives attn.z as it is, so that W_O lies elsewhere (as in BERT); expected "
            "attention with its output projection in one module"
        )
    return HeadWeights(q, k, v, o[:, 0].unflatten(0, (heads, -1)))
