"""A layer of experts beside a dense layer of as many active FLOPs, and beside a plain loop over experts.

Issue 9, done-when 6: at most 1.3 times the dense layer with 8 experts and 1.6 times with 64. Each side is
forward and backward of one feed-forward in float32, losses of the router included; sides take turns in one
process. The dense layer is a SwiGLU as wide as the experts of a token together. The loop is that of
`transformers` (`MixtralExperts`): for each expert, its tokens by index, a product, an addition by index.
Tokens are routed as the router of random weights chooses (`learned`), and evenly (`forced`).

Run: python benchmarks/moe.py [--threads 1] [--rounds 7]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from forge_model.config import MoEConfig, SigmoidRouterConfig, SwiGLUConfig
from forge_model.moe.layer import MoE
from forge_model.moe.routing import one_per_slot, serve
from report import table, write
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One layer and its input."""

    name: str
    dim: int
    hidden: int
    num_experts: int
    top_k: int
    tokens: int
    batch: int = 4


CASES = [
    Case("8 experts, top 2, dim 256", 256, 512, 8, 2, 512),
    Case("64 experts, top 8, dim 256", 256, 128, 64, 8, 512),
    Case("8 experts, top 2, dim 512", 512, 1024, 8, 2, 512),
    Case("64 experts, top 8, dim 512", 512, 256, 64, 8, 512),
]


class Forced(MoE):
    """Each expert serves as many tokens, whatever the router chose."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        routing, rows = self.router(x).routing, x.flatten(0, 1)
        even = torch.arange(len(routing.experts)) % self.num_experts
        pairs = one_per_slot(even.view(len(rows), -1), routing.weights.view(len(rows), -1))
        return serve(self.experts, rows, pairs, self.num_experts).view_as(x)


class Naive(MoE):
    """The same as `MoE` by a loop, as in `transformers`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        routing, rows, made = self.router(x).routing, x.flatten(0, 1), self.experts
        out = torch.zeros_like(rows)
        chosen, weights = (part.view(len(rows), -1) for part in (routing.experts, routing.weights))
        mask = F.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        for index in mask.sum((-1, -2)).nonzero()[:, 0].tolist():
            slot, token = torch.where(mask[index])
            part = rows[token]
            hidden = F.silu(part @ made.w_gate[index].t()) * (part @ made.w_up[index].t())
            out.index_add_(0, token, hidden @ made.w_down[index].t() * weights[token, slot, None])
        return out.view_as(x)


def sides(case: Case) -> dict[str, Callable[[], None]]:
    """What takes turns."""
    torch.manual_seed(0)
    x = torch.randn(case.batch, case.tokens, case.dim, requires_grad=True)
    gradient = torch.randn_like(x)
    router = SigmoidRouterConfig(sequence_balance_weight=1e-4)
    config = MoEConfig(num_experts=case.num_experts, top_k=case.top_k, dim=case.hidden, router=router)
    dense = SwiGLUConfig(dim=case.hidden * case.top_k).build(case.dim)
    kinds = {"learned": MoE, "forced": Forced, "naive": Naive}
    layers = {"dense": dense} | {name: kind(config, case.dim) for name, kind in kinds.items()}
    for layer in layers.values():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            torch.nn.init.normal_(tensor, std=0.02)

    def run(layer: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            layer(x).backward(gradient)
            x.grad = None
            layer.zero_grad()

        return step

    return {name: run(layer) for name, layer in layers.items()}


def measure(case: Case, rounds: int) -> dict[str, float | str]:
    """Median milliseconds of each, and what they are times the dense layer."""
    steps = sides(case)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    median = {name: statistics.median(taken) for name, taken in times.items()}
    found: dict[str, float | str] = {"case": case.name} | {f"{n}_ms": ms for n, ms in median.items()}
    return found | {f"{n}_of_dense": ms / median["dense"] for n, ms in median.items() if n != "dense"}


def main() -> None:
    """Measure every case and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(case, options.rounds) for case in CASES]
    print(table(rows))
    sizes = {case.name: vars(case) for case in CASES}
    write("moe", {"threads": options.threads, "rounds": options.rounds, "sizes": sizes, "cases": rows})


if __name__ == "__main__":
    main()
