import pytest
import torch
from forge_interp import capture
from forge_interp.hooks.engine.offload import Offload
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def test_copy_on_the_same_device_owns_its_memory():
    value = torch.arange(12.0).view(3, 4).t()
    copy = Offload("cpu").copy(value)
    value.zero_()
    assert copy.is_contiguous()
    assert copy.sum() == 66


def test_copy_keeps_a_sparse_layout():
    value = torch.eye(3).to_sparse()
    copy = Offload(None).copy(value)
    assert copy.layout == torch.sparse_coo
    assert torch.equal(copy.to_dense(), torch.eye(3))


def test_send_delivers_the_value_itself_when_it_is_there_already():
    given = []
    value = torch.ones(2)
    Offload(None).send(value, given.append)
    assert given[0] is value


@pytest.mark.parametrize(
    ("target", "device", "expected"),
    [
        (None, "cuda:0", "cuda:0"),
        ("cuda:1", "cuda:0", "cuda:1"),
        ("cuda:1", "cuda:1", "cuda:1"),
        ("cuda", "cuda:1", "cuda:1"),
        ("cuda:1", "cpu", "cuda:1"),
        ("meta", "cpu", "meta"),
    ],
)
def test_copy_and_send_move_to_other_devices(target, device, expected):
    given = []
    with FakeTensorMode():
        value = torch.empty(2, device=device)
        offload = Offload(target)
        assert offload.copy(value).device == torch.device(expected)
        offload.send(value, given.append)
    assert given[0].device == torch.device(expected)
    assert (given[0] is value) == (device == expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_capture_from_a_gpu_equals_one_on_it():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True)) for _ in range(6))).cuda()
    x = torch.randn(1000, 64, device="cuda")
    with capture(model, "**") as here, capture(model, "**", device="cpu") as there:
        model(x)
    for key, value in here.items():
        assert there[key].is_pinned()
        assert torch.equal(there[key], value.cpu())
    sunk = {}
    with capture(model, "**", device="cpu", sink=lambda k, v: sunk.update({k: v.clone()})):
        model(x)
        assert sunk.keys() == here.keys()
    assert all(torch.equal(sunk[key], value.cpu()) for key, value in here.items())


def test_a_sink_has_all_values_when_the_forward_pass_returns():
    model, x, sunk = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 4), {}

    def sink(key, value):
        sunk[key] = value.clone()

    with capture(model, ["0", "1", "", ":in"], sink=sink) as acts:
        out = model(x)
        assert list(sunk) == [":in", "0:out", "1:out", ":out"]
        assert acts.fired == set(sunk)
        assert torch.equal(sunk[":out"], out)
        assert torch.equal(sunk["0:out"], model[0](x))
    with capture(model, "0", stop=True, sink=sink):
        sunk.clear()
        model(x)
        assert list(sunk) == ["0:out"]
