"""A store is of the same call only if the same samples have the same rows, whatever the cause."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.run.identity import digest, is_same_but_for_rounding
from torch import Tensor, nn

IDS = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
TABLE: dict[str, Any] = {"factor": 1.0}
LISTED: list[Any] = [1.0]
FACTOR = torch.ones(4)
WORDS = ["one two three four", "five six seven eight", "one one two two", "three four five nine"]


class Factors:
    factor = 1.0


class Reader(nn.Module):
    """Multiplies by what stands in a dict, a list, a tensor and a class of its module, and in a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 4)
        self._private = [1.0]
        self.file = file

    def forward(self, ids: Tensor) -> Tensor:
        factor = FACTOR * TABLE["factor"] * LISTED[0] * Factors.factor * self._private[0]
        return self.out(self.embed(ids) * factor * float(self.file.read_text()))


def extract(out: Path, model: nn.Module, data: Any = IDS, **options: Any) -> Tensor:
    return extract_representations(model, data, "out", out, batch_size=2, progress=False, **options)["out"]


def reader(folder: Path) -> Reader:
    torch.manual_seed(0)
    (folder / "factor").write_text("1")
    return Reader(folder / "factor")


CAUSES = ["dict", "list", "tensor", "class", "private", "file", "functional", "instance"]


def change(cause: str, model: Any, patch: pytest.MonkeyPatch) -> None:
    if cause == "dict":
        patch.setitem(TABLE, "factor", 2.0)
    elif cause == "list":
        patch.setattr(f"{__name__}.LISTED", [2.0])
    elif cause == "tensor":
        patch.setattr(f"{__name__}.FACTOR", torch.full((4,), 2.0))
    elif cause == "class":
        patch.setattr(Factors, "factor", 2.0)
    elif cause == "private":
        model._private[0] = 2.0
    elif cause == "file":
        model.file.write_text("2")
    elif cause == "functional":
        linear = F.linear
        patch.setattr(F, "linear", lambda *args: 2 * linear(*args))
    else:
        forward = model.embed.forward
        patch.setattr(model.embed, "_call_impl", lambda ids: 2 * forward(ids))


@pytest.mark.parametrize("cause", CAUSES)
def test_extract_notices_other_rows_of_the_same_samples_from_any_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
):
    rows = extract(tmp_path / "a", reader(tmp_path))
    model = reader(tmp_path)
    change(cause, model, monkeypatch)
    with torch.no_grad():
        assert not torch.equal(model(IDS).flatten(0, 1), rows)
    with pytest.raises(InterpError, match="made by another extraction"):
        extract(tmp_path / "a", model)


@pytest.mark.parametrize("place", [0, 3])
def test_extract_notices_another_text_in_a_sample(tmp_path: Path, place: int):
    model = reader(tmp_path)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.tensor([[len(word) for word in text.split()] for text in batch["text"]]))

    def samples(words: list[str]) -> list[dict[str, Any]]:
        return [{"text": text, "label": number} for number, text in enumerate(words)]

    extract(tmp_path / "a", model, samples(WORDS), forward=forward)
    changed = [*WORDS]
    changed[place] = "seven seven seven seven"
    with pytest.raises(InterpError, match=r"made by another extraction|is not the one that was extracted"):
        extract(tmp_path / "a", model, samples(changed), forward=forward)
    with pytest.warns(UserWarning, match="was there"):
        extract(tmp_path / "a", model, samples(WORDS), forward=forward)


def test_extract_goes_on_after_a_model_has_recorded_its_hidden_states(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    sites, options = "model.layers.*", {"batch_size": 2, "progress": False}
    extract_representations(model, IDS, sites, tmp_path / "a", **options)
    with torch.no_grad():
        model(IDS, output_hidden_states=True)
    with pytest.warns(UserWarning, match="was there"):
        extract_representations(model, IDS, sites, tmp_path / "a", **options)


def test_extract_takes_a_model_of_weights_in_8_bits(tmp_path: Path):
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 32), nn.Linear(32, 32))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    options = {"batch_size": 2, "progress": False}
    store = extract_representations(model, IDS, "1", tmp_path / "a", **options)
    with torch.no_grad():
        assert torch.equal(store["1"], torch.cat([model(ids).flatten(0, 1) for ids in IDS.split(2)]))
    with pytest.warns(UserWarning, match="was there"):
        extract_representations(model, IDS, "1", tmp_path / "a", **options)
    other = nn.Sequential(nn.Embedding(9, 32), nn.Linear(32, 32))
    quantization.quantize_(other, quantization.Int8WeightOnlyConfig())
    with pytest.raises(InterpError, match="model weights: "):
        extract_representations(other, IDS, "1", tmp_path / "a", **options)


