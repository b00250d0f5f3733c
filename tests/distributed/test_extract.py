"""Extraction by several ranks, of a model that each holds or all hold together, against one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.run.identity import model_identity
from forge_interp.extraction.run.processes import Processes
from forge_interp.extraction.store import ActivationStore
from forge_model import DecoderConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_parallel import Env, MeshConfig, Plan, build_mesh, local_shard, materialize, parallelize
from forge_parallel.mesh import Mesh
from forge_parallel.testing import run_ranks
from torch import nn

pytestmark = pytest.mark.dist

VOCAB, TOKENS, SAMPLES, BATCH = 67, 12, 11, 2
SITES = ["layers.*:out", "layers.*.attention:attn.z", "layers.1.ffn:in", "head:out"]


def build(layout: str) -> nn.Module:
    """A small decoder with the same weights everywhere."""
    attention = GroupedQueryConfig(num_heads=4, num_kv_heads=2, qk_norm=True)
    config = DecoderConfig(vocab_size=VOCAB, dim=32, num_layers=2, max_tokens=TOKENS, attention=attention)
    mesh = build_mesh(MeshConfig(), Env.detect()) if layout == "fsdp" else Mesh(torch.device("cpu"))
    with torch.device("meta"):
        model = config.build()
    parallelize(model, mesh, Plan.of(model))
    materialize(model, torch.device("cpu"))
    initialize(model, 3, local_shard)
    if layout == "tensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        columns = dict.fromkeys(["layers.*.attention.w[qkv]", "layers.*.ffn.w_[gu]*"], ColwiseParallel())
        rows = dict.fromkeys(["layers.*.attention.wo", "layers.*.ffn.w_down"], RowwiseParallel())
        parallelize_module(model, init_device_mesh("cpu", (2,)), columns | rows)
    return model


def dataset(samples: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{"tokens": torch.randint(VOCAB, (TOKENS,), generator=generator)} for _ in range(samples)]


def extract(folder: str, layout: str, samples: int = SAMPLES, **options) -> str:
    out = f"{folder}/acts"
    extract_representations(
        build(layout), dataset(samples), SITES, out, batch_size=BATCH, tokens="tokens", **options
    )
    return out


def contents(path: str) -> dict[str, bytes]:
    found = Path(path)
    files = [found] if found.is_file() else sorted(p for p in found.rglob("*") if p.is_file())
    return {str(p.relative_to(found)): p.read_bytes() for p in files}


def values(path: str) -> dict[str, torch.Tensor]:
    store = ActivationStore.open(path)
    ids = {name: getattr(store, name) for name in ("sample_id", "position", "token_id")}
    return {site: store[site] for site in store} | ids


def assert_same_bits(found: str, expected: str):
    a, b = values(found), values(expected)
    assert list(a) == list(b)
    for name, tensor in b.items():
        assert torch.equal(a[name], tensor), name


def alone(folder: str, samples: int = SAMPLES) -> str:
    """What one process writes that knows nothing of ranks."""
    dist.destroy_process_group()
    try:
        return extract(folder, "plain", samples)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_extraction_by_ranks_that_each_hold_the_model_is_byte_identical(tmp_path):
    (tmp_path / "1").mkdir()
    [expected] = run_ranks(alone, 1, str(tmp_path / "1"))
    assert ActivationStore.open(expected).rows == SAMPLES * TOKENS
    for world_size in (2, 4):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        found = run_ranks(extract, world_size, str(folder), "plain")
        assert contents(found[0]) == contents(expected)
        assert [path.name for path in folder.iterdir()] == [Path(found[0]).name]


@pytest.mark.parametrize(("world_size", "samples"), [(2, SAMPLES), (4, SAMPLES), (4, 3)])
def test_extraction_of_a_sharded_model_has_the_bits_of_one_process(tmp_path, world_size, samples):
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    [expected] = run_ranks(alone, 1, str(tmp_path / "one"), samples)
    found = run_ranks(extract, world_size, str(tmp_path / "many"), "fsdp", samples)
    assert_same_bits(found[0], expected)
    assert ActivationStore.open(found[0]).rows == samples * TOKENS


def twice(folder: str) -> list[dict[str, bytes]]:
    """The bytes of a sharded extraction, and of a second one after a backward pass."""
    model = build("fsdp")
    found = []
    for name in ("first", "again"):
        out = Path(folder) / name
        extract_representations(model, dataset(), SITES, out, batch_size=BATCH, tokens="tokens")
        found.append(contents(str(out)))
        model(dataset()[0]["tokens"][None]).sum().backward()
        model.zero_grad()
    return found


def test_extraction_of_a_sharded_model_leaves_it_able_to_train(tmp_path):
    for first, again in run_ranks(twice, 2, str(tmp_path)):
        assert first == again


def identities(folder: str) -> list[dict]:
    """Of the model whole, sharded, gathered by a forward pass, and with one weight changed."""
    model = build("fsdp")
    found = [model_identity(build("plain")), model_identity(model)]
    with torch.no_grad():
        model(dataset()[0]["tokens"][None])
        found.append(model_identity(model))
        out = extract_sharded(folder, model)
        last = next(
            p for name, p in model.named_parameters() if "layers.0" in name and p.ndim == 2
        ).to_local()
        if dist.get_rank() == dist.get_world_size() - 1:
            last[-1, -1] += 1
    with pytest.raises(InterpError, match="model weights: "):
        extract_sharded(folder, model)
    return [*found, model_identity(model), ActivationStore.open(out).metadata["request"]["model"]]


def extract_sharded(folder: str, model: nn.Module) -> str:
    out = f"{folder}/acts"
    extract_representations(model, dataset(), SITES, out, batch_size=BATCH, tokens="tokens")
    return out


def test_identity_of_a_sharded_model_is_that_of_the_whole(tmp_path):
    for whole, sharded, gathered, changed, written in run_ranks(identities, 2, str(tmp_path)):
        assert whole == sharded == gathered == written
        assert whole["layout"] == changed["layout"] and whole["weights"] != changed["weights"]


def differing_on_one_rank(folder: str) -> str:
    """What each rank says if only the first one finds parts of another call."""
    model = build("fsdp")
    out = Path(extract_sharded(folder, model))
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "index.json").unlink()
        for number in range(3, 6):
            (out / f"part-{number:05d}.safetensors").unlink()
    dist.barrier()
    with torch.no_grad():
        next(model.parameters()).to_local().add_(1)
    with pytest.raises(InterpError) as caught:
        extract_sharded(folder, model)
    return str(caught.value)


def test_all_ranks_say_what_one_of_them_finds(tmp_path):
    assert all("model weights: " in said for said in run_ranks(differing_on_one_rank, 2, str(tmp_path)))


def of_mixed_precision() -> bool:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = model_identity(model)
    with torch.no_grad():
        model(torch.zeros(2, 4))
    return model_identity(model) == before


def test_identity_is_not_that_of_the_weights_that_a_pass_has_cast():
    assert run_ranks(of_mixed_precision, 2) == [True, True]


def who_draws() -> tuple[bool, bool]:
    together = Processes.of(nn.Linear(2, 2), None, None, None, True)
    alone = Processes.of(nn.Linear(2, 2), 1, 2, None, True)
    return together.is_first, alone.is_first


def test_one_rank_of_those_that_wait_for_each_other_draws():
    assert run_ranks(who_draws, 2) == [(True, True), (False, True)]


def by_one_writer(folder: str) -> str:
    return extract(folder, "tensor", rank=0, world_size=1, writes=dist.get_rank() == 0)


def by_all(folder: str) -> str:
    try:
        return extract(folder, "tensor")
    except InterpError as error:
        return str(error)


def test_extraction_of_a_tensor_parallel_model_wants_to_know_who_shares_batches(tmp_path):
    assert all("expected rank= and world_size=" in said for said in run_ranks(by_all, 2, str(tmp_path)))


def test_extraction_of_a_tensor_parallel_model_is_written_once_and_whole(tmp_path):
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    [expected] = run_ranks(alone, 1, str(tmp_path / "one"))
    found = values(run_ranks(by_one_writer, 2, str(tmp_path / "many"))[0])
    for name, tensor in values(expected).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def half(folder: str, rank: int) -> bool:
    """One of two processes that know nothing of each other."""
    dist.destroy_process_group()
    try:
        out = extract(folder, "plain", rank=rank, world_size=2)
        return (Path(out) / "index.json").exists()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_shards_of_processes_without_a_group_become_the_same_file(tmp_path):
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    [expected] = run_ranks(alone, 1, str(tmp_path / "one"))
    [first] = run_ranks(half, 1, str(tmp_path / "many"), 1)
    [second] = run_ranks(half, 1, str(tmp_path / "many"), 0)
    assert (first, second) == (False, True)
    assert contents(str(tmp_path / "many" / "acts")) == contents(expected)
