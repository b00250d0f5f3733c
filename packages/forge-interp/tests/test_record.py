import pickle

import pytest
import torch
from forge_interp import InterpError, capture, edit, record
from torch import nn


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


def test_record_keeps_the_output_of_every_module(model):
    x = torch.randn(3, 4)
    recording = record(model, x)
    assert set(recording) == {":out", "0:out", "1:out", "1.0:out", "1.1:out"}
    assert recording["1.0"].equal(model[0](x).tanh()) and not recording["0"].requires_grad
    assert recording[""].equal(recording.output)
    table = str(recording).splitlines()
    assert table[0].split() == ["site", "shape", "dtype"] and "1.1:out  [3, 2]  float32" in table


def test_recordings_pickle(model):
    x = torch.randn(5, 4)
    recording = pickle.loads(pickle.dumps(record(model, x)))
    assert all(recording[site].equal(value) for site, value in record(model, x).items())
    with pytest.raises(KeyError, match="no such value; there are"):
        _ = recording["nothing"]


def test_modules_are_sites(model):
    x = torch.randn(3, 4)
    with capture(model, [model[0], "1.1"]) as acts:
        model(x)
    assert acts[model[0]].equal(acts["0:out"]) and acts[model[1][1]].equal(acts["1.1"])
    with edit(model, {model[0]: torch.zeros_like}):
        assert model(x).equal(model[1](torch.zeros(3, 4)))
    assert list(record(model, x, model[1])) == ["1:out"]
    with pytest.raises(InterpError, match="no module of this"), capture(model, nn.Linear(1, 1)):
        pass


def test_record_passes_over_objects_of_transformers_and_says_so():
    pytest.importorskip("transformers")
    from .zoo import FAMILIES, text

    model = FAMILIES["llama"]().build("sdpa")
    recording = record(model, text(True))
    assert {":out", "model:out"} <= set(recording.skipped) and "skipped, no tensor:" in str(recording)
    with torch.no_grad():
        states = model(**text(True), output_hidden_states=True).hidden_states
    assert recording["model.layers.0"].equal(states[1])
    assert recording.output.past_key_values is None


def test_recordings_become_tables(model):
    pandas = pytest.importorskip("pandas")
    recording = record(model, torch.randn(3, 4), ["0", "1"])
    frame = recording.to_dataframe()
    assert len(frame) == 12 + 6
    picked = frame[(frame.site == "1:out") & (frame.dim0 == 2) & (frame.dim1 == 1)].value.item()
    assert picked == recording["1"][2, 1].item() and pandas.api.types.is_float_dtype(frame.value)
    pytest.importorskip("xarray")
    assert recording.to_xarray()["0:out"].shape == (3, 4)
