from typing import Any

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.run.feeding import Feeder
from forge_interp.extraction.samples import Batch, Names
from torch import nn

NAMES = Names()
IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


class Told(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.got: Any = None

    def keep(self, *args: Any, **kwargs: Any) -> None:
        self.got = args, kwargs


class Named(Told):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, use_cache: bool = True) -> None:
        self.keep(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


class Positional(Told):
    def forward(self, tokens: Any) -> None:
        self.keep(tokens)


class Passing(Told):
    def forward(self, input_ids: Any, **kwargs: Any) -> None:
        self.keep(input_ids, **kwargs)


class Anything(Told):
    def forward(self, **kwargs: Any) -> None:
        self.keep(**kwargs)


def call(model: Told, inputs: Any, names: Names = NAMES) -> Any:
    Feeder(model, names, None)(Batch.of(inputs, names, 0, 0))
    return model.got


def test_feeder_passes_what_forward_names_and_no_cache():
    args, kwargs = call(Named(), {"input_ids": IDS, "attention_mask": MASK, "text": ["a", "b"], "label": IDS})
    assert args == () and kwargs == {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
    args, kwargs = call(Named(), IDS)
    assert kwargs["input_ids"] is IDS and kwargs["use_cache"] is False


def test_feeder_leaves_a_cache_that_was_asked_for():
    _, kwargs = call(Named(), {"input_ids": IDS, "use_cache": torch.tensor(True)})
    assert kwargs["use_cache"]


def test_feeder_gives_ids_and_single_entries_by_place():
    assert call(Positional(), {"input_ids": IDS, "attention_mask": MASK}) == ((IDS,), {})
    assert call(Positional(), {"pixel_values": IDS}) == ((IDS,), {})


def test_feeder_passes_the_mask_to_whoever_takes_anything():
    assert call(Passing(), {"input_ids": IDS, "attention_mask": MASK, "label": IDS}) == (
        (IDS,),
        {"attention_mask": MASK},
    )
    assert call(Anything(), {"a": IDS, "b": MASK, "text": ["x", "y"]}) == ((), {"a": IDS, "b": MASK})


def test_feeder_names_what_it_cannot_pass():
    with pytest.raises(InterpError, match=r"the samples have 'a', 'b', the model takes tokens"):
        call(Positional(), {"a": IDS, "b": MASK})
    with pytest.raises(InterpError, match=r"batch 0 is a tuple.*forward=lambda"):
        call(Positional(), (IDS, MASK))


def test_extraction_of_offloaded_weights_runs_and_notices_others(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)).eval()
    ids = torch.randint(9, (5, 3))
    expected = model(ids).detach().flatten(0, 1)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(weight.is_meta for weight in model.parameters())
    store = extract_representations(model, ids, "1", tmp_path / "acts", progress=False)
    torch.testing.assert_close(store["1"], expected)
    other = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)).eval()
    accelerate.cpu_offload(other, torch.device("cpu"))
    with pytest.raises(InterpError, match="other rows of batch 0 at 1:out"):
        extract_representations(other, ids, "1", tmp_path / "acts", progress=False)
