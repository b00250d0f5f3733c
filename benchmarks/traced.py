"""What a training step on a GPU does, traced on fake tensors, which have no memory: needs no GPU.

Of each case: kernels a step starts, bytes they read and write, the most memory that lives at once, what of it
is weights, gradients and moments, how often the host waits, and of the blocks compiled graphs and breaks. A
kernel that is one on a GPU counts once; compiled blocks are traced as they are uncompiled, so that their
figures are upper bounds.

Run: python benchmarks/traced.py           traces all cases, and writes benchmarks/results/traced.json
     python benchmarks/traced.py --check   traces them, and fails where one is worse than in that file
     python benchmarks/traced.py --peaks   writes the memory that each case of mfu.py and moe.py needs
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

import torch
from cases import BASE, MODELS, SWEEPS, Case, cases
from forge_model import LossConfig
from forge_model.attention.config import LatentConfig
from forge_model.decoder.config import DecoderConfig
from forge_parallel import MeshConfig, ParallelConfig, Plan, build_mesh, parallelize
from forge_parallel.activation_checkpointing import checkpoint_activations
from forge_parallel.apply import materialize
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import ActivationCheckpointingConfig, PrecisionConfig
from forge_parallel.env import Env
from forge_parallel.fp8_config import FP8Config
from forge_parallel.tensor import _ranks
from forge_trainer.optim import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    trainable,
)
from forge_trainer.plan.as_on_a_gpu import as_on_a_gpu, use_kernels_of_a_gpu
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update
from mfu import batch_of
from msgspec import structs
from report import RESULTS, table, write
from storages import Storages
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")
GIB = 1 << 30
BYTES = dict.fromkeys(("moved_gib", "peak_gib", "step_gib"), 1.005)
SLACK = {"kernels": 1.0, "syncs": 1.0, "breaks": 1.0} | BYTES
"""A figure may be so many times what it was; graphs are bounded by a test of their own. With the torch of the
lock all are the same each time."""

MODELS["mla"] = DecoderConfig(
    vocab_size=128256,
    max_tokens=1 << 17,
    dim=2048,
    num_layers=16,
    attention=LatentConfig(num_heads=16, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(),
    "adamw bf16 moments": AdamWConfig(moments="bfloat16"),
    "adamw stochastic": AdamWConfig(moments="bfloat16", rounding="stochastic"),
    "lion": LionConfig(),
    "muon": MuonConfig(scale="original", compute="bfloat16"),
    "schedule-free": ScheduleFreeAdamWConfig(),
}
TRACED: dict[str, tuple[Case, str]] = {
    "dense 1B": (BASE["1b"], "adamw"),
    "dense 1B recomputed": (structs.replace(BASE["1b"], recompute="full"), "adamw"),
    "dense 1B selective": (structs.replace(BASE["1b"], recompute="selective"), "adamw"),
    "dense 1B bf16": (structs.replace(BASE["1b"], state="bf16"), "adamw"),
    "documents": (structs.replace(BASE["1b"], documents=512), "adamw"),
    "FP8": (structs.replace(BASE["1b"], fp8="tensorwise"), "adamw"),
    "experts": (BASE["moe-4b"], "adamw bf16 moments"),
    "latent attention": (structs.replace(BASE["1b"], model="mla"), "adamw"),
    **{name: (BASE["1b"], name) for name in OPTIMIZERS if name not in ("adamw", "adamw stochastic")},
    "adamw stochastic": (structs.replace(BASE["1b"], state="bf16"), "adamw stochastic"),
}


@contextmanager
def group_of_one() -> Iterator[Env]:
    """A process group that communicates nothing, for FSDP2."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield Env(0, 0, 1, CPU, "none")
    finally:
        dist.destroy_process_group()


def parallel_of(case: Case) -> ParallelConfig:
    """As on a GPU, blocks uncompiled."""
    of_gpu = case.parallel("cuda")
    precision = PrecisionConfig(
        compute="auto" if case.state == "bf16" else "bfloat16", pure_bf16=case.state == "bf16"
    )
    fp8 = FP8Config(**{name: getattr(of_gpu.fp8, name) for name in ("recipe", "min_size")})
    # experts stay in bfloat16: the kernels that round for them are Triton's, which fake tensors do not know
    recompute = of_gpu.activation_checkpointing
    if recompute.mode in ("budget", "offload"):
        # the compiler keeps what it may; on the host nothing counts but the inputs of blocks
        recompute = structs.replace(recompute, mode="selective" if recompute.mode == "budget" else "full")
    return ParallelConfig(
        precision=precision, fp8=fp8, activation_checkpointing=recompute, compile=CompileConfig()
    )


def keep_as_compiled(model: Any, case: Case) -> None:
    """Let blocks that are not recomputed keep what compiled ones do, or little more: `selective` does.

    What the compiler computes again it never holds all at once, as `selective` does with one block: the peak
    is up to 2 GiB too high.
    """
    mode, _, number = case.recompute.partition("-")
    if mode not in ("none", "every"):
        return
    kept = [x for i, x in enumerate(model.layers.values()) if mode == "none" or i % int(number)]
    checkpoint_activations(kept, ActivationCheckpointingConfig(mode="selective"))


