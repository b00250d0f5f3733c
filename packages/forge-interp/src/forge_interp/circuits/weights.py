"""Which maps do the weights of a head make, and which heads are connected by them?

Weights are found by asking: each attention is given unit vectors, so that fused, transposed or shared weights
need no names. Letters: N heads, D model dim, H head dim; x is a row, so that a head adds x W_V W_O, and query
and key positions have the score (x W_Q) (y W_K)^T (times a scale).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.canonical import canonical_sites
from forge_interp.errors import InterpError
from forge_interp.hooks.capture import Activations, capture
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
        """[N], sum of the eigenvalues of W_V W_O beside the sum of their sizes: 1 copies, -1 suppresses."""
        found = torch.linalg.eigvals(self.o @ self.v)  # of W_O W_V, the same but for zeros
        return found.sum(-1).real / found.abs().sum(-1)


@torch.no_grad()
def head_weights(model: nn.Module, tokens: Tensor) -> dict[str, HeadWeights]:
    """The weights of all heads, by canonical name of the block (`blocks.0`), of a model of ids.

    Two passes over batches of one token, as many as D and N H'. InterpError where values or output are no
    linear map of what attention is given, or the output projection lies in another module;
    where queries or keys are none (QK norms), or are not seen (the
    model takes the softmax itself: set "sdpa", if it can), these are None.

    Args:
        model: any module; queries and keys are found where it calls `F.scaled_dot_product_attention`.
        tokens: [B, T] ids, some input of it.
    """
    sites = {
        name.removesuffix(".attn.z"): site
        for name, site in canonical_sites(model, tokens).items()
        if name.endswith("attn.z")
    }
    modules = {block: site.rpartition(":")[0] for block, site in sites.items()}
    names = [f"{module}:{part}" for module in modules.values() for part in ("in", "attn.z", "out")]
    with capture(model, names) as acts:
        model(tokens[:1, :1])
    given = {block: acts[f"{module}:in"] for block, module in modules.items()}
    found = {block: acts[f"{module}:attn.z"] for block, module in modules.items()}
    maps: dict[str, dict[str, Tensor | None]] = {block: {} for block in modules}
    for values, end, parts in ((given, "in", ("attn.q", "attn.k", "attn.v")), (found, "attn.z", ("out",))):
        size = max(value.numel() for value in values.values())
        edits = {f"{modules[block]}:{end}": _units(value, size) for block, value in values.items()}
        try:
            acts = _read(
                model, tokens, size + 2, edits, [f"{m}:{part}" for m in modules.values() for part in parts]
            )
        except InterpError:  # a softmax of the model's own shows neither queries nor keys
            parts = parts[-1:]
            acts = _read(model, tokens, size + 2, edits, [f"{m}:{parts[0]}" for m in modules.values()])
        for block, value in values.items():
            for part in parts:
                maps[block][part] = _linear(acts[f"{modules[block]}:{part}"], value.numel())
    return {block: _by_head(found[block], parts, block) for block, parts in maps.items()}


def composition_scores(weights: dict[str, HeadWeights], kind: Kind) -> tuple[np.ndarray, list[str]]:
    """How much the output of each head (row) goes into queries, keys or values of each later head (column).

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
            start, back = {
                "q": (second.q, second.k),
                "k": (second.k, second.q),
                "v": (second.v, second.o.mT),
            }[kind]
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
    """R of [N, D, H] = Q R, which has the same products with itself."""
    return torch.linalg.qr(factor, mode="r").R


def _read(
    model: nn.Module, tokens: Tensor, size: int, edits: Mapping[str, Edit], sites: Sequence[str]
) -> Activations:
    with edit(model, edits), capture(model, sites) as acts:
        model(tokens[:1, :1].expand(size, 1))
    return acts


def _units(value: Tensor, size: int) -> Edit:
    """An edit that puts zeros, unit vectors and at last a random vector in place of what one token has."""
    random = torch.randn(value.numel(), generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(size + 2, value.numel())
    rows[1 : 1 + value.numel()].fill_diagonal_(1.0)
    rows[-1] = random
    return lambda old: rows.to(old).view(size + 2, *old.shape[1:])


def _linear(made: Tensor, size: int) -> Tensor | None:
    """[size, ...] images of unit vectors; None where that of the random vector is not their sum."""
    close = 1e-3 if made.dtype in (torch.float32, torch.float64) else 5e-2
    made = made.double()
    matrix, wanted = made[1 : 1 + size] - made[:1], made[-1] - made[0]
    random = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(made)
    error = (torch.einsum("d,d...->...", random, matrix) - wanted).abs()
    is_linear = made.numel() > 0 and bool((error <= close * wanted.abs().amax()).all())
    return matrix if is_linear else None


def _by_head(z: Tensor, maps: dict[str, Tensor | None], block: str) -> HeadWeights:
    v, o = maps["attn.v"], maps["out"]
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
    found = [
        None if x is None else x[:, :, 0].movedim(1, 0) for x in (maps.get("attn.q"), maps.get("attn.k"), v)
    ]
    q, k, v = (
        None if x is None else x.repeat_interleave(z.shape[1] // len(x), 0) for x in found
    )  # [K, D, H]
    assert v is not None
    return HeadWeights(q, k, v, o[:, 0].unflatten(0, (z.shape[1], -1)))