def test_extract_says_what_cannot_be_compared_of_a_sample(tmp_path: Path):
    data = [{"input_ids": ids, "lock": threading.Lock()} for ids in IDS]
    model = nn.Embedding(9, 4)
    with pytest.raises(InterpError, match=r"a sample holds a lock, which cannot be compared.*out=None"):
        extract_representations(model, data, "", tmp_path / "a", progress=False)
    rows = extract_representations(model, data, "", progress=False)[""]
    assert torch.equal(rows, model(IDS).flatten(0, 1))


def digests(rows: Tensor) -> dict[str, Any]:
    return {"of batch 0": {"1:out": digest(rows)}}


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "3 % more": lambda x: x * 1.03,
    "columns swapped": lambda x: x[:, [1, 0, *range(2, 64)]],
    "heads swapped": lambda x: x.roll(32, 1),
    "rows reversed": lambda x: x.flip(0),
    "a row less": lambda x: x[1:],
    "shifted": lambda x: x + 0.1,
    "not a number": lambda x: x * torch.nan,
    "a row of zeros": lambda x: x * (torch.arange(len(x)) != 7)[:, None],
    "a row of no numbers": lambda x: torch.where((torch.arange(len(x)) == 7)[:, None], torch.nan, x),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_other_rows_are_noticed(dtype: torch.dtype, other: str):
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, changed = digests(rows.to(dtype)), digests(OTHERS[other](rows).to(dtype))
    assert not is_same_but_for_rounding(first, changed) and not is_same_but_for_rounding(changed, first)


def test_a_change_of_two_thousandths_is_no_rounding_of_float32():
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    assert not is_same_but_for_rounding(digests(rows), digests(rows * 1.002))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_of_another_machine_are_the_same_but_for_rounding(dtype: torch.dtype):
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(300, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, rounded = (digests(x.to(dtype)) for x in (rows, rows * (1 + torch.finfo(dtype).eps * noise)))
    assert first != rounded and is_same_but_for_rounding(first, rounded)
    assert not is_same_but_for_rounding(first, None) and is_same_but_for_rounding(None, None)


@pytest.mark.parametrize("change", ["autocast", "precision"])
def test_extract_does_not_mix_rows_of_other_numerics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    extract(tmp_path / "a", reader(tmp_path), dtype=torch.bfloat16)
    if change == "precision":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"),
        pytest.raises(InterpError, match="numerics "),
    ):
        extract(tmp_path / "a", reader(tmp_path), dtype=torch.bfloat16)


def test_extract_allows_rounding_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    extract(tmp_path / "a", reader(tmp_path))
    monkeypatch.setitem(TABLE, "factor", 1 + 1e-6)
    with pytest.warns(UserWarning, match="was there"):
        extract(tmp_path / "a", reader(tmp_path))
    monkeypatch.setitem(TABLE, "factor", 1.001)
    with pytest.raises(InterpError, match="other rows of batch 0 at out:out"):
        extract(tmp_path / "a", reader(tmp_path))


def test_extract_allows_rounding_where_a_batch_has_other_bits_each_time(tmp_path: Path):
    """As with atomic additions on a GPU, whose order is that of no two runs."""
    calls: list[None] = []

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        calls.append(None)
        return model(ids)

    factor = 1.0
    model = reader(tmp_path)
    options = {"forward": forward, "batch_size": 2, "progress": False}
    model.out.register_forward_hook(lambda module, args, output: output * (factor + 1e-6 * (len(calls) % 5)))
    extract_representations(model, IDS, "out", tmp_path / "a", **options)
    with pytest.warns(UserWarning, match="was there"):
        extract_representations(model, IDS, "out", tmp_path / "a", **options)
    factor = 1.01
    with pytest.raises(InterpError, match="other rows of batch 0 at out:out"):
        extract_representations(model, IDS, "out", tmp_path / "a", **options)


def test_extract_takes_a_name_for_a_model_that_gives_other_rows_each_time(tmp_path: Path):
    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        return model(torch.randint_like(ids, 9))

    model = nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 64))
    options = {"forward": forward, "progress": False}
    extract_representations(model, IDS, "1", tmp_path / "a", **options)
    with pytest.raises(InterpError, match=r"other rows of batch.*each time, identity= helps"):
        extract_representations(model, IDS, "1", tmp_path / "a", **options)
    extract_representations(model, IDS, "1", tmp_path / "b", identity="drawn", **options)
    with pytest.warns(UserWarning, match="was there"):
        extract_representations(model, IDS, "1", tmp_path / "b", identity="drawn", **options)
    with pytest.raises(InterpError, match='identity: "drawn" there, "other" asked'):
        extract_representations(model, IDS, "1", tmp_path / "b", identity="other", **options)
