"""Patching sweeps beside TransformerLens and nnsight, in one process, in turns: CPU time.

    python benchmarks/interp_patching.py [--rounds 5] [--quick] [--no-record]

One thread, a GPT-2 with random weights. `stream`: the input of each block at each position; `heads`: the
output of each head. A sweep is all of it: the clean run, what a library keeps of it, and each patch.
TransformerLens runs its `patching.get_act_patch_*` on its bridge around the same modules, nnsight a trace for
each place. Numbers are compared first. A ratio is taken within each round, over whole passes of forge; the
median is shown. Not in `interp_research.py`: the SAELens measured there needs transformer-lens < 4.

Issue 31, points 9 and done-when 5.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import numpy as np
import torch
from forge_interp import activation_patching
from interp_research import in_turns
from interp_tools import Shape, build
from report import table, write

SHAPE = Shape(layers=6, width=256, heads=8, vocab=4096, batch=4, context=24, batches=1)
QUICK = Shape(layers=2, width=32, heads=2, vocab=64, batch=2, context=6, batches=1)
AT_ONCE = 16
SITES = {
    "stream": ("transformer.h.*:in", "positions", "get_act_patch_resid_pre"),
    "heads": ("transformer.h.*.attn:attn.z", "heads", "get_act_patch_attn_head_out_all_pos"),
}


def difference(logits: torch.Tensor) -> torch.Tensor:
    """The metric of all."""
    return (logits[:, -1, 3] - logits[:, -1, 7]).mean()


def forge(model: torch.nn.Module, tokens: list[torch.Tensor], part: str, at_once: int | None) -> np.ndarray:
    """`activation_patching`."""
    sites, where, _ = SITES[part]
    options = {"where": where, "at_once": at_once, "progress": False}
    return activation_patching(
        model, *tokens, sites, lambda output: difference(output.logits), **options
    ).values


def transformer_lens(bridge: Any, tokens: list[torch.Tensor], part: str) -> np.ndarray:
    """The loop of TransformerLens; only what it patches is kept of the clean run."""
    from transformer_lens import patching

    clean, corrupted = tokens
    hook = "hook_resid_pre" if part == "stream" else "attn.hook_z"
    names = [f"blocks.{i}.{hook}" for i in range(bridge.cfg.n_layers)]
    _, cache = bridge.run_with_cache(clean, names_filter=names)
    return getattr(patching, SITES[part][2])(bridge, corrupted, cache, difference).numpy()


def nnsight(traced: Any, shape: Shape, tokens: list[torch.Tensor], part: str) -> np.ndarray:
    """A trace for each place."""
    import nnsight as library

    clean, corrupted = tokens
    width = shape.width // shape.heads
    places = shape.context if part == "stream" else shape.heads
    found = np.empty((shape.layers, places))
    with traced.trace(clean):
        if part == "stream":
            kept = library.save([layer.input for layer in traced.transformer.h])
        else:
            kept = library.save([layer.attn.c_proj.input for layer in traced.transformer.h])
    for layer in range(shape.layers):
        for place in range(places):
            at = slice(place * width, (place + 1) * width)
            with traced.trace(corrupted):
                if part == "stream":
                    traced.transformer.h[layer].input[:, place] = kept[layer][:, place]
                else:
                    traced.transformer.h[layer].attn.c_proj.input[:, :, at] = kept[layer][:, :, at]
                value = library.save(difference(traced.lm_head.output))
            found[layer, place] = value
    return found


def tools(shape: Shape, part: str) -> dict[str, Callable[[], np.ndarray]]:
    """What sweeps one part, each on a model of its own with the same weights."""
    from nnsight import NNsight
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    random = torch.Generator().manual_seed(0)
    clean = torch.randint(1, shape.vocab, (shape.batch, shape.context), generator=random)
    corrupted = clean.clone()
    corrupted[:, 1 :: shape.context // 3] = 1 + torch.arange(shape.batch)[:, None]
    tokens, model, bridged = [clean, corrupted], build(shape), build(shape)
    bridge = build_bridge_from_module(bridged, "GPT2LMHeadModel", hf_config=bridged.config)
    return {
        "forge": partial(forge, model, tokens, part, None),
        "forge, at_once=1": partial(forge, model, tokens, part, 1),
        f"forge, at_once={AT_ONCE}": partial(forge, model, tokens, part, AT_ONCE),
        "transformer_lens": partial(transformer_lens, bridge, tokens, part),
        "nnsight": partial(nnsight, NNsight(build(shape)), shape, tokens, part),
    }


@torch.no_grad()
def main() -> None:
    """Compare, measure, print, record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape, rows, measured = QUICK if options.quick else SHAPE, [], {}
    for part in SITES:
        cases = tools(shape, part)
        wanted = cases["forge"]()
        scale = np.abs(wanted).max()
        for name, sweep in cases.items():
            error = float(np.abs(sweep() - wanted).max() / scale)
            assert error < 1e-4, f"{part} by {name}: off by {error}"
        found = measured[part] = in_turns(cases, options.rounds)
        for name, seconds in found.items():
            each = [a / b for a, b in zip(seconds, found["forge"], strict=True)]
            numbers = {"cpu_s": round(min(seconds), 3), "of_whole_passes": round(statistics.median(each), 3)}
            rows.append({"sweep": part, "places": wanted.size, "tool": name} | numbers)
    print(table(rows))
    if options.quick or options.no_record:
        return
    versions = {name: metadata.version(name) for name in ("transformer-lens", "nnsight", "transformers")}
    record = {"rounds": options.rounds, "threads": 1, "shape": asdict(shape), "peers": versions}
    write("interp_patching", record | {"figures": rows, "measurements": measured})


if __name__ == "__main__":
    main()
