"""How can one file show every head of every layer on every sequence in a browser?

Letters: B batch, N heads, T queries, S keys.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
from torch import Tensor

from forge_interp.errors import InterpError

_STEPS = 65535
_MOST_WEIGHTS = 1 << 25
_DATA = "__DATA__"


def attention_page(
    patterns: Mapping[str, Tensor],
    tokens: Sequence[Sequence[str]],
    path: str | Path,
    *,
    title: str = "Attention",
) -> Path:
    """Write one HTML file with all weights; it needs neither server nor network.

    Choose row, site and head; point at a token to see what it attends to, or at the map for one weight. The
    address contains the choice (`#row/site/head/query`, from 0), so that a link shows the same view. Weights
    are rounded to steps of 1/65535: the error is at most 7.7e-6. The file takes 2.7 bytes a weight.

    `patterns` are {site: [B, N, T, S]} weights in [0, 1], as captured at `attn.pattern`; `tokens` are B rows
    of S words, one per key, of which the last T are the queries. Returns the path. InterpError where a
    pattern does not fit the tokens, is no weight, or there are more than 33 million weights.
    """
    sites = [{"name": site, **_encoded(site, value, tokens)} for site, value in patterns.items()]
    if not sites:
        raise InterpError("there is no pattern; expected {site: [B, N, T, S]}: capture '*:attn.pattern'")
    total = sum(value.numel() for value in patterns.values())
    if total > _MOST_WEIGHTS:
        raise InterpError(
            f"there are {total} weights; expected at most {_MOST_WEIGHTS}, which a browser can hold: give "
            "fewer rows or sites"
        )
    data = json.dumps({"title": title, "tokens": [list(row) for row in tokens], "sites": sites})
    page = (files("forge_interp.pictures") / "attention.html").read_text(encoding="utf-8")
    path = Path(path)
    path.write_text(page.replace(_DATA, data.replace("<", "\\u003c")), encoding="utf-8")
    return path


def _encoded(site: str, pattern: Tensor, tokens: Sequence[Sequence[str]]) -> dict[str, object]:
    """Return the shape, and the weights as little-endian integers of 16 bits."""
    shape = list(pattern.shape)
    lengths = {len(row) for row in tokens}
    if len(shape) != 4 or shape[0] != len(tokens) or lengths != {shape[-1]} or shape[2] > shape[3]:
        raise InterpError(
            f"site {site!r} has shape {shape}, and there are {len(tokens)} rows of {sorted(lengths)} tokens; "
            "expected [B, N, T, S], and B rows of S tokens"
        )
    values = pattern.detach().double().cpu().numpy()
    if not (np.isfinite(values).all() and values.min() >= -1e-6 and values.max() <= 1 + 1e-6):
        raise InterpError(f"site {site!r} has values out of [0, 1]; expected weights: capture attn.pattern")
    steps = np.rint(values.clip(0, 1) * _STEPS).astype("<u2")
    return {"shape": shape, "weights": base64.b64encode(steps.tobytes()).decode()}
