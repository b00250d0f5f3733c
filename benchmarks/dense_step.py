"""A training step of the dense decoder beside bare matmuls of the same shapes: tokens/s, fraction of FLOP/s.

Issue 2, done-when 6: at least 0.75 on CPU at dim 512 and above. The step is forward, chunked loss,
backward and fused AdamW in float32. The matmuls are those of that step and nothing else: every linear
layer and the head, forward and both gradients, and the products of queries, keys and values over all
pairs of tokens, into ready buffers. Both are timed in turns in one process. A fraction is that of the
FLOP/s at the median times: `fraction` counts all pairs of tokens for the model too, `fraction_causal`,
the stricter, only those a causal model needs.

Run: python benchmarks/dense_step.py [--threads 2] [--rounds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from report import table, write


@dataclass(frozen=True)
class Case:
    """One model and batch."""

    name: str
    dim: int
    num_layers: int
    num_heads: int
    kv_heads: int
    vocab_size: int
    batch: int
    tokens: int

    def config(self) -> DecoderConfig:
        """The model."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_tokens=self.tokens,
            dim=self.dim,
            num_layers=self.num_layers,
            attention=GroupedQueryConfig(num_heads=self.num_heads, num_kv_heads=self.kv_heads),
        )


CASES = [
    Case("dim 512, T 512", 512, 4, 8, 8, 8192, 8, 512),
    Case("dim 512, T 2048", 512, 4, 8, 8, 8192, 2, 2048),
    Case("dim 1024, GQA 4", 1024, 4, 16, 4, 8192, 4, 512),
]


def training_step(case: Case) -> Callable[[], None]:
    """Forward, loss, backward, AdamW."""
    config = case.config()
    model = config.build()
    initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss = LossConfig().build()
    data = torch.randint(case.vocab_size, (case.batch, case.tokens + 1))
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()

    def step() -> None:
        terms = model(tokens, labels=labels, loss_fn=loss)
        (terms.total / labels.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmuls(case: Case) -> Callable[[], None]:
    """The matmuls of that step, on ready buffers."""
    config = case.config()
    model = config.build()
    rows = case.batch * case.tokens
    products = []
    for weight in [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")]:
        out, into = weight.shape
        x, w, y = torch.randn(rows, into), torch.randn(out, into), torch.randn(rows, out)
        products += [(x, w.t(), torch.empty_like(y)), (y, w, torch.empty_like(x))]
        products += [(y.t(), x, torch.empty_like(w))]
    heads, width = case.batch * case.num_heads, case.dim // case.num_heads
    score, qkv = torch.randn(heads, case.tokens, case.tokens), torch.randn(heads, case.tokens, width)
    other_score, other_qkv = torch.empty_like(score), torch.empty_like(qkv)
    to_score = (qkv, qkv.transpose(1, 2), other_score)
    from_score, from_flipped = (score, qkv, other_qkv), (score.transpose(1, 2), qkv, other_qkv)
    # scores, output; gradients of scores, queries, keys, values
    attention = [to_score, from_score, to_score, from_score, from_flipped, from_flipped] * case.num_layers

    def step() -> None:
        for a, b, out in products:
            torch.mm(a, b, out=out)
        for a, b, out in attention:
            torch.bmm(a, b, out=out)

    return step


def matmul_flops(case: Case) -> float:
    """FLOPs of those matmuls: the model's own count over all pairs of tokens."""
    return case.config().flops_per_token(case.tokens, causal=False) * case.batch * case.tokens


def measure(case: Case, rounds: int) -> dict[str, float | str]:
    """Median seconds of both, taken in turns, and the range of `fraction_causal` over single rounds."""
    torch.manual_seed(0)
    sides = [training_step(case), matmuls(case)]
    times: list[list[float]] = [[], []]
    for side in sides:
        side()
    for _ in range(rounds):
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            taken.append(time.perf_counter() - start)
    step_s, matmul_s = (statistics.median(taken) for taken in times)
    every = matmul_flops(case)
    causal = case.config().flops_per_token(case.tokens, causal=True) * case.batch * case.tokens
    rate = every / matmul_s
    single = [causal / every * bare / step for step, bare in zip(*times, strict=True)]
    return {
        "case": case.name,
        "step_s": step_s,
        "matmul_s": matmul_s,
        "tokens_per_s": case.batch * case.tokens / step_s,
        "model_gflop_per_s": causal / step_s / 1e9,
        "matmul_gflop_per_s": rate / 1e9,
        "fraction": every / step_s / rate,
        "fraction_causal": causal / step_s / rate,
        "of_single_rounds": f"{min(single):.2f}-{max(single):.2f}",
    }


def main() -> None:
    """Measure every case and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(case, options.rounds) for case in CASES]
    print(table(rows))
    sizes = {case.name: vars(case) for case in CASES}
    write("dense_step", {"threads": options.threads, "rounds": options.rounds, "sizes": sizes, "cases": rows})


if __name__ == "__main__":
    main()
