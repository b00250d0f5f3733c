"""The section `[model.mtp]`. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from forge_config import Config, Meta


class MTPConfig(Config):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 section 2.2).

    Attributes:
        num_modules: D. Module k predicts the token after the next k, from the hidden state of module k - 1
            (eq. 21 to 23); 0 is none.
        loss_weight: lambda, weight of the mean of their losses (eq. 25).
    """

    recorded_keys = ("loss_weight",)

    num_modules: Annotated[int, Meta(ge=0)] = 0
    loss_weight: Annotated[float, Meta(ge=0)] = 0.3
