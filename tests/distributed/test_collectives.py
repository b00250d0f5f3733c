"""What a step says over the network, counted, is what theory says: the table in docs/parallel.md."""

from pathlib import Path

import pytest
import torch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.attention.config import GroupedQueryConfig
from forge_parallel import Env, MeshConfig, ParallelConfig, Plan, build_mesh, local_shard, parallelize
from forge_parallel.apply import materialize
from forge_parallel.config import (
    ContextParallelConfig,
    FSDPConfig,
    PipelineConfig,
    PrecisionConfig,
    TensorParallelConfig,
)
from forge_parallel.runner import Inputs, Runner, build_runner
from forge_parallel.stages import keep_stage
from forge_parallel.testing import run_ranks
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS, MICRO_BATCHES = 3, 2
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def prepared(sizes: dict, parallel: ParallelConfig) -> tuple[nn.Module, Runner, Inputs]:
    """A decoder, what runs it, and a micro-batch."""
    mesh = build_mesh(MeshConfig(**sizes), Env.detect())
    attention = GroupedQueryConfig(num_heads=4, num_kv_heads=4)
    config = DecoderConfig(vocab_size=64, dim=32, num_layers=LAYERS, max_tokens=16, attention=attention)
    with torch.device("meta"):
        model = config.build()
    keep_stage(model, Plan.of(model), mesh.pipeline.rank, mesh.pipeline.size, parallel.pipeline)
    parallelize(model, mesh, Plan.of(model), parallel)
    materialize(model, mesh.device)
    initialize(model, 0, local_shard)
    runner = build_runner([model], mesh)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    inputs = {
        "tokens": tokens,
        "labels": tokens,
        "doc_ids": tokens,
        "loss_fn": LossConfig(chunk_tokens=0).build(),
    }
    return model, runner, inputs


def counted(sizes: dict, parallel: ParallelConfig, steps: int = 2) -> dict[str, int]:
    """Collectives of the last of some steps of a decoder, by kind."""
    _, runner, inputs = prepared(sizes, parallel)
    for _ in range(steps):
        with CommDebugMode() as said:
            runner.backward([inputs] * MICRO_BATCHES, lambda terms: terms.total)
    found = dict.fromkeys(KINDS, 0)
    for op, count in said.get_comm_counts().items():
        found[next(kind for kind in KINDS if kind.replace("_", "") in str(op).replace("_", ""))] += count
    return found


