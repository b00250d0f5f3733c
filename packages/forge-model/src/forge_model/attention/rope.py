"""Rotation of queries and keys by position. B batch, T tokens, N heads, H head dim."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from forge_model.attention.rope_config import RopeConfig
from forge_model.error import ModelError

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, each [T, H/2] or [B, 1, T, H/2], float32 or, in a float64 model, float64."""


def rope_table(
    config: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype = torch.float32
) -> Rope:
    """Return cosines and sines for every position.

    Args:
        config: configuration of the frequencies.
        head_dim: H, even.
        positions: [T], [B, T] or [B, axes, T] integer; several axes for a configuration that has them.
        dtype: dtype of the computation and the result.

    Returns:
        Two tensors, [T, H/2] or [B, 1, T, H/2].
    """
    made = _frequencies(config, head_dim, dtype, positions.device)
    return _table(
        _of_length(*made, positions), config.attention_factor(), _of_pairs(config, head_dim, positions)
    )


def _of_pairs(config: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Return the positions by which pairs of numbers rotate, [T, 1], [B, T, 1] or [B, T, H/2].

    Raises:
        ModelError: `positions` has another number of axes than the configuration.
    """
    if positions.ndim < 3:
        return positions[..., None]
    axes = config.axes(head_dim)
    if axes is None or positions.shape[1] != 1 + max(axes):
        has = "one axis" if axes is None else f"{1 + max(axes)} axes"
        raise ModelError(
            f"positions {list(positions.shape)} of {positions.shape[1]} axes; the rotation has {has}"
        )
    # one slice for each run of neighbours: no index tensor, which would be a copy to the device
    parts = [positions[:, axis, :, None].expand(-1, -1, len(list(run))) for axis, run in groupby(axes)]
    return torch.cat(parts, -1)


Frequencies = tuple[Tensor, tuple[int, Tensor] | None]
"""Frequencies of short sequences [H/2]; the length above which others hold, with these; or None."""


def _frequencies(config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> Frequencies:
    short = torch.tensor(config.frequencies(head_dim), dtype=dtype, device=device)
    if (others := config.long_frequencies(head_dim)) is None:
        return short, None
    return short, (others[0], torch.tensor(others[1], dtype=dtype, device=device))


def _of_length(short: Tensor, long: tuple[int, Tensor] | None, positions: Tensor) -> Tensor:
    """Return the frequencies of each token by the length of its sequence, [H/2] or [..., T, H/2]."""
    if long is None:
        return short
    return torch.where(sequence_lengths(positions)[..., None] > long[0], long[1], short)


def sequence_lengths(positions: Tensor) -> Tensor:
    """Return how many tokens the sequence of each token has, without a copy to the host.

    Args:
        positions: [..., T] integer; a sequence continues as long as positions rise by one. The cached tokens
            before its first position belong to it.

    Returns:
        [..., T] integer.
    """
    index = torch.arange(positions.shape[-1], device=positions.device)
    goes_on = torch.zeros_like(positions, dtype=torch.bool)
    goes_on[..., :-1] = positions[..., 1:] == positions[..., :-1] + 1
    ends = torch.where(goes_on, len(index) - 1, index)
    last = ends.flip(-1).cummin(-1).values.flip(-1)
    return positions.gather(-1, last) + 1


def row_positions(lengths: Tensor, tokens: int) -> Tensor:
    """Return the positions [B, T] of rows padded on the right; padding does not count in the length of a row.

    Args:
        lengths: [B] integer, number of tokens of each row without padding.
        tokens: T.
    """
    index = torch.arange(tokens, device=lengths.device)
    return index.where(index < lengths[:, None], 0)


def _table(frequencies: Tensor, factor: float, positions: Tensor) -> Rope:
    """Return the table of positions [..., T, 1 or H/2] for frequencies [H/2] or [..., T, H/2]."""
    angles = positions.to(frequencies.dtype) * frequencies
    if angles.ndim == 3:
        angles = angles[:, None]
    return angles.cos() * factor, angles.sin() * factor


class RopeTables:
    """The rotary tables of a model; tables of positions 0, 1, 2, ... are kept for the next forward pass.

    All frequencies are kept, too; otherwise every forward pass would wait for copying them to a GPU.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[Any, ...], Rope]] = []
        self._frequencies: dict[tuple[Any, ...], Frequencies] = {}

    def __call__(
        self, config: RopeConfig, head_dim: int, tokens: Tensor, positions: Tensor | None, dtype: torch.dtype
    ) -> Rope:
        """Return the table for `tokens` [B, T] at `positions`, as in `rope_table`; None counts from 0."""
        frequencies = self._frequencies_of(config, head_dim, dtype, tokens.device)
        if positions is not None:
            turning = _of_length(*frequencies, positions)
            return _table(turning, config.attention_factor(), _of_pairs(config, head_dim, positions))
        length, device = tokens.shape[1], tokens.device
        shared = (length, device, dtype)
        key = (*shared, head_dim, config)
        for kept, table in self._kept:
            if kept == key:
                return table
        # Made under inference mode, a kept table could not be used in training later.
        with torch.inference_mode(False):
            counted, (short, long) = torch.arange(length, device=device)[:, None], frequencies
            turning = short if long is None or length <= long[0] else long[1]
            table = _table(turning, config.attention_factor(), counted)
        if type(table[0]) is Tensor:  # no fake tensor of a dry run
            self._kept = [one for one in self._kept if one[0][:3] == shared] + [(key, table)]
        return table

    def _frequencies_of(
        self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Frequencies:
        key = (config, head_dim, dtype, device)
        if key in self._frequencies:
            return self._frequencies[key]
        with torch.inference_mode(False):
            made = _frequencies(config, head_dim, dtype, device)
        if type(made[0]) is Tensor:
            self._frequencies[key] = made
        return made


def pairs_to_halves(x: Tensor) -> Tensor:
    """Reorder [..., H] from adjacent pairs (0, 1), (2, 3), ... to first members, then second members."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head by position.

    Args:
        x: [B, N, T, H] queries or keys, H even, any float dtype.
        cos: [T, H/2] or [B, 1, T, H/2] from `rope_table`.
        sin: like `cos`.

    Returns:
        [B, N, T, H] in the dtype of `x`; computed in float32, or float64 if `x` is.

    Source: Su et al. 2021, arXiv:2104.09864 eq. 34 (half-split layout, as in Llama).
    """
    wide = torch.promote_types(x.dtype, cos.dtype)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.to(wide), sin.to(wide)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
