import json
import weakref

import pytest
import torch
from forge_interp import weights
from forge_interp.errors import InterpError
from forge_interp.weights import load_weights
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    """A shared weight, a buffer of each kind, one buffer that is not saved."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked.fill_(seed)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.full((3,), float(seed)), persistent=False)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of it holds: shared tensors once."""
    return {name: t.clone() for name, t in model.state_dict().items() if name != "head.weight"}


def assert_same(model: nn.Module, reference: nn.Module):
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.fixture
def file(tmp_path):
    save_file(tensors(Net(1)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def shard(folder, held, cuts=2):
    """The same tensors in several files with an index."""
    weight_map = {}
    for index in range(cuts):
        part = {name: held[name] for name in sorted(held)[index::cuts]}
        save_file(part, folder / f"part-{index}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{index}.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_load_weights_gives_every_bit_and_leaves_the_rest(file):
    model = Net(2).eval()
    model.norm.train()
    assert load_weights(model, file) is model
    assert_same(model, Net(1))
    assert model.head.weight is model.embed.weight
    assert model.table.tolist() == [2.0] * 3
    assert model.norm.training and not model.training


def test_load_weights_reads_folders_and_indices(tmp_path, file):
    assert_same(load_weights(Net(2), tmp_path), Net(1))
    save_file({"lora": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    assert_same(load_weights(Net(2), tmp_path), Net(1))
    (tmp_path / "many").mkdir()
    index = shard(tmp_path / "many", tensors(Net(3)))
    assert_same(load_weights(Net(2), str(index)), Net(3))
    assert_same(load_weights(Net(2), tmp_path / "many"), Net(3))
    save_file(tensors(Net(4)), tmp_path / "many" / "consolidated.safetensors")
    assert_same(load_weights(Net(2), tmp_path / "many"), Net(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_load_weights_keeps_the_dtype_of_the_module(file, dtype):
    model = load_weights(Net(2).to(dtype), file)
    assert model.embed.weight.dtype == dtype
    assert torch.equal(model.embed.weight, Net(1).embed.weight.to(dtype))
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_load_weights_takes_the_dtype_it_is_told(file):
    model = load_weights(Net(2), file, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.head.weight is model.embed.weight
    assert model.norm.num_batches_tracked.item() == 1
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert model.table.dtype == torch.float32
    with pytest.raises(InterpError, match="expected a floating-point one"):
        load_weights(model, file, dtype=torch.int8)


def test_load_weights_lists_everything_wrong_at_once_and_changes_nothing(tmp_path):
    held = tensors(Net(1))
    held["layers.0.weighty"] = held.pop("layers.0.weight")
    held["layers.1.bias"] = torch.zeros(5)
    held["norm.weight"] = torch.zeros(4, dtype=torch.int64)
    held["surplus"] = torch.zeros(2)
    save_file(held, tmp_path / "model.safetensors")
    model = Net(2)
    with pytest.raises(InterpError) as caught:
        load_weights(model, tmp_path, dtype=torch.float64)
    lines = str(caught.value).splitlines()
    assert sorted(line.strip() for line in lines[1:]) == [
        "dtype: norm.weight is integer in the file, floating point in the model",
        "missing: layers.0.weight [4, 4]; near layers.0.weighty",
        "shape: layers.1.bias is [5] in the file, [4] in the model",
        "unexpected: layers.0.weighty [4, 4]; near layers.0.weight",
        "unexpected: surplus [2]",
    ]
    assert "Net" in lines[0]
    assert_same(model, Net(2))
    assert model.embed.weight.dtype == torch.float32


@pytest.mark.parametrize("old", ["model.", ""])
def test_load_weights_names_the_prefix_that_would_fit_and_takes_it(tmp_path, old):
    held = {old + name: tensor for name, tensor in tensors(Net(1)).items()}
    save_file(held | {"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    outer = nn.ModuleDict({"model": Net(2)}) if not old else Net(2)
    rename = {"model.": ""} if old else {"": "model."}
    with pytest.raises(
        InterpError, match=r"10 names fit with rename=\{'(model\.)?': '(model\.)?'\}"
    ) as caught:
        load_weights(outer, tmp_path)
    assert str(caught.value).endswith(f"rename={rename}")
    load_weights(outer, tmp_path, rename=rename | {"lm_head.": None})
    assert_same(outer if old else outer["model"], Net(1))


def test_load_weights_names_some_of_many_tensors_that_do_not_fit_and_the_prefix(tmp_path):
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2000))
    held = {f"model.{name}": t.clone() for name, t in model.state_dict().items()}
    save_file(held | {"teacher.7.weight": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(InterpError, match=r"2000 names fit with rename=\{'model\.': ''\}") as caught:
        load_weights(model, tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 20 + 1 + 20 + 1 + 1
    assert lines[21].strip() == "missing: 1980 more" and lines[42].strip() == "unexpected: 1981 more"


def test_load_weights_renames_by_function_and_reports_where_a_name_came_from(file):
    swapped = {"layers.0": "layers.1", "layers.1": "layers.0"}
    model = load_weights(Net(2), file, rename=lambda name: swapped.get(name[:8], name[:8]) + name[8:])
    assert torch.equal(model.layers[0].weight, Net(1).layers[1].weight)
    with pytest.raises(
        InterpError, match=r"twice: layers\.0\.bias and layers\.1\.bias would both be layers\.0"
    ):
        load_weights(model, file, rename={"layers.1.": "layers.0."})
    with pytest.raises(InterpError, match=r"unexpected: norm\.weight \[4\] \(renamed to nrom\.weight\)"):
        load_weights(model, file, rename={"norm.": "nrom."})


def test_load_weights_takes_any_name_of_a_shared_tensor_but_no_contradiction(tmp_path):
    held = tensors(Net(1))
    embed = held.pop("embed.weight")
    save_file(held | {"head.weight": embed}, tmp_path / "head.safetensors")
    assert_same(load_weights(Net(2), tmp_path / "head.safetensors"), Net(1))
    save_file(held | {"head.weight": embed, "embed.weight": embed.clone()}, tmp_path / "both.safetensors")
    assert_same(load_weights(Net(2), tmp_path / "both.safetensors"), Net(1))
    save_file(held | {"head.weight": embed + 1, "embed.weight": embed}, tmp_path / "differ.safetensors")
    with pytest.raises(InterpError, match=r"shared: embed\.weight and head\.weight are one in the model"):
        load_weights(Net(2), tmp_path / "differ.safetensors")


def test_load_weights_sees_through_compile_and_checkpoint_wrappers(file):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net(2)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    load_weights(torch.compile(model, backend="eager"), file)
    assert torch.equal(model.layers[0]._checkpoint_wrapped_module.weight, Net(1).layers[0].weight)
    assert torch.equal(model.layers[1]._orig_mod.weight, Net(1).layers[1].weight)


def test_load_weights_refuses_a_model_without_memory(file):
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(7, 4)})
    with pytest.raises(InterpError, match=r"no memory, such as embed\.weight"):
        load_weights(model, file)
    with pytest.raises(InterpError, match=r"run lazy modules once"):
        load_weights(nn.LazyLinear(3), file)


def test_load_weights_says_what_is_wrong_with_the_files(tmp_path, file):
    def refuses(path, match):
        with pytest.raises(InterpError, match=match):
            load_weights(Net(2), path)

    refuses(tmp_path / "nothing", "there is no")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", r"holds no \*\.safetensors")
    index = shard(tmp_path / "empty", tensors(Net(1)))
    (tmp_path / "empty" / "part-1.safetensors").rename(tmp_path / "a.safetensors")
    refuses(index, r"names part-1\.safetensors, which are not beside it")
    for text in ("[1]", "{}", "half a fi", '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}'):
        index.write_text(text)
        refuses(index, "expected JSON with 'weight_map'")
    index.unlink()
    (tmp_path / "empty" / "b.safetensors").write_bytes(file.read_bytes())
    refuses(tmp_path / "empty", "give the one you mean")
    whole = file.read_bytes()
    for kept in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:kept])
        refuses(file, "cannot be read as safetensors")


def test_load_weights_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    shard(tmp_path, tensors(Net(1)))
    read = []

    def copy(target, source):
        assert all(earlier() is None for earlier in read)
        read.append(weakref.ref(source))

    monkeypatch.setattr(weights, "_copy", copy)
    load_weights(Net(2), tmp_path)
    assert len(read) == len(tensors(Net(1)))
