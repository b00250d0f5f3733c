"""A training step of the dense decoder beside a plain one in torch, and beside bare matmuls of its shapes.

Issue 2, done-when 6: of the matmuls at least 0.75 on CPU at dim 512 and above. Issue 13, done-when 4: dim 256
with a vocabulary of 32k, and bfloat16, at least 1.3 times as fast as the predecessor. The step is forward,
chunked loss, backward and fused AdamW, weights and all else in the number format of the case (the cases in
bfloat16 are tiny: a CPU without instructions for it takes a hundred times as long). The plain step
is that of `Plain` below, a decoder of torch's own layers with the same weights, all logits at once through
`F.cross_entropy`, and the same AdamW; both must tell the same first loss. The predecessor is a checkout of
KempnerForge at --predecessor, with its default loss.

The matmuls are those of the step and nothing else: every linear layer and the head, forward and both
gradients, and the products of queries, keys and values over all pairs of tokens, into ready buffers. All
sides are timed in turns in one process. A fraction is that of the FLOP/s at the median times: `fraction`
counts all pairs of tokens for the model too, `fraction_causal`, the stricter, only those a causal model
needs. `over plain` is how many times as long the plain step takes.

Run: python benchmarks/dense_step.py [--threads 2] [--rounds 5] [--predecessor PATH] [--quick]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from report import table, write
from torch import Tensor, nn

Step = Callable[[], float]
"""Takes a step, and gives the mean loss before it."""


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
    dtype: torch.dtype = torch.float32

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
    Case("dim 256, vocabulary 32k", 256, 4, 4, 4, 32768, 8, 512),
    Case("dim 512, T 64, bf16", 512, 2, 8, 8, 8192, 1, 64, torch.bfloat16),
    Case("dim 256, vocabulary 32k, T 64, bf16", 256, 2, 4, 4, 32768, 1, 64, torch.bfloat16),
]


class Plain(nn.Module):
    """A decoder as one writes it down: torch's layers, no chunks, no caches. Its weights have our names."""

    def __init__(self, case: Case, named: dict[str, Tensor]) -> None:
        super().__init__()
        self.case, self.names = case, list(named)
        self.weights = nn.ParameterList(weight.clone() for weight in named.values())
        width = case.dim // case.num_heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(case.tokens)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]."""
        w = dict(zip(self.names, self.weights, strict=True))
        x = F.embedding(tokens, w["embed.weight"])
        for index in range(self.case.num_layers):
            of = {
                n.removeprefix(f"layers.{index}."): v
                for n, v in w.items()
                if n.startswith(f"layers.{index}.")
            }
            x = x + self._attention(self._norm(x, of["attention_norm.weight"]), of)
            y = self._norm(x, of["ffn_norm.weight"])
            hidden = F.silu(F.linear(y, of["ffn.w_gate.weight"])) * F.linear(y, of["ffn.w_up.weight"])
            x = x + F.linear(hidden, of["ffn.w_down.weight"])
        return F.linear(self._norm(x, w["norm.weight"]), w["head.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)

    def _attention(self, x: Tensor, of: dict[str, Tensor]) -> Tensor:
        q, k, v = (
            F.linear(x, of[f"attention.{name}.weight"]).unflatten(-1, (heads, -1)).transpose(1, 2)
            for name, heads in (
                ("wq", self.case.num_heads),
                ("wk", self.case.kv_heads),
                ("wv", self.case.kv_heads),
            )
        )
        q, k = self._rotated(q), self._rotated(k)
        shared = self.case.num_heads != self.case.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return F.linear(mixed.transpose(1, 2).flatten(-2), of["attention.wo.weight"])

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


def training_steps(case: Case, predecessor: str | None) -> dict[str, Step]:
    """Forward, loss, backward, AdamW of each side, on the same tokens."""
    model = case.config().build()
    initialize(model, seed=0)
    model.to(case.dtype)
    loss = LossConfig().build()
    data = torch.randint(case.vocab_size, (case.batch, case.tokens + 1))
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    plain = Plain(case, dict(model.named_parameters()))
    sides: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        "forge": (model, lambda: model(tokens, labels=labels, loss_fn=loss).total / labels.numel()),
        "plain": (plain, lambda: _cross_entropy(plain(tokens), labels)),
    }
    if predecessor is not None:
        other = predecessors_model(case, predecessor)
        sides["predecessor"] = (other, lambda: _cross_entropy(other(tokens), labels))
    return {name: stepping(module, mean_loss) for name, (module, mean_loss) in sides.items()}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def stepping(module: nn.Module, mean_loss: Callable[[], Tensor]) -> Step:
    """A training step with fused AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> float:
        loss = mean_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def predecessors_model(case: Case, checkout: str) -> nn.Module:
    """KempnerForge's decoder of the same sizes, from a checkout."""
    sys.path.insert(0, checkout)
    from kempnerforge.config.schema import ModelConfig  # type: ignore[import-not-found]
    from kempnerforge.model.transformer import Transformer  # type: ignore[import-not-found]

    sizes: dict[str, Any] = {"dim": case.dim, "n_layers": case.num_layers, "n_heads": case.num_heads}
    sizes |= {"n_kv_heads": case.kv_heads, "vocab_size": case.vocab_size, "max_seq_len": case.tokens}
    return Transformer(ModelConfig(**sizes, ffn_hidden_dim=case.config().ffn.hidden(case.dim))).to(case.dtype)


def matmuls(case: Case) -> Callable[[], None]:
    """The matmuls of that step, on ready buffers."""
    config = case.config()
    model = config.build()
    dtype = case.dtype
    rows = case.batch * case.tokens
    products = []
    for weight in [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")]:
        out, into = weight.shape
        x, w, y = (torch.randn(size, dtype=dtype) for size in ((rows, into), (out, into), (rows, out)))
        products += [(x, w.t(), torch.empty_like(y)), (y, w, torch.empty_like(x))]
        products += [(y.t(), x, torch.empty_like(w))]
    heads, width = case.batch * case.num_heads, case.dim // case.num_heads
    score = torch.randn(heads, case.tokens, case.tokens, dtype=dtype)
    qkv = torch.randn(heads, case.tokens, width, dtype=dtype)
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


def measure(case: Case, rounds: int, predecessor: str | None = None) -> dict[str, Any]:
    """Median seconds of all sides, taken in turns, and the range of `fraction_causal` over single rounds."""
    torch.manual_seed(0)
    steps = training_steps(case, predecessor)
    sides: dict[str, Callable[[], Any]] = {**steps, "matmul": matmuls(case)}
    first = {name: side() for name, side in sides.items()}
    assert abs(first["forge"] - first["plain"]) < 2e-3, f"the sides compute the same: {first}"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    every = matmul_flops(case)
    causal = case.config().flops_per_token(case.tokens, causal=True) * case.batch * case.tokens
    rate = every / seconds["matmul"]
    both = zip(times["forge"], times["matmul"], strict=True)
    single = [causal / every * bare / step for step, bare in both]
    return {
        "case": case.name,
        "step_s": seconds["forge"],
        **{f"{name}_s": taken for name, taken in seconds.items() if name != "forge"},
        **{f"over {name}": seconds[name] / seconds["forge"] for name in steps if name != "forge"},
        "tokens_per_s": case.batch * case.tokens / seconds["forge"],
        "model_gflop_per_s": causal / seconds["forge"] / 1e9,
        "matmul_gflop_per_s": rate / 1e9,
        "fraction": every / seconds["forge"] / rate,
        "fraction_causal": causal / seconds["forge"] / rate,
        "of_single_rounds": f"{min(single):.2f}-{max(single):.2f}",
    }


def main() -> None:
    """Measure every case and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--predecessor", metavar="PATH", help="a checkout of KempnerForge")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens; nothing is recorded")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        cases = [replace(case, batch=1, tokens=16, num_layers=1) for case in CASES]
        print(table([measure(case, 1, options.predecessor) for case in cases]))
        return
    rows = [measure(case, options.rounds, options.predecessor) for case in CASES]
    print(table(rows))
    sizes = {case.name: vars(case) | {"dtype": str(case.dtype).removeprefix("torch.")} for case in CASES}
    write("dense_step", {"threads": options.threads, "rounds": options.rounds, "sizes": sizes, "cases": rows})


if __name__ == "__main__":
    main()
