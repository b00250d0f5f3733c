"""`forge plan` runs the code of a job on paper: what it finds is what real steps on CPU ranks take."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from forge_parallel.testing import run_ranks
from forge_trainer.config.job import load_job
from forge_trainer.plan import kinds
from forge_trainer.plan.report import model_flops
from forge_trainer.plan.stage import micro_batches_of, stages_on_paper
from forge_trainer.plan.trace import Site
from measured_step import measured

RUNS = Path(__file__).parents[2] / "configs" / "runs"
SMALL = [
    "--data.max_tokens=32",
    "--model.max_tokens=32",
    "--model.dim=64",
    "--model.attention.num_heads=4",
    "--model.num_layers=3",
    "--train.global_batch=8",
    "--train.micro_batch=2",
]
PIPED = ["--mesh.pp=2", "--model.tie_embeddings=false", "--model.num_layers=4"]

LAYOUTS = {
    "dp_shard": (2, []),
    "dp_replicate": (2, ["--mesh.dp_replicate=2"]),
    "tp": (2, ["--mesh.tp=2"]),
    "cp": (2, ["--mesh.cp=2"]),
    "pp x dp_shard": (4, PIPED),
    "ep": (2, ["--mesh.ep=2", "moe"]),
    "dp_shard, after_backward": (2, ["--fsdp.reshard=after_backward"]),
    "dp_shard, after_step": (2, ["--fsdp.reshard=after_step"]),
    "dp_shard, prefetch, offload": (2, ["--fsdp.prefetch=2", "--fsdp.offload=true"]),
    "dp_replicate x dp_shard": (4, ["--mesh.dp_replicate=2"]),
    "dp_replicate x dp_shard, every_micro_batch": (
        4,
        ["--mesh.dp_replicate=2", "--fsdp.reduce_gradients=every_micro_batch"],
    ),
    "tp, sequence = false": (2, ["--mesh.tp=2", "--tensor_parallel.sequence=false"]),
    "cp, ulysses": (2, ["--mesh.cp=2", "--context_parallel.method=ulysses"]),
    "cp, ring": (2, ["--mesh.cp=2", "--context_parallel.method=ring"]),
    "dp_shard x tp": (4, ["--mesh.tp=2"]),
    "dp_shard x cp": (4, ["--mesh.cp=2"]),
    "cp x tp": (4, ["--mesh.cp=2", "--mesh.tp=2"]),
    "pp x tp": (4, [*PIPED, "--mesh.tp=2"]),
    "pp x cp": (4, [*PIPED, "--mesh.cp=2"]),
    "pp x dp_replicate": (4, [*PIPED, "--mesh.dp_replicate=2"]),
    "pp interleaved": (2, [*PIPED, "--pipeline.schedule=interleaved_1f1b"]),
    "ep x tp": (4, ["--mesh.ep=2", "--mesh.tp=2", "moe"]),
    "muon": (2, ["--optimizer.type=muon", "--optimizer.scale=match-rms-adamw"]),
    "full recomputation, tp": (2, ["--mesh.tp=2", "--activation_checkpointing.mode=full"]),
    "selective recomputation, tp": (2, ["--mesh.tp=2", "--activation_checkpointing.mode=selective"]),
}
QUICK = ("dp_shard", "tp")


def slow_unless(names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def on_paper(path, overrides, ranks, whole=True):
    """The steps of all ranks of the pipeline, by rank of the job."""
    job, site = load_job(path, overrides).value, Site(ranks, 8, on_gpu=False)
    stages = stages_on_paper(job, site, range(job.mesh.pp), whole=whole)
    assert not torch.distributed.is_initialized()
    return {stage.rank: stage.step for stage in stages}


def measured_on(ranks, path, overrides):
    """By rank. A lone process has no group, and no FSDP2."""
    if ranks == 1:
        return [measured(path, overrides)]
    return run_ranks(measured, ranks, path, overrides, timeout_s=240)


def said_of(step):
    found: Counter = Counter()
    sizes: Counter = Counter()
    for said, traffic in step.collectives.items():
        if said.kind not in ("send", "receive"):
            found[said.kind] += round(traffic.count)
            sizes[said.kind] += round(traffic.bytes)
    return {kind: (found[kind], sizes[kind]) for kind in found}


def file_and_flags(flags):
    name = "moe_debug" if "moe" in flags else "debug"
    return str(RUNS / f"{name}.toml"), [*SMALL, *(flag for flag in flags if flag != "moe")]


def test_messages_of_a_ring_on_paper_are_those_of_theory():
    """Rank 0 of two gives one piece of keys twice, there and back, and the gradient of two it is given."""
    path, overrides = file_and_flags(LAYOUTS["cp, ring"][1])
    job = load_job(path, overrides).value
    heads, micro = job.model.attention, micro_batches_of(job, 2)
    width = 2 * heads.head_width(job.model.dim) * heads.kv_heads
    piece = 4 * job.train.micro_batch * job.data.max_tokens // 4 * width
    said = on_paper(path, overrides, 2)[0].collectives
    sent, received = (
        sum(traffic.bytes for one, traffic in said.items() if one.kind == kind and one.axis == "cp")
        for kind in ("send", "receive")
    )
    assert sent == micro * job.model.num_layers * (1 + 1 + 2) * piece
    assert received == micro * job.model.num_layers * (2 + 2 + 1) * piece


@pytest.mark.dist
@pytest.mark.parametrize("name", slow_unless(LAYOUTS, QUICK))
def test_collectives_and_flops_are_those_of_a_real_step(name):
    ranks, flags = LAYOUTS[name]
    path, overrides = file_and_flags(flags)
    real = measured_on(ranks, path, overrides)
    for rank, step in on_paper(path, overrides, ranks).items():
        flops = sum(step.flops.values())
        if "ep" in name:  # routing is not even in the real step: what is sent differs, not how often
            theirs = {kind: count for kind, (count, _) in real[rank]["said"].items()}
            assert {kind: count for kind, (count, _) in said_of(step).items()} == theirs
            continue
        assert said_of(step) == real[rank]["said"], rank
        assert flops == pytest.approx(real[rank]["flops"], rel=0.005)


def drawn(seed):
    """A random small job: number of ranks, and its flags."""
    draw = random.Random(seed)
    ranks, axes = draw.choice([(1, []), (1, []), (2, []), (2, ["--mesh.tp=2"]), (2, PIPED)])
    piped = axes is PIPED
    tied = draw.random() < 0.5 and not piped
    flags = [
        *SMALL,
        *axes,
        f"--model.num_layers={draw.randint(2, 8)}",
        f"--model.dim={draw.choice([64, 96, 128])}",
        f"--data.max_tokens={(tokens := draw.choice([32, 64, 128]))}",
        f"--model.max_tokens={tokens}",
        f"--train.micro_batch={draw.choice([1, 2])}",
        f"--model.tie_embeddings={str(tied).lower()}",
        f"--data.mask_documents={draw.choice(['true', 'false'])}",
        f"--activation_checkpointing.mode={draw.choice(['none', 'full', 'every', 'selective'])}",
        f"--optimizer.type={draw.choice(['adamw', 'lion'])}",
    ]
    kind = draw.choice(["dense", "dense", "experts", "latent"])
    if kind == "experts" and "--mesh.tp=2" not in axes:
        return ranks, [*flags, "moe"]
    if kind == "latent" and not axes:
        flags = [flag for flag in flags if "num_heads" not in flag]
        flags.append(
            "--model.attention={ type = 'mla', num_heads = 4, kv_rank = 16, nope_dim = 16, rope_dim = 8, "
            "value_dim = 16 }"
        )
    return ranks, flags


@pytest.mark.dist
@pytest.mark.parametrize("seed", slow_unless(range(20), (0,)))
def test_memory_of_a_random_job_is_that_of_a_real_step(seed):
    ranks, flags = drawn(seed)
    path, overrides = file_and_flags(flags)
    overrides = overrides[len(SMALL) :]
    real = measured_on(ranks, path, overrides)
    for rank, step in on_paper(path, overrides, ranks).items():
        _, held = kinds.highest(step.peaks)
        assert sum(held.values()) == pytest.approx(real[rank]["peak"], rel=0.02), rank


EXTRAPOLATED = {
    "1f1b": (2, [*PIPED, "--model.num_layers=9", "--train.global_batch=12"]),
    "gpipe": (2, [*PIPED, "--train.global_batch=12", "--pipeline.schedule=gpipe"]),
    "interleaved": (
        2,
        [*PIPED, "--model.num_layers=12", "--train.global_batch=16", "--pipeline.schedule=interleaved_1f1b"],
    ),
    "1f1b, experts": (2, [*PIPED, "--train.global_batch=12", "moe"]),
    "dp_shard, seven micro-batches": (2, ["--model.num_layers=7", "--train.global_batch=28"]),
    "every_micro_batch": (
        2,
        ["--model.num_layers=7", "--train.global_batch=28", "--fsdp.reduce_gradients=every_micro_batch"],
    ),
    "8 bits gathered": (
        2,
        [
            "--model.num_layers=7",
            "--fsdp.prefetch=1",
            *("--fp8.recipe=tensorwise", "--fp8.min_size=16", "--fp8.emulate=true", "--fp8.gather=true"),
        ],
    ),
    "schedule-free": (2, ["--optimizer.type=schedule-free-adamw", "--schedule.type=constant"]),
    "average of weights": (2, ["--optimizer.ema_decay=0.99", "--model.num_layers=7"]),
    "multi-token prediction": (1, ["--model.mtp.num_modules=1", "--model.num_layers=7"]),
    "every third block": (
        1,
        [
            *("--activation_checkpointing.mode=every", "--activation_checkpointing.every=3"),
            "--model.num_layers=11",
        ],
    ),
}


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # a head of parts gives a list
@pytest.mark.parametrize("name", slow_unless(EXTRAPOLATED, ("1f1b",)))
def test_what_is_extrapolated_is_what_a_real_step_of_all_blocks_takes(name):
    ranks, flags = EXTRAPOLATED[name]
    path, overrides = file_and_flags(flags)
    real = measured_on(ranks, path, overrides)
    for rank, step in on_paper(path, overrides, ranks, whole=False).items():
        _, held = kinds.highest(step.peaks)
        assert sum(held.values()) == pytest.approx(real[rank]["peak"], rel=0.02), rank
        assert said_of(step) == real[rank]["said"], rank
        assert sum(step.flops.values()) == pytest.approx(real[rank]["flops"], rel=0.005)


MIXTURE = "mixture-of-transformers"
IMAGES = {
    "joint": [],
    "joint, decoder frozen": ['--optimizer.groups=[{ match = ["decoder"], freeze_from = 0 }]'],
    "joint, tower frozen": ['--optimizer.groups=[{ match = ["encoder"], freeze_from = 0 }]'],
    "cross": [],
    MIXTURE: [],
    "moma": [],
}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("name", slow_unless(IMAGES, ("joint, tower frozen", "moma")))
def test_job_with_images_takes_what_a_real_step_does(name):
    (path,) = map(str, RUNS.glob(f"vlm_debug_{'m?t' if name == MIXTURE else name.partition(',')[0]}.toml"))
    overrides = ["--train.global_batch=4", "--train.micro_batch=2", *IMAGES[name]]
    real = measured(path, overrides)
    (step,) = on_paper(path, overrides, 1, whole=False).values()
    assert sum(kinds.highest(step.peaks)[1].values()) == pytest.approx(real["peak"], rel=0.02)
    assert sum(step.flops.values()) == pytest.approx(real["flops"], rel=0.005)
    # model FLOPs; the formula takes a third off a part that is frozen, its attention included
    near = 0.1 if "decoder frozen" in name else 0.02
    model = model_flops(load_job(path, overrides).value, causal=False)
    assert model == pytest.approx(real["flops"], rel=near)
