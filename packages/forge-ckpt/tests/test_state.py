import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forge_ckpt import CheckpointError, Snapshot, Store, TrainState, Weights, write_weights
from forge_ckpt.cli import main
from forge_ckpt.layout import Entry
from forge_ckpt.state import _blank
from safetensors.torch import save_file
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 6, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.outer(self.norm(self.inner(x)))


class Averaged(torch.optim.Optimizer):
    """SGD that keeps numbers where Schedule-Free and Prodigy do: in groups and beside tensors."""

    def __init__(self, params, lr):
        defaults = dict(lr=lr, k=0, weight_sum=0.0, lr_max=-1.0, train_mode=False, d=torch.tensor(1.0))
        super().__init__(params, defaults | {"betas": (0.9, 0.95), "history": []})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["train_mode"] = True
            group["weight_sum"] += 1 / group["k"] ** 0.3
            group["lr_max"] = math.inf
            group["d"] *= 1.1
            group["betas"] = (0.9, 1 - 0.05 / group["k"])
            group["history"] = [*group["history"], group["weight_sum"], None, "x"]
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 1 / state["count"])
                p -= group["lr"] * group["d"] * state["mean"] / (group["weight_sum"] + len(group["history"]))


OPTIMIZERS = {
    "averaged": lambda p: Averaged(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def train(model, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("middle", [1, 3, 5])
def test_train_state_resumes_bit_identical_at_every_midpoint(tmp_path, kind, middle):
    torch.manual_seed(0)
    model = Tied()
    whole, cut = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = OPTIMIZERS[kind](whole.parameters())
    train(whole, optimizer, 0, 6)

    first = OPTIMIZERS[kind](cut.parameters())
    state = TrainState([cut], first)
    train(cut, first, 0, middle)
    snapshot = state.capture({"note": 1})
    Store(tmp_path).save(middle, snapshot)

    torch.manual_seed(9)
    fresh = Tied()
    # another order of parameters: state is found by name
    groups = [{"params": [p]} for p in reversed(list(fresh.parameters()))]
    second = OPTIMIZERS[kind](groups)
    state = TrainState([fresh], second)
    found = Store(tmp_path).resume(state.targets)
    assert found is not None and found.meta["note"] == 1
    state.restore(found.values)
    train(fresh, second, middle, 6)
    expected, now = TrainState([whole], optimizer).capture().tensors, state.capture().tensors
    assert now.keys() == expected.keys()
    for key, value in now.items():
        assert torch.equal(value, expected[key]), key
    for group in second.param_groups:
        for key in group.keys() - {"params"}:
            ours, theirs = group[key], optimizer.param_groups[0][key]
            assert type(ours) is type(theirs) and ours == theirs, key
    for p, q in zip(fresh.parameters(), whole.parameters(), strict=True):
        assert second.state[p].get("count") == optimizer.state[q].get("count")


def test_train_state_keeps_what_the_new_configuration_says_and_restores_what_has_moved(tmp_path):
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    first = torch.optim.AdamW(old.parameters(), lr=0.01, betas=(0.9, 0.95), foreach=True)
    state = TrainState([old], first)
    first.param_groups[0]["lr"] = 0.005
    snapshot = state.capture()
    second = torch.optim.AdamW(new.parameters(), lr=0.02, betas=(0.8, 0.95), fused=True)
    TrainState([new], second).restore(snapshot.values)
    group = second.param_groups[0]
    assert (group["lr"], group["betas"], group["foreach"], group["fused"]) == (0.005, (0.8, 0.95), None, True)


def test_train_state_of_an_optimizer_that_has_stepped_already_loses_nothing():
    model = nn.Linear(6, 6)
    optimizer = OPTIMIZERS["averaged"](model.parameters())
    train(model, optimizer, 0, 2)
    fresh = nn.Linear(6, 6)
    other = OPTIMIZERS["averaged"](fresh.parameters())
    TrainState([fresh], other).restore(TrainState([model], optimizer).capture().values)
    assert other.param_groups[0]["k"] == 2


def test_train_state_refuses_groups_that_disagree():
    model, fresh = nn.Linear(6, 6), nn.Linear(6, 6)
    apart = OPTIMIZERS["averaged"]([{"params": [p]} for p in model.parameters()])
    state = TrainState([model], apart)
    apart.param_groups[0]["k"], apart.param_groups[1]["k"] = 3, 5
    snapshot = state.capture()
    with pytest.raises(CheckpointError, match=r"'k'.*3.*5.*weight.*bias"):
        TrainState([fresh], OPTIMIZERS["averaged"](fresh.parameters())).restore(snapshot.values)


def test_train_state_refuses_two_parts_with_one_name():
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(CheckpointError, match="bias, weight"):
        TrainState(parts, torch.optim.SGD([p for part in parts for p in part.parameters()], lr=1))


def test_train_state_refuses_what_is_no_number():
    model = nn.Linear(6, 6)
    optimizer = OPTIMIZERS["averaged"](model.parameters())
    state = TrainState([model], optimizer)
    optimizer.param_groups[0]["k"] = object()
    with pytest.raises(CheckpointError, match=r"'k' of Averaged.*object"):
        state.capture()


def test_train_state_finds_buffers_that_were_bound_anew():
    model = Tied()
    state = TrainState([model], torch.optim.SGD(model.parameters(), lr=1))
    model.norm.running_mean = torch.full((6,), 2.0)
    assert torch.equal(state.capture().tensors["model.norm.running_mean"], torch.full((6,), 2.0))
    state.targets({})["model.norm.running_mean"].fill_(3)
    assert torch.equal(model.norm.running_mean, torch.full((6,), 3.0))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_snapshot_stays_when_training_goes_on(kind):
    model = Tied()
    optimizer = OPTIMIZERS[kind](model.parameters())
    state, meta = TrainState([model], optimizer), {"progress": {"step": 1}}
    train(model, optimizer, 0, 1)
    snapshot = state.capture(meta)
    before = copy.deepcopy(snapshot)
    train(model, optimizer, 1, 3)
    meta["progress"]["step"] = 2
    assert snapshot.meta == before.meta
    for key, value in snapshot.tensors.items():
        assert torch.equal(value, before.tensors[key]), key
    assert state.capture(meta).meta["progress"]["step"] == 2


def test_snapshot_that_is_not_copied_is_the_live_state():
    model = nn.Linear(2, 2)
    state = TrainState([model], torch.optim.SGD(model.parameters(), lr=1))
    assert state.capture(copy=False).tensors["model.weight"] is model.weight


def test_train_state_saves_shared_parameters_once_and_no_scratch():
    keys = TrainState([Tied()], torch.optim.SGD([torch.zeros(1)], lr=1)).capture().tensors.keys()
    assert "model.inner.weight" in keys and "model.outer.weight" not in keys
    assert "model.norm.running_mean" in keys and "model.scratch" not in keys


def test_train_state_refuses_optimizer_state_of_a_parameter_there_is_not(tmp_path):
    model = Tied()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 0, 1)
    Store(tmp_path).save(1, TrainState([model], optimizer).capture())
    other = nn.Linear(6, 6)
    state = TrainState([other], OPTIMIZERS["adamw"](other.parameters()))
    with pytest.raises(CheckpointError, match=r"optimizer.exp_avg.inner.weight is not wanted"):
        Store(tmp_path).resume(state.targets)


@pytest.mark.parametrize("shard_bytes", [10**9, 300])
def test_weights_come_back_in_one_file_or_several(tmp_path, shard_bytes):
    tensors = {f"w{i}": torch.randn(8, 8) for i in range(4)} | {"half": torch.randn(3).bfloat16()}
    write_weights(tmp_path / "out", tensors, {"model_type": "x"}, shard_bytes)
    weights = Weights(tmp_path / "out")
    assert set(weights) == set(tensors)
    assert all(torch.equal(weights[key], value) for key, value in tensors.items())
    assert weights.config() == {"model_type": "x"}
    with pytest.raises(CheckpointError, match="exists"):
        write_weights(tmp_path / "out", tensors, {})


def test_weights_with_a_lost_shard_are_refused(tmp_path):
    write_weights(tmp_path / "out", {f"w{i}": torch.randn(8, 8) for i in range(3)}, {}, 300)
    next((tmp_path / "out").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="model-00002"):
        Weights(tmp_path / "out")


def test_weights_that_are_a_folder_or_change_while_they_are_read_are_an_error_that_names_the_file(tmp_path):
    write_weights(tmp_path / "out", {"w": torch.zeros(2)}, {})
    path = tmp_path / "out" / "model.safetensors"
    weights = Weights(tmp_path / "out")
    path.write_bytes(b"xx")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        weights["w"]
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        weights["w"]
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        Weights(tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["[]", "{}", "{", "", "\xff", "[" * 100_000, '{"weight_map": []}', '{"weight_map": {"w": 1}}']
)
def test_weights_with_an_index_or_config_of_something_else_are_refused(tmp_path, text):
    write_weights(tmp_path / "out", {"w": torch.zeros(2)}, {})
    weights, data = Weights(tmp_path / "out"), text.encode("latin-1")
    (tmp_path / "out" / "model.safetensors.index.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json (cannot be read|holds|has no)"):
        Weights(tmp_path / "out")
    if not text.startswith('{"') and text != "{}":
        (tmp_path / "out" / "config.json").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"config.json (cannot be read|holds)"):
            weights.config()


def test_weights_are_what_the_library_reads(tmp_path):
    from safetensors.torch import load_file

    tensors = {f"w{i}": torch.randn(3, 5).to(d) for i, d in enumerate([torch.float64, torch.bfloat16])}
    tensors |= {"scalar": torch.tensor(3), "none": torch.zeros(0, 4), "t": torch.randn(4, 6).t()}
    tensors |= {"yes": torch.tensor([True]), "eight": torch.randn(9).to(torch.float8_e4m3fn)}
    write_weights(tmp_path / "out", tensors, {}, files={"more.txt": "text"})
    assert (tmp_path / "out" / "more.txt").read_text() == "text"
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for key, value in tensors.items():
        assert read[key].dtype == value.dtype and read[key].shape == value.shape
        assert torch.equal(read[key].flatten().view(torch.uint8), value.flatten().view(torch.uint8)), key


def test_weights_are_on_the_disk_before_their_folder_has_its_name(tmp_path, monkeypatch):
    synced, out, sync = set(), tmp_path / "out", os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.add(os.readlink(f"/proc/self/fd/{file}")) or sync(file)
    )
    rename = Path.rename

    def renamed(path, target):
        assert {str(path), *map(str, path.iterdir())} <= synced
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    tensors = {"a": torch.zeros(3), "b": torch.ones(4)}
    write_weights(out, tensors, {"model_type": "llama"}, shard_bytes=1, files={"tokenizer.json": "{}"})
    assert str(tmp_path) in synced and len(list(out.iterdir())) == 5


