from collections.abc import Mapping

import pytest
import torch
from forge_parallel.apply import load_full, materialize, parallelize, set_sync
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import (
    ActivationCheckpointingConfig,
    FSDPConfig,
    MeshConfig,
    ParallelConfig,
    PrecisionConfig,
)
from forge_parallel.env import Env
from forge_parallel.error import ParallelError
from forge_parallel.grads import clip_, global_norm
from forge_parallel.mesh import Mesh, build_mesh
from forge_parallel.plan import Plan
from forge_parallel.tensor import local_part
from forge_parallel.testing import assert_matches_single, run_ranks
from torch import nn

PLAN = {"blocks": "blocks.*", "units": [["inlet"], ["norm", "outlet"]]}
GLOBAL_BATCH = 8
CPU = torch.device("cpu")


class Net(nn.Module):
    """A residual net of this test's own; nothing of forge-model."""

    def __init__(self, dim: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 17), nn.GELU(), nn.Linear(17, dim)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.outlet = nn.Linear(dim, 3)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outlet(self.norm(x))


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: p.detach() for name, p in Net().named_parameters()}


def curves(sizes: dict, options: dict, steps: int = 10) -> dict[str, list[float]]:
    """Ten clipped AdamW steps with accumulation over two micro-batches."""
    env = Env.detect()
    wrapped = env.world_size > 1 or options
    mesh = build_mesh(MeshConfig(**sizes), env) if wrapped else Mesh(CPU)  # alone: the model as it came
    with torch.device("meta"):
        model = Net()
    parallelize(model, mesh, Plan.of(PLAN), ParallelConfig(**options))
    materialize(model, CPU)
    load_full(model, weights())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(GLOBAL_BATCH, 5, generator=generator)
        y = torch.randn(GLOBAL_BATCH, 3, generator=generator) * 10
        mine = torch.arange(GLOBAL_BATCH).chunk(mesh.batch.size)[mesh.batch.rank]
        total = torch.zeros(())
        for index, rows in enumerate(mine.chunk(2)):
            set_sync(model, last=index == 1)
            loss = (model(x[rows].to(model_dtype(options))).float() - y[rows]).square().sum() / GLOBAL_BATCH
            loss.backward()
            total += loss.detach()
        norm = global_norm(model.parameters(), mesh)
        clip_(model.parameters(), 1.0, norm)
        assert global_norm(model.parameters(), mesh) <= 1.0 + 1e-4
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mesh.loss.sum_(total).item())
        norms.append(norm.item())
    return {"loss": losses, "grad_norm": norms}