def trace(
    case: Case, optimizer: OptimizerConfig, show: bool = False, compiled: bool = False
) -> dict[str, float]:
    """Figures of the second step; the first makes the state of the optimizer.

    Args:
        case: what is trained.
        optimizer: that trains it.
        show: print the operations that are most frequent.
        compiled: keep what compiled blocks keep; else what uncompiled ones do.
    """
    with ExitStack() as stack:
        mesh = build_mesh(MeshConfig(), stack.enter_context(group_of_one()))
        _ranks(mesh.fsdp)  # kept; it reads the numbers of a tensor, which a fake one has not
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(as_on_a_gpu())
        storages = stack.enter_context(Storages())
        with torch.device("meta"):
            model = case.config.build()
        case.prepare(model)
        if compiled:
            keep_as_compiled(model, case)
        parallelize(model, mesh, Plan.of(model), parallel_of(case))
        materialize(model, CPU)
        use_kernels_of_a_gpu(model)
        made = optimizer.build(trainable([model]), mesh)
        step = TextStep(
            [model], LossConfig().build(), mesh, update=Update([model], made, lambda step: 1.0, 1.0, mesh)
        )
        batch = [batch_of(case, CPU)]
        storages.known(list(model.parameters()), list(model.buffers()))
        step.train(batch, 0)
        storages.start()
        before = storages.live
        phases: dict[str, int] = {}
        take = made.step

        def timed(*arguments: Any, **options: Any) -> Any:
            phases["backward"], storages.peak = storages.peak, storages.live
            phases["begin"] = storages.live
            return take(*arguments, **options)

        with patch.object(made, "step", timed):
            step.train(batch, 1)
        if show:
            print(storages.operations.most_common(25))
        kept = {id(s): s for s in made.state.values()}.values()
        state = sum(x.numel() * x.element_size() for s in kept for x in s.values() if isinstance(x, Tensor))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        return {
            "kernels": storages.kernels,
            "moved_gib": storages.moved / GIB,
            "peak_gib": max(phases["backward"], storages.peak) / GIB,
            "backward_gib": phases["backward"] / GIB,
            "step_gib": (storages.peak - phases["begin"]) / GIB,
            "weights_gib": weights / GIB,
            "state_gib": state / GIB,
            "other_gib": (before - weights - state) / GIB,
            "syncs": sum(storages.syncs.values()),
        }


def compiled(model: str, latent: bool = False) -> dict[str, int]:
    """Graphs and breaks of the blocks of a tiny model that trains, evaluates, and trains on other shapes."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    config = MODELS[model]
    if latent:
        sizes = LatentConfig(num_heads=2, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
        config = structs.replace(config, attention=sizes)
    built = config.build()
    torch.manual_seed(0)
    for tensor in [*built.parameters(), *built.buffers()]:
        torch.nn.init.normal_(tensor, std=0.02)
    mesh = build_mesh(MeshConfig(), Env(0, 0, 1, CPU, "none"))
    options = CompileConfig(enabled=True, backend="aot_eager", fullgraph=False)
    parallelize(built, mesh, Plan.of(built), ParallelConfig(compile=options))
    for rows, tokens in ((2, 32), (3, 32), (2, 48)):
        x = torch.randint(256, (rows, tokens))
        ids = torch.arange(tokens).expand(rows, -1) // 9
        for side in ({}, {"doc_ids": ids}):
            built(x, labels=x, loss_fn=LossConfig().build(), **side).total.backward()
            with torch.no_grad():
                built.eval()(x, **side)
            built.train()
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def compiled_kinds() -> dict[str, dict[str, int]]:
    """Of dense blocks, experts and latent attention."""
    return {
        "compiled dense": compiled("tiny"),
        "compiled experts": compiled("tiny-moe"),
        "compiled latent attention": compiled("tiny", latent=True),
    }


def worse(found: dict[str, dict[str, float]], kept: dict[str, dict[str, float]]) -> list[str]:
    """What is worse than it was, in words."""
    said = [
        f"{name}: no figures are kept of it; run benchmarks/traced.py" for name in found.keys() - kept.keys()
    ]
    for name, figures in found.items():
        for key, slack in SLACK.items():
            was, now = kept.get(name, {}).get(key), figures.get(key)
            if was is not None and now is not None and now > was * slack + 1e-9:
                said.append(
                    f"{name}: {key} was {was:.6g} and is {now:.6g}; if meant, run benchmarks/traced.py"
                )
    return said


def peaks() -> dict[str, float]:
    """GiB that each case of all sweeps needs; of compiled ones up to 2 GiB more, see `keep_as_compiled`."""
    found: dict[str, float] = {}
    every = [case for model in BASE for case in cases([model], list(SWEEPS)) if "tiny" not in model]
    for case in every:
        optimizer = OPTIMIZERS["adamw bf16 moments" if case.state == "moments-bf16" else "adamw"]
        if (key := case.key) not in found:
            found[key] = round(trace(case, optimizer, compiled=case.compile)["peak_gib"], 2)
            print(f"{found[key]:8.1f} GiB  {key}", flush=True)
    return found


def main() -> None:
    """Trace, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the figures that are kept")
    parser.add_argument("--peaks", action="store_true", help="the memory of the cases of mfu.py and moe.py")
    parser.add_argument(
        "--only", nargs="+", choices=list(TRACED), help="these cases, without compiled blocks"
    )
    chosen = parser.parse_args()
    if chosen.peaks:
        write("traced_peaks", peaks())
        return
    begun, found = time.monotonic(), {}
    for name, (case, optimizer) in TRACED.items():
        if chosen.only is None or name in chosen.only:
            found[name] = trace(case, OPTIMIZERS[optimizer], chosen.only is not None)
    print(table([{"case": name} | {k: f"{v:,.2f}" for k, v in row.items()} for name, row in found.items()]))
    if chosen.only is None:
        found |= compiled_kinds()
    print(f"{time.monotonic() - begun:.0f} s")
    if chosen.only is not None:
        return
    if not chosen.check:
        write("traced", found)
        return
    if said := worse(found, json.loads((RESULTS / "traced.json").read_text())["results"]):
        raise SystemExit("\n".join(said))


if __name__ == "__main__":
    main()
