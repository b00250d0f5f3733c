"""Time of an optimizer step and memory of its state on 50 M parameters, beside torch's AdamW.

Issue 13, done-when 4. A decoder of 50 M parameters in float32, random gradients. `ms` is the median of
turns that all optimizers take one after the other in one process; `x adamw` is that over torch's fused
AdamW. `torch.optim.Muon` works matrix by matrix in bfloat16, beside torch's AdamW; as that takes a minute
or more on a CPU without bfloat16 units, it gets one turn. `loop` is the same in float32: one matrix after
the other by the formulas. `state` is the bytes of state a parameter. `muon, 2 ranks` is a step of weights
sharded over two gloo ranks by FSDP2, one thread each, beside `muon, 1 thread`, one process with one
thread.

Run alone on the machine: python benchmarks/optimizer.py [--rounds 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from forge_model import DecoderConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_parallel import Env, MeshConfig, ParallelConfig, Plan, build_mesh, local_shard, process_group
from forge_parallel.apply import materialize, parallelize
from forge_parallel.mesh import Mesh
from forge_trainer.optim import AdamWConfig, LionConfig, MuonConfig, ScheduleFreeAdamWConfig, trainable
from forge_trainer.optim.averaged import average_weights
from report import table, write
from torch import nn

MUON = MuonConfig(scale="match-rms-adamw")
OURS = {
    "adamw": AdamWConfig(),
    "adamw, ema": AdamWConfig(ema_decay=0.999),
    "adamw, bfloat16 moments": AdamWConfig(moments="bfloat16"),
    "lion": LionConfig(),
    "lion, compiled": LionConfig(compile=True),
    "schedule-free-adamw": ScheduleFreeAdamWConfig(),
    "schedule-free-adamw, compiled": ScheduleFreeAdamWConfig(compile=True),
    "muon": MUON,
}


def decoder() -> nn.Module:
    """50 M parameters, not initialized."""
    attention = GroupedQueryConfig(num_heads=10, num_kv_heads=10)
    return DecoderConfig(vocab_size=8192, max_tokens=512, dim=640, num_layers=8, attention=attention).build()


def give_gradients(model: nn.Module) -> None:
    """Random ones."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3


class Loop(torch.optim.Optimizer):
    """Muon in float32, one matrix after the other."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Momentum, five iterations, decay, step."""
        for weight in self.param_groups[0]["params"]:
            grad = weight.grad
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            momentum.lerp_(grad, 0.05)
            x = grad.lerp(momentum, 0.95)
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if tall else x
            weight.mul_(1 - 1e-4).add_(x, alpha=-1e-3 * 0.2 * max(weight.shape) ** 0.5)


def plain(model: nn.Module, muon: Callable[[list[nn.Parameter]], Any] | None = None) -> Callable[[], object]:
    """A step of torch's AdamW, with another optimizer for matrices if one is given."""
    roles = {parameter.name: parameter.role for parameter in trainable([model])}
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if muon and roles[name] == "matrix"]
    rest = [p for name, p in named.items() if not (muon and roles[name] == "matrix")]
    steps: list[Any] = [torch.optim.AdamW(rest, betas=(0.9, 0.95), fused=True)]
    steps += [muon(matrices)] if muon else []
    return lambda: [one.step() for one in steps] and [one.state for one in steps]


def torch_muon(matrices: list[nn.Parameter]) -> Any:
    """Of torch, with our scale."""
    return torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")


def ours(model: nn.Module, config: Any) -> Callable[[], object]:
    """A step of one of ours."""
    optimizer = config.build(trainable([model]), Mesh(torch.device("cpu")))

    def step() -> object:
        optimizer.step()
        if config.ema_decay:
            average_weights(optimizer, config.ema_decay, torch.tensor(True))
        return [optimizer.state]

    return step


def state_bytes(states: Any) -> int:
    """Of all tensors."""
    kept = [value for state in states for one in state.values() for value in one.values()]
    return sum(t.numel() * t.element_size() for t in kept if isinstance(t, torch.Tensor))


def compare(rounds: int) -> list[dict]:
    """All of them in turns."""
    makers: dict[str, Callable[[nn.Module], Callable[[], object]]] = {
        "torch.optim.AdamW": plain,
        "loop": lambda model: plain(model, Loop),
    }
    makers |= {name: lambda model, config=config: ours(model, config) for name, config in OURS.items()}
    model = decoder()
    initialize(model, 0)
    give_gradients(model)
    steps = {name: make(model) for name, make in makers.items()}
    memory = {name: state_bytes(step()) for name, step in steps.items()}  # also warms up
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    slow = plain(model, torch_muon)
    start = time.perf_counter()
    memory["torch.optim.Muon"] = state_bytes(slow())
    seconds["torch.optim.Muon"] = [time.perf_counter() - start]
    count = sum(parameter.numel() for parameter in model.parameters())
    adamw = statistics.median(seconds["torch.optim.AdamW"])
    return [
        {
            "optimizer": name,
            "ms": round(1e3 * statistics.median(found), 1),
            "x adamw": round(statistics.median(found) / adamw, 2),
            "state": round(memory[name] / count, 2),
        }
        for name, found in seconds.items()
    ]


def rank(rounds: int) -> None:
    """One rank of a sharded Muon: prints the seconds of each step."""
    env = Env.detect()
    with process_group(env):
        mesh = build_mesh(MeshConfig(), env)
        with torch.device("meta"):
            model = decoder()
        if env.world_size > 1:
            parallelize(model, mesh, Plan.of(model), ParallelConfig())
        initialize(materialize(model, mesh.device), 0, local_shard)
        give_gradients(model)
        optimizer = MUON.build(trainable([model]), mesh)
        optimizer.step()
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        if env.rank == 0:
            print(json.dumps(seconds))


def sharded(ranks: int, rounds: int) -> float:
    """The median seconds of a step on so many ranks of one thread."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    line = [*launch, __file__, "--rank", "--rounds", str(rounds)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stderr)
    return statistics.median(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rounds)
        return
    rows = compare(options.rounds)
    one, two = (sharded(ranks, options.rounds) for ranks in (1, 2))
    print(table(rows))
    print(f"muon, 1 thread: {one:.2f} s; muon, 2 ranks: {two:.2f} s, {two / one:.2f} of it")
    ms = {row["optimizer"]: row["ms"] for row in rows}
    loops = {name: round(ms[name] / ms["muon"], 2) for name in ("loop", "torch.optim.Muon")}
    print(f"times as long as muon: {loops}")
    sides = {"one_thread_s": round(one, 3), "two_ranks_s": round(two, 3), "ratio": round(two / one, 3)}
    write("optimizer", {"rows": rows, "muon_sharded": sides, "over_muon": loops})


if __name__ == "__main__":
    main()
