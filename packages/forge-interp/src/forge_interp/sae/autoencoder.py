"""What does a sparse autoencoder, or a transcoder, compute?

features = activation(input @ W_enc + bias), output = features @ W_dec + b_dec. Parameters and forward pass
are those of SAELens 6. Letters: D input dim, D' output dim, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.errors import InterpError, check_kind
from forge_interp.sae.activations import ACTIVATIONS

NORMALIZATIONS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")
_EPS = 1e-5


@dataclass(frozen=True)
class SAEConfig:
    """Shape and options of an autoencoder; InterpError lists all values that contradict each other."""

    d_in: int
    d_sae: int  # F
    activation: str = "relu"  # or topk, batch_topk, jumprelu, gated
    d_out: int | None = None  # D' of a transcoder, which maps one site to another; None: it reconstructs
    skip: bool = False  # whether a transcoder adds a linear map of its input
    k: float | None = None  # active features of a row (topk), on average (batch_topk)
    apply_b_dec_to_input: bool = True  # whether the input is taken relative to b_dec; not by a transcoder
    normalize_activations: str = "none"  # how the input is normalised; the output is brought back
    rescale_acts_by_decoder_norm: bool = False  # topk, batch_topk: choose as if decoder rows had norm 1
    reshape_activations: str = "none"  # "hook_z": inputs [..., N, H] are taken as [..., N H]
    metadata: dict[str, Any] = field(default_factory=dict)  # metadata of the file, unchanged

    def __post_init__(self) -> None:
        """Check all fields."""
        is_topk, is_transcoder = self.activation in ("topk", "batch_topk"), self.d_out is not None
        is_whole = self.activation != "topk" or self.k == int(self.k or 0)
        k_fits = is_whole and 1 <= (self.k or 0) <= self.d_sae if is_topk else self.k is None
        rescale, takes_b_dec = "rescale_acts_by_decoder_norm", "apply_b_dec_to_input"
        k_expected = f"1 to d_sae={self.d_sae}, of topk a whole number" if is_topk else "None: no topk"
        rules = [
            (min(self.d_in, self.d_sae, self.d_out or 1) >= 1, "d_sae", "sizes of at least 1"),
            (self.activation in ACTIVATIONS, "activation", f"one of {', '.join(ACTIVATIONS)}"),
            (k_fits, "k", k_expected),
            (is_transcoder or not self.skip, "skip", "False but for a transcoder: give d_out"),
            (not (is_transcoder and self.apply_b_dec_to_input), takes_b_dec, "False: d_out is given"),
            (self.normalize_activations in NORMALIZATIONS, "normalize_activations", f"of {NORMALIZATIONS}"),
            (is_topk or not self.rescale_acts_by_decoder_norm, rescale, "False: no topk"),
            (self.reshape_activations in ("none", "hook_z"), "reshape_activations", "none or hook_z"),
        ]
        if wrong := [f"{name} is {getattr(self, name)!r}; expected {x}" for ok, name, x in rules if not ok]:
            raise InterpError("; ".join(wrong))


class SparseAutoencoder(nn.Module):
    """Encodes [..., D] into features [..., F] and decodes them; `sae(x)` does both.

    Training mode changes nothing; `forge_interp.sae.training` trains it. It computes in the dtype of its
    weights. Parameters W_enc [D, F], W_dec [F, D'], b_dec [D'], and by `activation` b_enc, threshold, b_gate,
    b_mag, r_mag [F]; W_skip [D', D].
    """

    W_enc: nn.Parameter
    W_dec: nn.Parameter
    b_dec: nn.Parameter
    b_enc: nn.Parameter
    threshold: nn.Parameter
    b_gate: nn.Parameter
    b_mag: nn.Parameter
    r_mag: nn.Parameter
    W_skip: nn.Parameter
    topk_threshold: Tensor  # batch_topk, float64: from where on a feature of a single row is active
    threshold_rate = 0.01  # how fast that follows the training batches

    def __init__(
        self, config: SAEConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> None:
        """Draw random weights: decoder rows of norm 0.1, the encoder its transpose (not in transcoders)."""
        super().__init__()
        check_kind("config", config, SAEConfig, "an SAEConfig")
        self.config = config
        self.activation = ACTIVATIONS[config.activation]
        d_out, generator = config.d_out or config.d_in, torch.Generator().manual_seed(seed)
        decoder = nn.init.kaiming_uniform_(torch.empty(config.d_sae, d_out), generator=generator)
        decoder *= 0.1 / decoder.norm(dim=-1, keepdim=True)
        encoder = decoder.T.contiguous()
        if config.d_out is not None:
            encoder = nn.init.kaiming_uniform_(torch.empty(config.d_in, config.d_sae), generator=generator)
        values = {"W_enc": encoder, "W_dec": decoder, "b_dec": torch.zeros(d_out)}
        values |= {name: torch.full((config.d_sae,), x) for name, x in self.activation.initial.items()}
        values |= {"W_skip": torch.zeros(d_out, config.d_in)} if config.skip else {}
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.to(device, dtype)))
        if config.activation == "batch_topk":
            self.register_buffer("topk_threshold", torch.zeros((), dtype=torch.float64, device=device))

    def encode(self, x: Tensor) -> Tensor:
        """Encode [..., D] (or [..., N, H] for hook_z) into features [..., F]."""
        return self.activation.infer(self, self.pre(x))

    def decode(self, features: Tensor, x: Tensor | None = None) -> Tensor:
        """Decode features [..., F] into [..., D'].

        InterpError without the input `x` where it was normalised by its own size, and for `skip` and hook_z.
        """
        config = self.config
        made = self.unscaled(features) @ self.W_dec + self.b_dec
        is_rescaled = config.d_out is None and config.normalize_activations in NORMALIZATIONS[2:]
        if not (config.skip or is_rescaled or config.reshape_activations == "hook_z"):
            return made
        if x is None:
            raise InterpError("decode() of this autoencoder needs its input; expected decode(features, x)")
        flat = self._flat(x)
        if config.skip:
            return made + flat @ self.W_skip.T
        if is_rescaled:
            scale, shift = self._normalization(flat, for_output=True)
            made = made / scale + shift
        return made.unflatten(-1, x.shape[-2:]) if flat.shape != x.shape else made

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct [..., D] as [..., D'], in the dtype of the weights."""
        return self.decode(self.encode(x), x)

    def pre(self, x: Tensor) -> Tensor:
        """Return pre-activations [..., F]; InterpError where the input has another width."""
        flat = self._flat(x)
        scale, shift = self._normalization(flat)
        given = (flat - shift) * scale if isinstance(scale, Tensor) else flat
        if self.config.apply_b_dec_to_input:
            given = given - self.b_dec
        return self.activation.pre(self, given @ self.W_enc)

    def unscaled(self, features: Tensor) -> Tensor:
        """Return the factors of decoder rows: features, over the row norms if the config rescales them."""
        rescales = self.config.rescale_acts_by_decoder_norm
        return features * (1 / self.W_dec.norm(dim=-1)) if rescales else features

    @torch.no_grad()
    def fold_scale(self, scale: float) -> None:
        """Change weights trained on x * scale to take raw inputs x, in place.

        SAELens calls this folding `expected_average_only_in`, with scale = sqrt(D) / mean |x|.
        """
        self.W_enc.mul_(scale)
        self.W_dec.div_(scale)
        self.b_dec.div_(scale)
        if self.config.activation == "batch_topk" and self.config.rescale_acts_by_decoder_norm:
            self.topk_threshold /= scale

    def _flat(self, x: Tensor) -> Tensor:
        if self.config.reshape_activations == "hook_z" and x.ndim > 1 and x.shape[-1] != self.config.d_in:
            x = x.flatten(-2)
        if not x.ndim or x.shape[-1] != self.config.d_in:
            raise InterpError(
                f"the input has shape {list(x.shape)}; expected d_in={self.config.d_in} numbers in the last "
                "dimension: is this the site that the autoencoder was made for?"
            )
        return x.to(self.W_enc.dtype)

    def _normalization(self, x: Tensor, for_output: bool = False) -> tuple[Any, Any]:
        """Return scale and shift: the input is (x - shift) * scale, the output is made / scale + shift."""
        how = self.config.normalize_activations
        if how == "constant_norm_rescale":
            return self.config.d_in**0.5 / x.norm(dim=-1, keepdim=True), 0.0
        if how == "layer_norm":
            mean = x.mean(-1, keepdim=True)
            spread = (x - mean).std(-1, keepdim=True)
            return 1 / (spread + (0.0 if for_output else _EPS)), mean
        return 1.0, 0.0
