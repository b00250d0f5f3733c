from pathlib import Path

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.store import ActivationStore
from torch import nn

IDS = torch.randint(9, (7, 5), generator=torch.Generator().manual_seed(0))
NAMES = ["a.npz", "a.safetensors", "a.zarr", "a"]


def extract(out: Path) -> ActivationStore:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(3, 4)).bfloat16()
    return extract_representations(model, IDS, "*", out, batch_size=3, progress=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 8, 35, 99])
def test_store_batches_are_the_rows_in_order(tmp_path: Path, name: str, rows: int):
    store = extract(tmp_path / name)
    batches = list(store.batches(rows))
    assert [len(batch["0:out"]) for batch in batches] == [min(rows, 35 - i) for i in range(0, 35, rows)]
    for site in store:
        assert torch.equal(torch.cat([batch[site] for batch in batches]), store[site])
    with pytest.raises(InterpError, match="rows is 0"):
        next(store.batches(0))


def test_store_is_a_mapping_in_the_order_of_the_model(tmp_path: Path):
    store = ActivationStore.open(extract(tmp_path / "a").path)
    assert list(store) == list(store.sites) == ["0:out", "1:out", "2:out"]
    assert len(store) == 3 and "1" in store and "1:out" in store and "1:in" not in store
    assert torch.equal(store["1"], store["1:out"]) and store["1"].dtype == torch.bfloat16
    assert (store.rows, store.metadata["rows"], repr(store)) == (
        35,
        35,
        f"ActivationStore('{tmp_path / 'a'}')",
    )
    assert torch.equal(store.token_id, IDS.flatten())
    with pytest.raises(KeyError, match=r"2:in: not in .*there are 2:out"):
        store["2:in"]


def test_store_says_what_is_missing(tmp_path: Path):
    with pytest.raises(InterpError, match="does not exist"):
        ActivationStore.open(tmp_path / "a.npz")
    extract(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").write_text(
        (tmp_path / "a" / "manifest.json").read_text().replace('"rows":35', '"rows":36')
    )
    with pytest.raises(InterpError, match="lacks rows of 0:out, 1:out, 2:out, sample_id"):
        ActivationStore.open(tmp_path / "a")


@pytest.mark.parametrize("name", NAMES)
def test_store_refuses_a_file_that_was_cut(tmp_path: Path, name: str):
    path = extract(tmp_path / name).path
    found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.suffix != ".json"]
    for file in found:
        data = file.read_bytes()
        for part in (data[:-1], data[:5], b""):
            file.write_bytes(part)
            with pytest.raises(InterpError, match="damaged: extract it again"):
                ActivationStore.open(path)
        file.unlink()
        with pytest.raises(InterpError, match=r"damaged|does not exist"):
            ActivationStore.open(path)
        file.write_bytes(data)
        ActivationStore.open(path)
