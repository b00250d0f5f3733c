"""Capture and edit on real gloo ranks, compiled and checkpointed, against one eager process."""

import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.causal.attribution import attribution_patching
from forge_interp.causal.patching import activation_patching
from forge_interp.causal.path_patching import path_patching
from forge_interp.errors import InterpError
from forge_interp.hooks.capture import capture
from forge_interp.hooks.edit import ablate, edit, patch, steer
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_parallel import (
    ActivationCheckpointingConfig,
    CompileConfig,
    Env,
    MeshConfig,
    ParallelConfig,
    Plan,
    build_mesh,
    local_shard,
    materialize,
    parallelize,
)
from forge_parallel.config import TensorParallelConfig
from forge_parallel.mesh import Mesh
from forge_parallel.tensor import local_part
from forge_parallel.testing import run_ranks
from torch import nn

pytestmark = pytest.mark.dist

VOCAB, TOKENS, ROWS, DIM, HEADS, KV_HEADS = 67, 12, 8, 32, 4, 2
LAYOUTS = {"fsdp2": (2, {}), "hsdp2x2": (4, {"dp_replicate": 2, "dp_shard": 2})}
OUTSIDE = ["embed:out", "layers.*:out", "layers.*:in", "norm:out", "head:out", ":out"]
INSIDE = ["layers.1.attention:out", "layers.*.ffn:in", "layers.0.attention.wq:out", "layers.2.ffn.w_down:in"]
ATTENTION = [
    f"layers.*.attention:attn.{name}"
    for name in ("q", "k", "v", "raw", "scores", "pattern", "z", "entropy", "sink")
]
EVERYTHING = OUTSIDE + INSIDE + ATTENTION


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5))


def mine(mesh: Mesh) -> torch.Tensor:
    return tokens().chunk(mesh.batch.size)[mesh.batch.rank]


def build(
    sizes: dict | None, options: dict | None = None, attention: GroupedQueryConfig | None = None
) -> tuple[nn.Module, Mesh]:
    """A small float64 decoder, the same weights everywhere; without `sizes`, not touched by parallelism."""
    attention = attention or GroupedQueryConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, qk_norm=True)
    config = DecoderConfig(vocab_size=VOCAB, dim=DIM, num_layers=3, max_tokens=TOKENS, attention=attention)
    mesh = Mesh(torch.device("cpu")) if sizes is None else build_mesh(MeshConfig(**sizes), Env.detect())
    with torch.device("meta"):
        model = config.build().double()
    parallelize(model, mesh, Plan.of(model), ParallelConfig(**(options or {})))
    materialize(model, torch.device("cpu"))
    initialize(model, 3, local_shard)
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).mul_(3)  # so that attention is not uniform
    return model, mesh


