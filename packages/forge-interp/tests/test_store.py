from pathlib import Path

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.store import ActivationStore
from torch import nn

IDS = torch.randint(9, (7, 5), generator=torch.Generator().manual_seed(0))


def extract(out: Path | None) -> ActivationStore:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(3, 4)).bfloat16()
    return extract_representations(model, IDS, "*", out, batch_size=3, progress=False)


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("rows", [1, 8, 35, 99])
def test_store_batches_are_the_rows_in_order(tmp_path: Path, name: str | None, rows: int):
    store = extract(name and tmp_path / name)
    batches = list(store.batches(rows))
    assert [len(batch["0:out"]) for batch in batches] == [min(rows, 35 - i) for i in range(0, 35, rows)]
    for site in store:
        assert torch.equal(torch.cat([batch[site] for batch in batches]), store[site])
    with pytest.raises(InterpError, match="rows is 0"):
        next(store.batches(0))


def test_store_reads_any_rows(tmp_path: Path):
    store, held = extract(tmp_path / "a"), extract(None)
    for site in held:
        assert torch.equal(store[site], held[site])
        for start, stop in [(0, 1), (14, 16), (15, 30), (7, 7), (13, 35), (34, 99)]:
            assert torch.equal(store.read(site, start, stop), held[site][start:stop])
    assert torch.equal(store.sample_id, held.sample_id) and torch.equal(store.position, held.position)


def test_store_gives_copies_that_do_not_reach_the_files(tmp_path: Path):
    store = extract(tmp_path / "a")
    before = store["0"].clone()
    store["0"].zero_()
    store.read("0", 0, 3).zero_()
    assert torch.equal(store["0"], before) and torch.equal(ActivationStore.open(tmp_path / "a")["0"], before)


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
    with pytest.raises(KeyError, match=r"2:in: no such value; there are 2:out"):
        store["2:in"]


def test_store_says_what_is_missing(tmp_path: Path):
    with pytest.raises(InterpError, match="does not exist"):
        ActivationStore.open(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InterpError, match=r"has no index.json; expected a folder"):
        ActivationStore.open(tmp_path / "empty")
    extract(tmp_path / "a")
    index = tmp_path / "a" / "index.json"
    for text, said in (("{", "damaged"), ('{"format":9}', "no index of format 2")):
        (tmp_path / "a" / "kept").write_bytes(index.read_bytes())
        index.write_text(text)
        with pytest.raises(InterpError, match=said):
            ActivationStore.open(tmp_path / "a")


def test_store_refuses_a_part_that_was_cut(tmp_path: Path):
    path = extract(tmp_path / "a").path
    assert path is not None
    for file in sorted(path.glob("part-*")):
        data = file.read_bytes()
        for part in (data[:-1], data[:5], b"", None):
            file.unlink() if part is None else file.write_bytes(part)
            with pytest.raises(InterpError, match=f"{file.name} is missing or damaged: call the extraction"):
                ActivationStore.open(path)
        file.write_bytes(data)
        ActivationStore.open(path)