def test_weights_that_cannot_be_written_leave_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="complex64"):
        write_weights(tmp_path / "out", {"w": torch.zeros(2, dtype=torch.complex64)}, {})
    assert list(tmp_path.iterdir()) == []


def test_weights_are_taken_out_one_by_one_and_go_file_by_file(tmp_path):
    import weakref

    class Counting(dict):
        most = 0
        alive = weakref.WeakSet()

        def __getitem__(self, name):
            tensor = torch.zeros(100)
            self.alive.add(tensor)
            Counting.most = max(Counting.most, len(self.alive))
            return tensor

    names = [str(number) for number in range(20)]
    like = dict.fromkeys(names, torch.zeros(100, device="meta"))
    write_weights(tmp_path / "out", Counting(dict.fromkeys(names)), {}, shard_bytes=1200, like=like)
    assert Counting.most == 1
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 7
    with pytest.raises(CheckpointError, match="files of 0 bytes"):
        write_weights(tmp_path / "none", {}, {}, shard_bytes=0)


PEAK = """
import sys
from pathlib import Path
from forge_ckpt.cli import main

def told(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

folder, small, out = map(Path, sys.argv[1:])
assert main(["export", str(small), str(out / "warm")]) == 0
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = told("VmRSS")
assert main(["export", str(folder), str(out / "out"), "--shard-bytes", str(48 << 20)]) == 0
print(told("VmHWM") - before)
"""