def tensor_parallel() -> nn.Module:
    """The same decoder, split over two ranks by torch's own plan: 2 heads and 1 key head on each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, _ = build(None)
    columns = dict.fromkeys(
        ["layers.*.attention.w[qkv]", "layers.*.ffn.w_gate", "layers.*.ffn.w_up"], ColwiseParallel()
    )
    rows = dict.fromkeys(["layers.*.attention.wo", "layers.*.ffn.w_down"], RowwiseParallel())
    return parallelize_module(model, init_device_mesh("cpu", (2,)), columns | rows)


def arrays(values) -> dict[str, np.ndarray]:
    return {key: value.detach().numpy() for key, value in values.items()}


def seen(model: nn.Module, x: torch.Tensor, sites: list[str]) -> dict[str, np.ndarray]:
    with torch.no_grad(), capture(model, sites) as acts:
        model(x)
    return arrays(acts)


def assert_near(found: dict, expected: dict, rows: slice = slice(None)):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value[rows], rtol=1e-9, atol=1e-9, err_msg=key)


def rows_of(rank: int, world_size: int) -> slice:
    return slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)


def captured(sizes: dict | None, options: dict | None = None) -> dict[str, np.ndarray]:
    model, mesh = build(sizes, options)
    return seen(model, mine(mesh), EVERYTHING)


@pytest.fixture(scope="module")
def single() -> dict[str, np.ndarray]:
    """What one process sees in a model that nobody has made parallel."""
    return captured(None)


def test_single_process_sees_what_there_is(single):
    assert len(single) == 10 + 6 + 9 * 3
    assert single["layers.2.attention:attn.pattern"].shape == (ROWS, HEADS, TOKENS, TOKENS)
    assert single["layers.0.attention:attn.k"].shape == (ROWS, KV_HEADS, TOKENS, DIM // HEADS)
    assert single["layers.1.attention:attn.pattern"][:, :, -1].std() > 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_capture_of_sharded_model_equals_one_process(single, layout):
    world_size, sizes = LAYOUTS[layout]
    for rank, found in enumerate(run_ranks(captured, world_size, sizes)):
        assert_near(found, single, rows_of(rank, world_size))


def captured_in_parallel_tensors() -> dict[str, np.ndarray]:
    return seen(tensor_parallel(), tokens(), EVERYTHING)


def test_capture_of_tensor_parallel_model_has_all_heads(single):
    for found in run_ranks(captured_in_parallel_tensors, 2):
        assert_near(found, single)


def captured_of_shared_heads() -> dict[str, np.ndarray]:
    """Two key heads on four ranks, and a vocabulary of 67."""
    whole = {"tensor_parallel": TensorParallelConfig(sequence=False)}
    return seen(build({"tp": 4}, whole)[0], tokens(), OUTSIDE + ATTENTION)


def test_capture_of_heads_that_ranks_share_has_each_once(single):
    for found in run_ranks(captured_of_shared_heads, 4):
        assert_near(found, {key: single[key] for key in found})
        assert found.keys() > {"head:out", "layers.0.attention:attn.k"}


def captured_where_the_model_takes_the_softmax(sizes: dict | None, attention: dict) -> dict[str, np.ndarray]:
    config = GroupedQueryConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, **attention)
    whole = {"tensor_parallel": TensorParallelConfig(sequence=False)}
    names = ["v", "pattern", "z", "entropy"] + ["scores"] * ("softcap" in attention)
    model, _ = build(sizes, whole if sizes else None, config)
    return seen(model, tokens(), [f"layers.*.attention:attn.{name}" for name in names])


@pytest.mark.parametrize("attention", [{"softcap": 2.0}, {"sinks": True}], ids=str)
def test_capture_of_spread_heads_is_whole_where_the_model_takes_the_softmax(attention):
    expected = captured_where_the_model_takes_the_softmax(None, attention)
    for found in run_ranks(captured_where_the_model_takes_the_softmax, 2, {"tp": 2}, attention):
        assert_near(found, expected)


def edits() -> dict:
    """One of each kind, and the last token patched."""
    generator = torch.Generator().manual_seed(1)
    return {
        "layers.0:out": steer(torch.randn(DIM, generator=generator), 0.5),
        "layers.1.ffn:out": ablate("zero"),
        "layers.2:in": patch(torch.randn(DIM, generator=generator), (slice(None), -1)),
    }


def edited(sizes: dict | None, attention: bool) -> dict[str, np.ndarray]:
    model, mesh = build(sizes)
    return logits_and_after(model, mine(mesh), attention)


def logits_and_after(model: nn.Module, x: torch.Tensor, attention: bool) -> dict[str, np.ndarray]:
    """Edited logits, and those after the edits are gone."""
    heads = {"layers.1.attention:attn.z": ablate("zero", (slice(None), 3))} if attention else {}
    with torch.no_grad():
        with edit(model, edits() | heads):
            changed = model(x)
        return arrays({"edited": changed, "plain": model(x)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edit_of_sharded_model_equals_one_process(layout):
    expected = edited(None, attention=True)
    assert np.abs(expected["edited"] - expected["plain"]).max() > 0.1
    world_size, sizes = LAYOUTS[layout]
    for rank, found in enumerate(run_ranks(edited, world_size, sizes, True)):
        assert_near(found, expected, rows_of(rank, world_size))


def edited_in_parallel_tensors() -> dict[str, np.ndarray]:
    return logits_and_after(tensor_parallel(), tokens(), attention=False)


def test_edit_of_whole_values_of_tensor_parallel_model_equals_one_process():
    expected = edited(None, attention=False)
    for found in run_ranks(edited_in_parallel_tensors, 2):
        assert_near(found, expected)


def edited_heads(part: str, attention: dict) -> str:
    config = GroupedQueryConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, **attention)
    model, _ = build({"tp": 2}, None, config) if attention else (tensor_parallel(), None)
    with pytest.raises(InterpError) as caught, edit(model, {f"layers.1.attention:attn.{part}": torch.neg}):
        model(tokens())
    return str(caught.value)


@pytest.mark.parametrize(("part", "attention"), [("z", {}), ("scores", {}), ("scores", {"softcap": 2.0})])
def test_edit_of_heads_that_are_spread_over_ranks_is_refused(part, attention):
    for message in run_ranks(edited_heads, 2, part, attention):
        assert "only a part of it on this rank" in message


def trained(sizes: dict | None, options: dict, watch: bool) -> dict[str, np.ndarray]:
    """Values, gradients of activations and of a parameter from one backward pass, with or without capture."""
    model, mesh = build(sizes, options)
    x = mine(mesh)
    labels = x.roll(-1, 1)

    def backward():
        model(x, labels=labels, loss_fn=LossConfig(chunk_tokens=5).build()).total.backward()

    found = {}
    if "compile" in options:
        backward()
        model.zero_grad()
    if watch:
        with capture(
            model, ["layers.*:out", "layers.*.attention:attn.z", "layers.1.ffn:in"], grad=True
        ) as acts:
            backward()
        found = arrays(acts) | {f"gradient of {key}": g.numpy() for key, g in acts.gradients.items()}
    else:
        backward()
    for name in ("layers.0.attention.wq.weight", "head.weight"):
        gradient = model.get_parameter(name).grad
        found[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).numpy()
    return found


def without_weights(found: dict) -> dict:
    return {key: value for key, value in found.items() if not key.endswith("weight")}


CHECKPOINTED = ActivationCheckpointingConfig(mode="full")
COMPILED = CompileConfig(enabled=True, backend="aot_eager")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": CHECKPOINTED},
        {"activation_checkpointing": CHECKPOINTED, "compile": COMPILED},
    ],
    ids=["plain", "checkpointed", "checkpointed-compiled"],
)
def test_gradients_of_activations_are_those_of_one_process(options):
    expected = trained(None, {}, watch=True)
    assert any(key.startswith("gradient of layers.1.ffn") for key in expected)
    assert not any("#" in key for key in expected)
    plain = trained(None, {}, watch=False)
    for rank, found in enumerate(run_ranks(trained, 2, {}, options, True, timeout_s=120)):
        assert_near(without_weights(found), without_weights(expected), rows_of(rank, 2))
        for name, gradient in plain.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-4, err_msg=name)


def patched(sizes: dict | None, options: dict) -> dict[str, np.ndarray]:
    """Effects on the whole batch, by patching and from gradients, and a step of training after that."""
    model, mesh = build(sizes, options)
    clean = mine(mesh)
    corrupted = clean.clone()
    corrupted[:, 3:5] = (corrupted[:, 3:5] + 7) % VOCAB

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, 3].sum() - logits[:, -1, 5].sum()

    found = {}
    for patching in (activation_patching, attribution_patching):
        by_layer = patching(
            model, clean, corrupted, "layers.*:out", metric, where={"four": (..., 4, slice(None))}
        )
        by_head = patching(model, clean, corrupted, "layers.*.attention:attn.z", metric, where="heads")
        found |= {f"{patching.__name__} {t.axes[1]}": t.effect for t in (by_layer, by_head)}
    paths = ["layers.*.attention:out", "layers.*.ffn:out"]
    found["path"] = path_patching(model, clean, corrupted, paths, "norm:in", metric, frozen=paths).effect
    model(clean, labels=clean, loss_fn=LossConfig().build()).total.backward()
    gradient = model.get_parameter("head.weight").grad
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found | {"weight": whole.detach().numpy()}


@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": CHECKPOINTED}],
    ids=["plain", "checkpointed"],
)
def test_patching_of_a_sharded_model_adds_up_to_one_process(options):
    expected = patched(None, {})
    assert all(np.abs(effect).max() > 1e-2 for effect in expected.values())
    parts = run_ranks(patched, 2, {}, options, timeout_s=120)
    for name, effect in expected.items():
        if name == "weight":  # reduced in float32
            np.testing.assert_allclose(parts[0][name], effect, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_allclose(
                parts[0][name] + parts[1][name], effect, rtol=1e-9, atol=1e-9, err_msg=name
            )


def late_in_compiled(sizes: dict | None) -> tuple[dict[str, np.ndarray], list[float], int]:
    """Compile and run first, then look inside; the differences of what it computes before and after."""
    from torch._dynamo.utils import counters

    model, mesh = build(sizes, {"compile": COMPILED})
    x = mine(mesh)
    with torch.no_grad():
        before = model(x)
        model(x)
        compiled = counters["stats"]["unique_graphs"]
        assert compiled > 0
        found = seen(model, x, EVERYTHING)
        after = model(x)
    return found, bool(torch.equal(before, after)), counters["stats"]["unique_graphs"] - compiled


def test_capture_added_after_compilation_sees_everything_and_compiles_nothing_anew(single):
    for rank, (found, is_same, recompiled) in enumerate(run_ranks(late_in_compiled, 2, {}, timeout_s=120)):
        assert_near(found, single, rows_of(rank, 2))
        assert is_same
        assert recompiled == 0


def stepped(sizes: dict, watch: bool) -> np.ndarray:
    """Losses and logits of three optimizer steps: a capture between them must leave nothing behind."""
    model, mesh = build(sizes)
    x = mine(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        if watch:
            seen(model, x, EVERYTHING)
        terms = model(x, labels=x, loss_fn=LossConfig().build())
        (terms.total / (ROWS * TOKENS)).backward()
        losses.append(mesh.loss.sum_(terms.total.detach().clone()).item())
        optimizer.step()
        optimizer.zero_grad()
        if watch:
            seen(model, x, EVERYTHING)
    with torch.no_grad():
        return np.array([*losses, *model(x).flatten().tolist()])


def test_capture_between_steps_of_a_sharded_model_changes_no_bit():
    expected = run_ranks(stepped, 2, {}, False)
    for found, reference in zip(run_ranks(stepped, 2, {}, True), expected, strict=True):
        np.testing.assert_array_equal(found, reference)
    assert len(set(expected[0][:3])) == 3


def stopped(sizes: dict) -> str:
    model, mesh = build(sizes)
    with pytest.raises(InterpError) as caught, capture(model, "layers.1:out", stop=True):
        model(mine(mesh))
    return str(caught.value)


def test_early_stop_of_a_sharded_model_is_refused():
    for message in run_ranks(stopped, 2, {}):
        assert "stop=True on an FSDP model" in message


def moments(world_size: int) -> dict[str, np.ndarray]:
    """Moments of this rank's rows around its own centre, added up over ranks."""
    rank = Env.detect().rank if world_size > 1 else 0
    generator = torch.Generator().manual_seed(2)
    blocks = {
        "a": torch.randn(101, 6, generator=generator) + 50,
        "b": torch.randn(101, 4, generator=generator),
    }
    own = Moments.of({name: x.tensor_split(world_size)[rank] for name, x in blocks.items()})
    own = own.all_reduce() if world_size > 1 else own
    found = {"count": own.count, "ab": own.comoment("a", "b")}
    found |= {"power": own.power("a"), "cross_power": own.cross_power("a", "b")}
    return {name: np.asarray(value) for name, value in found.items()}


def test_moments_added_over_ranks_equal_one_process():
    expected = moments(1)
    for found in run_ranks(moments, 2, 2):
        assert found["count"] == 101
        for name in ("count", "ab", "power", "cross_power"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-9, err_msg=name)