EVERY = ParallelConfig(fsdp=FSDPConfig(reduce_gradients="every_micro_batch"))
KEPT = ParallelConfig(fsdp=FSDPConfig(reshard="after_backward"))
KEPT_LONGER = ParallelConfig(fsdp=FSDPConfig(reshard="after_step"))
AHEAD = ParallelConfig(fsdp=FSDPConfig(prefetch=2, offload=True))
RING = ParallelConfig(context_parallel=ContextParallelConfig(method="ring"))
ULYSSES = ParallelConfig(context_parallel=ContextParallelConfig(method="ulysses"))
WHOLE = ParallelConfig(tensor_parallel=TensorParallelConfig(sequence=False))
UNITS = LAYERS + 2  # blocks, embedding, norm with head
# forward: each unit; backward: all but the last block and the head, which are still there
FSDP = (MICRO_BATCHES * (UNITS + UNITS - 2), UNITS)
CASES = {
    "dp_shard": (2, {}, ParallelConfig(), (*FSDP, 0, 0)),
    "dp_replicate": (2, {"dp_replicate": 2}, ParallelConfig(), (0, 0, UNITS, 0)),
    "dp_shard, after_backward": (2, {}, KEPT, (MICRO_BATCHES * UNITS, UNITS, 0, 0)),
    "dp_shard, after_step": (2, {}, KEPT_LONGER, (UNITS, UNITS, 0, 0)),
    "dp_shard, prefetch, offload": (2, {}, AHEAD, (*FSDP, 0, 0)),
    "dp_replicate x dp_shard": (4, {"dp_replicate": 2}, ParallelConfig(), (*FSDP, UNITS, 0)),
    # copies of the model are summed over once a step
    "dp_replicate x dp_shard, every_micro_batch": (
        4,
        {"dp_replicate": 2},
        EVERY,
        (FSDP[0], MICRO_BATCHES * UNITS, UNITS, 0),
    ),
    # embedding, attention and feed-forward of each layer, head: one of each there and back; loss; norms
    "tp": (
        2,
        {"tp": 2},
        ParallelConfig(),
        (*[MICRO_BATCHES * 2 * (2 * LAYERS + 1)] * 2, MICRO_BATCHES * 2 + 1, 0),
    ),
    # of the first of two stages: embedding and two layers, which stay gathered for the step
    "pp x dp_shard": (4, {"pp": 2}, ParallelConfig(pipeline=PipelineConfig(layers=[2, 1])), (3, 3, 0, 0)),
    "tp, sequence = false": (2, {"tp": 2}, WHOLE, (0, 0, MICRO_BATCHES * (4 * LAYERS + 4), 0)),
    # document ids once a micro-batch; keys and values of each layer, and their gradients
    "cp": (
        2,
        {"cp": 2},
        ParallelConfig(),
        (FSDP[0] + MICRO_BATCHES * (LAYERS + 1), FSDP[1] + MICRO_BATCHES * LAYERS, 0, 0),
    ),
    "cp, ulysses": (2, {"cp": 2}, ULYSSES, (FSDP[0] + MICRO_BATCHES, FSDP[1], 0, MICRO_BATCHES * LAYERS * 8)),
    "cp, ring": (2, {"cp": 2}, RING, (FSDP[0] + MICRO_BATCHES, FSDP[1], 0, 0)),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_collectives_of_a_step_are_those_of_theory(name):
    ranks, sizes, parallel, expected = CASES[name]
    assert run_ranks(counted, ranks, sizes, parallel)[0] == dict(zip(KINDS, expected, strict=True))


def test_table_in_the_docs_is_what_is_counted():
    rows = [f"| `{name}` | {' | '.join(map(str, counts))} |" for name, (*_, counts) in CASES.items()]
    assert "\n".join(rows) in (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(), "\n".join(
        rows
    )


class Order(TorchDispatchMode):
    """Writes down which sums of gradients begin."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).replace("_", "")
        self.events += [kind for kind in ("reduce_scatter", "all_reduce") if kind.replace("_", "") in name]
        return func(*args, **kwargs or {})


def sums_in_the_backward_pass() -> list[str]:
    """The sums of a step over shards and copies, and between them when the gradient reaches each layer."""
    model, runner, inputs = prepared({"dp_replicate": 2}, ParallelConfig())
    said = Order()
    for index in range(LAYERS):

        def reached(_module: nn.Module, _inputs: object, out: Tensor, index: int = index) -> None:
            out.register_hook(lambda _: said.events.append(f"layer {index}"))

        model.get_submodule(f"layers.{index}").register_forward_hook(reached)
    with said:
        runner.backward([inputs], lambda terms: terms.total)
    return said.events


@pytest.mark.dist
def test_copies_are_summed_over_while_the_backward_pass_goes_on():
    """Those of a unit begin when its gradients are there: on a GPU they run in a stream of their own."""
    sums = ["reduce_scatter", "all_reduce"]
    layers = [event for index in reversed(range(LAYERS)) for event in (f"layer {index}", *sums)]
    for events in run_ranks(sums_in_the_backward_pass, 4):
        assert events == [*sums, *layers, *sums]  # norm with head; layers; embedding


class Formats(TorchDispatchMode):
    """Adds up the numbers that all-reduces sum, by format."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_reduce" in str(func):
            key = str(args[0].dtype)
            self.numbers[key] = self.numbers.get(key, 0) + args[0].numel()
        return func(*args, **kwargs or {})


def summed_by_format() -> dict[str, int]:
    """What a step in bf16 without sequence parallelism sums over the ranks that share matrices."""
    with Formats() as said:
        counted({"tp": 2}, replace(WHOLE, precision=PrecisionConfig(compute="bfloat16")), steps=1)
    return said.numbers


@pytest.mark.dist
def test_activations_and_their_gradients_travel_in_the_compute_format():
    activations = 2 * 16 * 32  # of a micro-batch, as the residual stream
    there_and_back = 2 * (2 * LAYERS + 1)  # attention and feed-forward, there and back; embedding, head
    for numbers in run_ranks(summed_by_format, 2):
        assert numbers == {"torch.bfloat16": MICRO_BATCHES * activations * there_and_back}