@pytest.mark.slow
def test_cli_exports_in_the_memory_of_a_file_and_a_tensor(tmp_path):
    tensors = {f"model.w{number:02d}": torch.randn(4, 1 << 20) for number in range(10)}  # 16 MiB each
    for name, held in (("small", {"model.w": torch.ones(4)}), ("large", tensors)):
        Store(tmp_path / name).save(1, Snapshot(held))
    line = [sys.executable, "-c", PEAK, *(str(tmp_path / name) for name in ("large", "small", ""))]
    given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is no longer resident
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=given_back)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1])
    assert peak <= 1.2 * (48 << 20) + (16 << 20), f"{peak >> 20} MiB"
    weights = Weights(tmp_path / "out")
    assert len(list(weights.folder.glob("*.safetensors"))) == 4
    assert all(torch.equal(weights[key.removeprefix("model.")], value) for key, value in tensors.items())


def test_cli_compares_and_exports(tmp_path, capsys):
    store = Store(tmp_path / "ckpt", keep=9)
    store.save(1, Snapshot({"model.w": torch.ones(4), "model.same": torch.zeros(2), "old": torch.ones(1)}))
    store.save(2, Snapshot({"model.w": torch.tensor([1.0, 1, 3, 1]), "model.same": torch.zeros(2)}))
    assert main(["diff", str(store.folder(1)), str(store.folder(2))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "model.w  differs in 1 of 4 elements, by at most 2",
        "old  is only in a",
    ]
    assert main(["diff", str(store.folder(1)), str(store.folder(1))]) == 0
    assert main(["export", str(store.root), str(tmp_path / "out"), "--step", "1"]) == 0
    weights = Weights(tmp_path / "out")
    assert set(weights) == {"w", "same"} and torch.equal(weights["w"], torch.ones(4))
    assert main(["show", str(store.root), "--step", "7"]) == 1
    assert "step-000000007/manifest.json is missing" in capsys.readouterr().err


def test_cli_lists_verifies_and_prunes(tmp_path, capsys):
    store = Store(tmp_path, keep=9)
    for step in (1, 2, 3):
        store.save(step, Snapshot({"w": torch.ones(4)}))
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["show", str(tmp_path)]) == 0
    assert "w  float32 [4]" in capsys.readouterr().out
    path = store.folder(2) / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert main(["verify", str(tmp_path)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in told] == ["intact", "damaged", "intact"]
    assert main(["verify", str(tmp_path), "--step", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "damaged"
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert store.steps() == [3]


def test_older_checkpoint_of_less_state_loads_when_the_newest_is_damaged(tmp_path):
    """A parameter that was frozen at first has state in the newest one only."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    store, state = Store(tmp_path), TrainState([model], optimizer)
    for step in (1, 2):
        parts = model if step == 2 else model[1]
        parts(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        store.save(step, state.capture())
    expected = {key: value.clone() for key, value in store.tensors(1).items()}
    path = store.folder(2) / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    resumed = TrainState([other], torch.optim.AdamW(other.parameters()))
    found = Store(tmp_path).resume(resumed.targets)
    assert found is not None and found.step == 1
    now = resumed.capture().tensors
    assert now.keys() == expected.keys() and all(torch.equal(now[key], expected[key]) for key in now)


def test_what_had_not_moved_when_it_was_saved_is_put_back(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    group |= {"k": 0, "scale": torch.ones(2), "seen": {"tokens": 0}}
    state, store = TrainState([model], optimizer), Store(tmp_path)
    store.save(1, state.capture())
    group["k"], group["lr"] = 7, 0.5
    group["scale"] += 1
    group["seen"]["tokens"] = 9
    store.save(2, state.capture())
    for step, expected in ((1, (0, 0.1, 1.0, 0)), (2, (7, 0.5, 2.0, 9)), (1, (0, 0.1, 1.0, 0))):
        found = store.resume(state.targets, until=step)
        assert found is not None and found.step == step
        state.restore(found.values)
        now = (group["k"], group["lr"], group["scale"][1].item(), group["seen"]["tokens"])
        assert now == expected, step


class NeverEqual:
    def __eq__(self, other):
        return False

    __hash__ = None


def test_what_has_no_json_is_refused_once_it_changes_in_place(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = {"table": [torch.zeros(100)], "odd": NeverEqual()}
    optimizer.param_groups[0] |= {"names": {"a"}, "rule": len, "stream": object(), **tables}
    state = TrainState([model], optimizer)
    assert state.capture().values == {}
    optimizer.param_groups[0]["names"].add("b")
    with pytest.raises(CheckpointError, match="'names' of SGD is "):
        state.capture()


@pytest.mark.parametrize("kind", ["a.b", 0])
@pytest.mark.parametrize("where", ["state", "group"])
def test_names_that_cannot_be_told_apart_are_refused(kind, where):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState([model], optimizer)
    (optimizer.state[model.weight] if where == "state" else optimizer.param_groups[0])[kind] = 1
    with pytest.raises(CheckpointError, match=f"something named {kind!r}"):
        state.capture()


def test_groups_that_were_added_later_are_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    state = TrainState([model], optimizer)
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(CheckpointError, match="has 2 parameter groups, and had 1"):
        state.capture()


def test_modules_with_extra_state_are_refused():
    class Scaled(nn.Linear):
        def get_extra_state(self):
            return {"scale": 3}

    model = nn.Sequential(Scaled(2, 2))
    with pytest.raises(CheckpointError, match=r"0 \(Scaled\) has get_extra_state"):
        TrainState([model], torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("shape", "device"), [((), "cpu"), ((4,), "meta"), ((4, 3), "meta")])
def test_state_that_is_no_count_is_made_where_its_parameter_is(shape, device):
    """Adafactor keeps sums of rows and columns."""
    parameter = nn.Parameter(torch.empty(4, 3, device="meta"))
    made = _blank(Entry("float32", shape), parameter, {})
    assert made.shape == shape and made.device.type == device


def test_weights_are_those_of_the_file_that_the_index_names(tmp_path):
    for number, name in ((1.0, "a"), (2.0, "b")):
        save_file({"w": torch.full((2,), number), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"w": "a.safetensors", "b": "b.safetensors"}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    found = Weights(tmp_path)
    assert set(found) == {"w", "b"} and found["w"][0] == 1
    path.write_text(json.dumps({"weight_map": index | {"c": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"says that .*b.safetensors holds c, and it does not"):
        Weights(tmp_path)


def test_name_that_safetensors_keeps_for_itself_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="__metadata__"):
        write_weights(tmp_path / "out", {"__metadata__": torch.zeros(1)}, {})
    assert not (tmp_path / "out").exists()


def test_load_that_fails_leaves_the_state_of_the_optimizer_alone(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    store, state = Store(tmp_path), TrainState([model], optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    store.save(1, state.capture())
    other = nn.Linear(3, 3)
    resumed = TrainState([other], torch.optim.AdamW(other.parameters()))
    found = store.resume(resumed.targets)
    assert found is not None
    resumed.restore(found.values)
    before = {key: value.clone() for key, value in resumed.capture().tensors.items()}
    store.save(2, Snapshot({"model.other": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="does not fit"):
        store.resume(resumed.targets)
    now = resumed.capture().tensors
    assert now.keys() == before.keys() and all(torch.equal(now[key], before[key]) for key in now)


def test_groups_of_an_optimizer_that_has_state_keep_what_they_were_made_with(tmp_path):
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    optimizer, store = torch.optim.Adagrad(groups, lr=0.1), Store(tmp_path)
    store.save(1, Snapshot(TrainState([model], optimizer).capture().tensors))
    state = TrainState([model], optimizer)
    found = store.resume(state.targets)
    assert found is not None and found.values == {}
    state.restore(found.values)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
