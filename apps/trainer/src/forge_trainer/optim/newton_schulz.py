"""Computes orthogonal factors of matrices by Newton-Schulz iterations. n matrices, R rows, C columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""The coefficients of a x + b x^3 + c x^5, which drives singular values to about 1 (Jordan 2024)."""


def orthogonalize(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Make all singular values about 1, within 0.7 to 1.2 after five steps.

    Args:
        matrices: [n, R, C], in the dtype of the computation; a matrix of zeros stays zero.
        steps: number of iterations.
        eps: lower bound of the norm of a matrix in its normalization.

    Returns:
        [n, R, C] in the same dtype.

    Source: Jordan 2024; normalization and order of operations as in torch.optim.Muon.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize_all(matrices: Sequence[Tensor], steps: int = 5, eps: float = 1e-7) -> list[Tensor]:
    """Apply `orthogonalize` to matrices of any shapes; matrices of one shape (or its transpose) are batched.

    Args:
        matrices: [R, C] each.
        steps: number of iterations.
        eps: see `orthogonalize`.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index, (rows, columns) in enumerate(matrix.shape for matrix in matrices):
        alike.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    found: dict[int, Tensor] = {}
    for members in alike.values():
        tall = [matrices[i].shape[0] > matrices[i].shape[1] for i in members]
        batch = [matrices[i].mT if t else matrices[i] for i, t in zip(members, tall, strict=True)]
        made = orthogonalize(torch.stack(batch), steps, eps)
        found |= {i: one.mT if t else one for i, t, one in zip(members, tall, made.unbind(), strict=True)}
    return [found[index] for index in range(len(matrices))]


def cost(rows: int, columns: int) -> int:
    """Return the multiplications of an iteration: s^2 (2 l + s) for a short side s and a long side l."""
    short, long = min(rows, columns), max(rows, columns)
    return short * short * (2 * long + short)
