import pickle
from pathlib import Path

import numpy as np
import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.batches import ValidationBatches
from forge_data.packing import row_index
from forge_data.packing.layouts import layouts
from forge_data.packing.packed import Packed
from forge_data.packing.row_index import open_row_index
from forge_data.packing.text import pack
from forge_data.sources.config import TokensConfig
from forge_data.store.tokens import TokenStore

T = 8
LENGTHS = np.random.default_rng(0).integers(1, 30, 60).tolist()


@pytest.fixture
def store(make_store) -> TokenStore:
    return TokenStore(make_store("s", LENGTHS, first=1))


def _packed(store: TokenStore, cache: Path, name: str = "bestfit", **flags: bool) -> Packed:
    return Packed(store, open_row_index(store, name, T, cache), name, T, **flags)


@pytest.mark.parametrize("name", list(layouts))
@pytest.mark.parametrize("flags", [{}, {"mask_boundaries": True}, {"mask_documents": True}])
def test_packed_reads_what_a_walk_over_the_pieces_reads(
    store: TokenStore, tmp_path: Path, name: str, flags: dict[str, bool]
) -> None:
    """Token i is i + 1, so 0 is padding; documents are known by their first tokens."""
    packed = _packed(store, tmp_path, name, **flags)
    read = packed.read(np.arange(len(packed)))
    assert ("doc_ids" in read.extra) == ("mask_documents" in flags)
    ignored = np.zeros((len(packed), T), dtype=bool)
    ignored[read.ignored] = True
    firsts = {1, *(end + 1 for end in store.doc_ends.tolist())}
    for row, tokens in enumerate(read.tokens.tolist()):
        piece = place = 0
        for i in range(T):
            if i and (tokens[i] != tokens[i - 1] + 1 or tokens[i] in firsts) and (tokens[i] or tokens[i - 1]):
                piece, place = piece + 1, 0
            follows = tokens[i + 1] == tokens[i] + 1 and tokens[i + 1] not in firsts
            begins = tokens[i + 1] in firsts and not flags
            assert ignored[row, i] == (not follows and not begins)
            if read.extra:
                assert read.extra["doc_ids"][row, i] == (piece if tokens[i] else -1)
                assert read.extra["positions"][row, i] == (place if tokens[i] else 0)
            place += 1


@pytest.mark.parametrize("name", list(layouts))
def test_tokens_that_are_no_padding_are_counted(store: TokenStore, tmp_path: Path, name: str) -> None:
    packed = _packed(store, tmp_path, name)
    some = np.arange(len(packed))[::-1]
    expected = (packed.read(some).tokens[:, :-1] > 0).sum(1)  # token i is i + 1
    assert packed.token_counts(some).tolist() == expected.tolist()
    batches = ValidationBatches({3: packed}, 4, 0, 0, 1)
    counts = np.concatenate([batches.token_counts(group) for group in range(len(batches))])
    assert counts.tolist() == [*expected[::-1].tolist(), *[0] * (-len(packed) % 4)]


def test_packed_reads_any_rows_together(store: TokenStore, tmp_path: Path) -> None:
    packed = _packed(store, tmp_path, mask_documents=True)
    some = np.asarray([5, 0, 7, 5])
    together = packed.read(some)
    for place, sample in enumerate(some):
        alone = packed.read(np.asarray([sample]))
        assert np.array_equal(together.tokens[place], alone.tokens[0])
        assert all(np.array_equal(together.extra[name][place], alone.extra[name][0]) for name in alone.extra)


def test_packed_pickles_small(store: TokenStore, tmp_path: Path) -> None:
    data = pickle.dumps(packed := _packed(store, tmp_path))
    assert len(data) < 1000
    assert np.array_equal(
        pickle.loads(data).read(np.asarray([3])).tokens, packed.read(np.asarray([3])).tokens
    )


def test_plan_goes_on_where_it_was_killed_and_is_the_same(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_index, "WINDOW", 20)
    whole = open_row_index(store, "bestfit", T, tmp_path / "a").folder
    calls: list[int] = []

    def lay(starts: np.ndarray, lengths: np.ndarray, max_tokens: int):
        calls.append(int(starts[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return bestfit(starts, lengths, max_tokens)

    bestfit = layouts["bestfit"]
    monkeypatch.setitem(layouts, "bestfit", lay)
    with pytest.raises(KeyboardInterrupt):
        open_row_index(store, "bestfit", T, tmp_path / "b")
    again = open_row_index(store, "bestfit", T, tmp_path / "b").folder
    assert calls == [0, calls[1], calls[1], calls[3]], "the first window was planned once"
    assert {f.name: f.read_bytes() for f in whole.iterdir()} == {
        f.name: f.read_bytes() for f in again.iterdir()
    }
    assert not list(again.parent.glob("*.partial"))


def test_plan_that_is_damaged_is_named(store: TokenStore, tmp_path: Path) -> None:
    file = open_row_index(store, "bestfit", T, tmp_path).folder / "starts.bin"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    packed = _packed(store, tmp_path)
    with pytest.raises(DataError, match=r"starts.bin is damaged in block 0"):
        packed.read(np.arange(len(packed)))


@pytest.mark.parametrize("name", ["concat", *layouts])
def test_describe_counts_padding_and_cuts(store: TokenStore, tmp_path: Path, name: str) -> None:
    config = DataConfig(
        max_tokens=T,
        sources=[TokensConfig(path=str(store.folder))],
        packing=name,  # type: ignore[arg-type]
        cache_dir=str(tmp_path),
    )
    packing = pack(store, config, tmp_path)
    rows = packing.read(np.arange(len(packing))).tokens
    padding = (rows == 0).sum() / rows.size
    firsts = np.concatenate([[0], store.doc_ends[:-1]]) + 1
    documents = [set(range(a, b + 1)) for a, b in zip(firsts, store.doc_ends.tolist(), strict=True)]
    held = [set(row) for row in rows.tolist()]
    cut = sum(not any(document <= row for row in held) for document in documents)
    text = packing.describe()
    assert f"{len(packing)} sequences" in text and f"{cut} of 60 documents cut" in text
    assert (f"{padding:.3%} padding" if name != "concat" else "no padding") in text
