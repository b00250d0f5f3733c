"""The best learning rate of a narrow model is that of a wide one with `[model.scaling]`, not without."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.ffn.config import SwiGLUConfig
from forge_model.init import initialize
from forge_model.loss.config import LossConfig
from forge_model.scaling import ScalingConfig
from forge_trainer.optim import AdamWConfig, trainable

STEPS, BATCH, TOKENS, LAST = 80, 16, 32, 20
RATES = [2.0**-n for n in range(4, 12)]
TEXT = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))


def loss_of(dim, lr, scaling):
    """Mean training loss of the last steps."""
    config = DecoderConfig(
        vocab_size=128, max_tokens=TOKENS, dim=dim, num_layers=2, ffn=SwiGLUConfig(dim=2 * dim),
        attention=GroupedQueryConfig(num_heads=dim // 16), init_std=0.02, scaling=scaling,
    )  # fmt: skip
    model = config.build()
    initialize(model, 0)
    optimizer, loss = AdamWConfig(lr=lr, weight_decay=0.0).build(trainable([model])), LossConfig().build()
    data = torch.tensor([min(ord(letter), 127) for letter in TEXT])
    random, losses = np.random.default_rng(0), []
    for step in range(STEPS):
        starts = random.integers(len(data) - TOKENS - 1, size=BATCH)
        rows = torch.stack([data[start : start + TOKENS + 1] for start in starts])
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        optimizer.zero_grad()
        terms = model(rows[:, :-1], labels=rows[:, 1:], loss_fn=loss)
        mean = terms.total / rows[:, 1:].numel()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean.item())
    return sum(losses[-LAST:]) / LAST


def best_rate(dim, scaling):
    """The lowest point of a parabola through the best rate and its neighbours."""
    losses = [value if math.isfinite(value := loss_of(dim, lr, scaling)) else 99.0 for lr in RATES]
    at = int(np.argmin(losses))
    assert 0 < at < len(RATES) - 1, f"the best rate of {dim} is at the edge: {losses}"
    a, b, _ = np.polyfit([-1, 0, 1], losses[at - 1 : at + 2], 2)
    return RATES[at] * 2 ** (b / (2 * a))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_best_learning_rate_stays_from_width_64_to_512_with_scaling_and_moves_without():
    scaling = ScalingConfig(base_dim=64)
    moved = best_rate(64, scaling) / best_rate(512, scaling)
    assert 0.5 < moved < 2, moved
    plain = best_rate(64, None) / best_rate(512, None)
    assert plain > 2, plain
