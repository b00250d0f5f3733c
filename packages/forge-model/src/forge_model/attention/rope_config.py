"""Frequencies at which pairs of head dimensions rotate, and their scalings. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from forge_config import Config, Meta, Registry

Positive = Annotated[float, Meta(gt=0)]
THETA = 10000.0


class RopeConfig(Config):
    """Rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

    Attributes:
        theta: base of the geometric series of wavelengths.
    """

    rotates: ClassVar[bool] = True

    theta: Annotated[float, Meta(gt=1)] = THETA

    def axes(self, dim: int) -> Sequence[int] | None:
        """Return the axis of positions that rotates each of dim/2 pairs; None if positions have one axis."""
        return None

    def frequencies(self, dim: int) -> list[float]:
        """Return the radians per position for each of dim/2 pairs."""
        return [self.theta ** (-2 * i / dim) for i in range(dim // 2)]

    def long_frequencies(self, dim: int) -> tuple[int, list[float]] | None:
        """Return a length and the frequencies of longer sequences; None if all have the same frequencies."""
        return None

    def attention_factor(self) -> float:
        """Return the factor on the tables of cosines and sines."""
        return 1.0


ropes = Registry("rope", RopeConfig, default="plain")
ropes.register("plain")(RopeConfig)


@ropes.register("none")
class NoRopeConfig(RopeConfig):
    """No positions: queries and keys are not rotated (NoPE, arXiv:2305.19466)."""

    rotates: ClassVar[bool] = False

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.theta != THETA:
            yield (f'rope.theta = {self.theta} with type = "none", which rotates nothing; leave it out')


@ropes.register("mrope")
class MultiAxisRopeConfig(RopeConfig):
    """Positions on several axes, such as frame, row and column (M-RoPE, Qwen2-VL, arXiv:2409.12191 figure 3).

    Text has the same position on all axes and is rotated as by `plain`.

    Attributes:
        sections: number of pairs that rotate by each axis, starting with the first axis.
    """

    sections: tuple[Annotated[int, Meta(ge=1)], ...]

    def axes(self, dim: int) -> Sequence[int]:
        """See `RopeConfig.axes`.

        Raises:
            ValueError: the sections do not add up to the pairs of a head.
        """
        if sum(self.sections) != dim // 2:
            raise ValueError(
                f"rope.sections = {list(self.sections)} add up to {sum(self.sections)}; a head that is "
                f"rotated in {dim} dims has {dim // 2} pairs"
            )
        return [axis for axis, pairs in enumerate(self.sections) for _ in range(pairs)]


@ropes.register("linear")
class LinearRopeConfig(RopeConfig):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595).

    Attributes:
        factor: divisor of positions.
    """

    factor: Annotated[float, Meta(ge=1)]

    def frequencies(self, dim: int) -> list[float]:
        """See `RopeConfig.frequencies`."""
        return [f / self.factor for f in super().frequencies(dim)]


@ropes.register("llama3")
class Llama3RopeConfig(RopeConfig):
    """A scaling that stretches long wavelengths, keeps short ones, and blends between (arXiv:2407.21783).

    Attributes:
        factor: how much the long wavelengths are stretched.
        low_freq_factor: wavelengths above original_max_tokens / low_freq_factor are long.
        high_freq_factor: wavelengths below original_max_tokens / high_freq_factor are short.
        original_max_tokens: context of the model before it was stretched.
    """

    factor: Annotated[float, Meta(ge=1)] = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_tokens: Annotated[int, Meta(ge=1)] = 8192

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.high_freq_factor <= self.low_freq_factor:
            yield (
                f"high_freq_factor = {self.high_freq_factor} must be above "
                f"low_freq_factor = {self.low_freq_factor}"
            )

    def frequencies(self, dim: int) -> list[float]:
        """See `RopeConfig.frequencies`."""
        return [self._scaled(f) for f in super().frequencies(dim)]

    def _scaled(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_tokens / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_tokens / self.low_freq_factor:
            return frequency / self.factor
        turns = self.original_max_tokens / wavelength
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@ropes.register("yarn")
class YarnRopeConfig(RopeConfig):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolation by wavelength and a warmer softmax.

    Attributes:
        factor: how much longer the context becomes.
        beta_fast: dimensions that rotate more often than this in the original context are kept.
        beta_slow: dimensions that rotate less often than this are interpolated fully.
        original_max_tokens: context of the model before it was stretched.
        truncate: blend from and to whole dimensions, as published; GPT-OSS does not.
        scale: factor on cosines and sines; absent means 0.1 ln(factor) + 1 (eq. 22).
    """

    factor: Annotated[float, Meta(ge=1)]
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    original_max_tokens: Annotated[int, Meta(ge=1)] = 4096
    truncate: bool = True
    scale: Positive | None = None

    def frequencies(self, dim: int) -> list[float]:
        """See `RopeConfig.frequencies`."""
        plain = super().frequencies(dim)
        first, last = self._dim_of(self.beta_fast, dim), self._dim_of(self.beta_slow, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, dim - 1)
        scaled = []
        for i, frequency in enumerate(plain):
            interpolate = min(max((i - low) / ((high - low) or 1e-3), 0.0), 1.0)
            scaled.append(frequency / self.factor * interpolate + frequency * (1 - interpolate))
        return scaled

    def _dim_of(self, turns: float, dim: int) -> float:
        """Return the (fractional) index of the pair that rotates `turns` times in the original context."""
        return dim * math.log(self.original_max_tokens / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def attention_factor(self) -> float:
        """See `RopeConfig.attention_factor`; arXiv:2309.00071 eq. 22."""
        return 0.1 * math.log(self.factor) + 1.0 if self.scale is None else self.scale


@ropes.register("longrope")
class LongRopeConfig(RopeConfig):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a factor for each pair, other factors in long sequences.

    A sequence longer than `original_max_tokens` uses `long_factors` from its first token on. Packed documents
    count as sequences of their own if `data.mask_documents` restarts their positions.

    Attributes:
        short_factors: factor on the wavelength of each pair.
        long_factors: the same in sequences of more than `original_max_tokens`.
        factor: how much longer the context becomes.
        original_max_tokens: context of the model before it was stretched.
        scale: factor on cosines and sines; absent means sqrt(1 + ln(factor) / ln(original_max_tokens)).
    """

    short_factors: tuple[Positive, ...]
    long_factors: tuple[Positive, ...]
    factor: Annotated[float, Meta(ge=1)]
    original_max_tokens: Annotated[int, Meta(ge=2)] = 4096
    scale: Positive | None = None

    def axes(self, dim: int) -> None:
        """See `RopeConfig.axes`.

        Raises:
            ValueError: there are not as many factors as pairs of a head.
        """
        for name in ("short_factors", "long_factors"):
            if (given := len(getattr(self, name))) != dim // 2:
                raise ValueError(
                    f"rope.{name} has {given} numbers; a head that is rotated in {dim} dims has "
                    f"{dim // 2} pairs"
                )

    def frequencies(self, dim: int) -> list[float]:
        """See `RopeConfig.frequencies`."""
        return [f / by for f, by in zip(super().frequencies(dim), self.short_factors, strict=True)]

    def long_frequencies(self, dim: int) -> tuple[int, list[float]]:
        """See `RopeConfig.long_frequencies`."""
        plain = super().frequencies(dim)
        return self.original_max_tokens, [f / by for f, by in zip(plain, self.long_factors, strict=True)]

    def attention_factor(self) -> float:
        """See `RopeConfig.attention_factor`."""
        if self.scale is not None:
            return self.scale
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_tokens))