def model_dtype(options: dict) -> torch.dtype:
    precision = options.get("precision", PrecisionConfig())
    return getattr(torch, precision.compute_dtype("cpu"))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, {}),
        (3, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(4, {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
)
def test_parallelize_equals_one_process(world_size, sizes):
    assert_matches_single(curves, world_size, sizes, {}, rtol={"loss": 1e-5, "grad_norm": 1e-4})


@pytest.mark.slow
@pytest.mark.dist
def test_parallelize_equals_one_process_when_checkpointed_and_compiled():
    options = {
        "activation_checkpointing": ActivationCheckpointingConfig(mode="full"),
        "compile": CompileConfig(enabled=True, backend="aot_eager"),
    }
    compared = run_ranks(curves, 2, {}, options, 3, timeout_s=120)
    plain = run_ranks(curves, 1, {}, {}, 3)[0]
    assert compared[0]["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert compared[0]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


@pytest.mark.dist
def test_parallelize_in_bf16_stays_near_float32():
    bf16 = run_ranks(curves, 2, {}, {"precision": PrecisionConfig(compute="bfloat16")})[0]
    plain = run_ranks(curves, 1, {}, {})[0]
    assert bf16["loss"] != plain["loss"]
    assert bf16["loss"] == pytest.approx(plain["loss"], rel=2e-2)


def dtypes_in_bf16() -> dict[str, list[str]]:
    """The formats of all that a step in bf16 keeps, and of what a block computes in."""
    mesh = build_mesh(MeshConfig(), Env.detect())
    config = ParallelConfig(precision=PrecisionConfig(compute="bfloat16"))
    model = parallelize(Net(), mesh, Plan.of(PLAN), config)
    load_full(model, weights())
    optimizer = torch.optim.AdamW(model.parameters())
    computed = []
    model.get_submodule("blocks.0").register_forward_hook(lambda m, x, y: computed.append(y))
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    kept = {
        "masters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "moments": moments,
        "computed": computed,
    }
    return {name: sorted({str(t.dtype) for t in tensors}) for name, tensors in kept.items()}


@pytest.mark.dist
def test_parallelize_in_bf16_keeps_float32_masters_gradients_and_moments():
    wide = {name: ["torch.float32"] for name in ("masters", "gradients", "moments")}
    assert run_ranks(dtypes_in_bf16, 2)[0] == wide | {"computed": ["torch.bfloat16"]}


def wide_gradient() -> dict[str, list[float]]:
    """The gradient norm of a float64 model; nothing on the way may be rounded to float32."""
    env = Env.detect()
    mesh = build_mesh(MeshConfig(), env) if env.world_size > 1 else Mesh(CPU)
    torch.manual_seed(0)
    model = parallelize(Net().double(), mesh, Plan.of(PLAN))
    x = torch.randn(GLOBAL_BATCH, 5, dtype=torch.float64).chunk(env.world_size)[env.rank]
    model(x).square().sum().backward()
    return {"grad_norm": [global_norm(model.parameters(), mesh).item()]}


@pytest.mark.dist
def test_parallelize_keeps_the_precision_of_a_float64_model():
    assert_matches_single(wide_gradient, 2, rtol={"grad_norm": 1e-13})


def masters_of_a_bf16_model(options: dict) -> list[str]:
    model = Net().to(torch.bfloat16)
    parallelize(model, build_mesh(MeshConfig(), Env.detect()), Plan.of(PLAN), ParallelConfig(**options))
    return sorted({str(parameter.dtype) for parameter in model.parameters()})


@pytest.mark.dist
def test_parallelize_gives_a_model_that_comes_in_bf16_float32_masters_unless_asked():
    for compute in ("float32", "bfloat16"):
        options = {"precision": PrecisionConfig(compute=compute)}
        assert run_ranks(masters_of_a_bf16_model, 1, options) == [["torch.float32"]]
    pure = {"precision": PrecisionConfig(pure_bf16=True)}
    assert run_ranks(masters_of_a_bf16_model, 1, pure) == [["torch.bfloat16"]]


def nan_on_one_rank() -> list[float]:
    env = Env.detect()
    mesh = build_mesh(MeshConfig(), env)
    model = parallelize(Net(), mesh, Plan.of(PLAN))
    load_full(model, weights())
    loss = model(torch.ones(2, 5)).sum()
    (loss * (float("nan") if env.rank == 1 else 1.0)).backward()
    return [global_norm(model.parameters(), mesh).item()]


@pytest.mark.dist
def test_global_norm_is_nan_on_all_ranks_when_one_gradient_is():
    assert all(norm != norm for (norm,) in run_ranks(nan_on_one_rank, 2))


def test_parallelize_twice_is_an_error():
    model = parallelize(Net(), Mesh(CPU), Plan.of(PLAN))
    with pytest.raises(ParallelError, match="before"):
        parallelize(model, Mesh(CPU), Plan.of(PLAN))


def test_parallelize_refuses_a_pattern_that_names_nothing():
    with pytest.raises(ParallelError, match=r"layers\.\*.*blocks\.\*"):
        parallelize(Net(), Mesh(CPU), Plan.of({"blocks": "layers.*"}))


def test_plan_refuses_unknown_roles():
    with pytest.raises(ParallelError, match="sideways"):
        Plan.of({"blocks": "b.*", "tensor": {"b.*": "sideways"}})


def test_materialize_poisons_what_nobody_wrote():
    with torch.device("meta"):
        model = Net()
    materialize(model, CPU)
    assert all(local_part(p).isnan().all() for p in model.parameters())


def test_load_full_reads_each_tensor_once():
    read = []

    class Lazy(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

        items = Mapping.items

    model = Net()
    load_full(model, Lazy(weights()))
    assert sorted(read) == sorted(weights())
    assert all(torch.equal(value, weights()[name]) for name, value in model.named_parameters())


def test_load_full_lists_what_does_not_fit():
    tensors = weights()
    tensors["extra"] = tensors.pop("norm.bias")
    tensors["inlet.bias"] = torch.zeros(3)
    with pytest.raises(ParallelError, match=r"norm\.bias.*extra.*inlet\.bias"):
        load_full(Net(), tensors)


def test_pure_bf16_has_bf16_masters():
    model = parallelize(
        Net(), Mesh(CPU), Plan.of(PLAN), ParallelConfig(precision=PrecisionConfig(pure_bf16=True))
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def gradient_elements(when: str) -> tuple[int, int, int]:
    """Gradients that a rank holds between two micro-batches: all, those of its own part, and of how many."""
    mesh = build_mesh(MeshConfig(), Env.detect())
    model = parallelize(Net(), mesh, Plan.of(PLAN), ParallelConfig(fsdp=FSDPConfig(reduce_gradients=when)))  # pyright: ignore[reportArgumentType]
    load_full(model, weights())
    set_sync(model, last=False)
    model(torch.ones(2, 5)).sum().backward()
    own = sum(local_part(p.grad).numel() for p in model.parameters() if p.grad is not None)
    total = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()  # pyright: ignore[reportCallIssue]
    gathered = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
    return own + gathered, own, total


@pytest.mark.dist
def test_reduce_gradients_every_micro_batch_holds_only_the_part_of_a_rank():
    full = run_ranks(gradient_elements, 2, "last_micro_batch")
    cut = run_ranks(gradient_elements, 2, "every_micro_batch")
    assert all(held == total and own == 0 for held, own, total in full)
    assert all(held == own for held, own, _ in cut)
    assert sum(held for held, _, _ in cut) == cut[0][2]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "sizes", "fsdp"),
    [
        (4, {"dp_replicate": 2}, FSDPConfig(reduce_gradients="every_micro_batch")),
        (2, {}, FSDPConfig(offload=True, prefetch=2)),
        (2, {}, FSDPConfig(reshard="after_step")),
    ],
    ids=["reduced-every-micro-batch", "offloaded", "gathered-once-a-step"],
)
def test_ways_of_fsdp_equal_one_process(ranks, sizes, fsdp):
    found = run_ranks(curves, ranks, sizes, {"fsdp": fsdp}, timeout_s=120)
    plain = run_ranks(curves, 1, {}, {}, timeout_s=120)[0]
    for rank in found:
        assert rank["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert rank["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


def reduced_after(last: bool) -> bool:
    mesh = build_mesh(MeshConfig(), Env.detect())
    model = parallelize(Net(), mesh, Plan.of(PLAN))
    load_full(model, weights())
    set_sync(model, last=last)
    model(torch.ones(2, 5)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize("last", [False, True])
def test_set_sync_reduces_gradients_only_in_the_last_backward(last):
    assert run_ranks(reduced_after, 2, last) == [last] * 2
