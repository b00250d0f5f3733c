"""Greedy writing with a key-value cache beside `transformers`, with the very same weights.

Issue 13, done-when 4: at least 1.5 times as fast. A Llama of random weights in float32 writes on after
prompts of 128 tokens, alone and in a batch of 8; all sides take turns in one process, and must write the
same tokens; `compiled` is ours with `--compile`, after it was compiled. `first` is the median time to the
first token, mostly of reading the prompt, which is the same products of matrices on all sides; `ms a token`
that of each further token. `ratio` compares whole turns with those of transformers.

Run alone on the machine: python benchmarks/generate.py [--threads 2] [--rounds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from forge_model import DecoderConfig, Sampling, config_to_hf, generate, initialize, to_hf
from forge_model.config import GroupedQueryConfig
from forge_model.hf.tensors import tensors_of
from report import table, write
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

PROMPT, NEW = 128, 33
SHAPES = {"dim 256, 4 layers": (256, 4, 8), "dim 768, 8 layers": (768, 8, 12)}


def built(dim: int, layers: int, heads: int) -> tuple[nn.Module, nn.Module]:
    """Our decoder, and that of transformers with its weights."""
    config = DecoderConfig(
        vocab_size=8192,
        max_tokens=PROMPT + NEW,
        dim=dim,
        num_layers=layers,
        attention=GroupedQueryConfig(num_heads=heads, num_kv_heads=heads // 2),
    )
    ours = config.build().eval()
    initialize(ours, 0)
    said = config_to_hf(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said)).float().eval()
    theirs.load_state_dict(to_hf(tensors_of(ours), config), strict=False)
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return ours, theirs


Side = Callable[[int], list[list[int]]]


def sides(ours: nn.Module, theirs: nn.Module, batch: int) -> dict[str, Side]:
    """Both ways to write so many tokens."""
    prompts = torch.randint(8192, (batch, PROMPT), generator=torch.Generator().manual_seed(1))

    def forge(new: int) -> list[list[int]]:
        return generate(ours, prompts.tolist(), new, Sampling(temperature=0))

    def transformers(new: int) -> list[list[int]]:
        mask = torch.ones_like(prompts)
        written = theirs.generate(prompts, attention_mask=mask, max_new_tokens=new, do_sample=False)  # type: ignore[operator]
        return written[:, PROMPT:].tolist()

    def compiled(new: int) -> list[list[int]]:
        return generate(ours, prompts.tolist(), new, Sampling(temperature=0), compiled=True)

    return {"forge": forge, "compiled": compiled, "transformers": transformers}


def timed(both: dict[str, Side], rounds: int) -> dict[str, float]:
    """The figures of one row; the sides take turns."""
    ms: dict[tuple[str, int], list[float]] = {(name, new): [] for new in (1, NEW) for name in both}
    for _ in range(rounds):
        for (name, new), times in ms.items():
            start = time.perf_counter()
            both[name](new)
            times.append(1e3 * (time.perf_counter() - start))
    median = {key: statistics.median(times) for key, times in ms.items()}
    found = {f"{name} first ms": round(median[name, 1], 2) for name in both}
    further = {name: (median[name, NEW] - median[name, 1]) / (NEW - 1) for name in both}
    found |= {f"{name} ms a token": round(each, 2) for name, each in further.items()}
    for name in ("forge", "compiled"):
        found[f"{name} ratio a token"] = round(further["transformers"] / further[name], 2)
        found[f"{name} ratio"] = round(median["transformers", NEW] / median[name, NEW], 2)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for shape, sizes in SHAPES.items():
        models = built(*sizes)
        for batch in (1, 8):
            both = sides(*models, batch)
            written = [side(NEW) for side in both.values()]  # also warms up
            if written[0] != written[1] or written[0] != written[2]:
                raise SystemExit(f"{shape}, batch {batch}: the sides have not written the same")
            rows.append({"model": shape, "batch": batch} | timed(both, options.rounds))
    print(table(rows))
    write("generate", {"prompt_tokens": PROMPT, "new_tokens": NEW, "rows": rows})


if __name__ == "__main__":
    main()
