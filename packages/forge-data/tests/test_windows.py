import pickle

import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.tokens import TokenStore
from forge_data.windows import Windows


@pytest.mark.parametrize("size", [9, 10, 16, 17, 24, 25, 100])
def test_windows_make_every_token_but_the_first_a_target_once(make_store, size: int) -> None:
    windows = Windows(TokenStore(make_store("s", [size])), max_tokens=8)
    samples = np.arange(len(windows))
    rows, overlap = windows.read(samples), windows.overlap(samples)
    targets = [t for row, seen in zip(rows[:, 1:], overlap, strict=True) for t in row[seen:]]
    assert sorted(targets) == list(range(1, size))
    assert not overlap[:-1].any()


def test_windows_read_what_slices_read(make_store) -> None:
    store = TokenStore(make_store("s", [70]))
    windows = Windows(store, max_tokens=8)
    for sample in (0, 3, 7, 8):
        start = min(sample * 8, 70 - 9)
        assert windows.read(np.asarray([sample]))[0].tolist() == list(range(start, start + 9))


def test_windows_documents_agree_with_a_walk_over_the_tokens(make_store) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 50).tolist()
    windows = Windows(TokenStore(make_store("s", lengths)), max_tokens=16)
    document = np.repeat(np.arange(50), lengths)
    samples = np.arange(len(windows))
    doc_ids, positions = windows.documents(samples)
    for sample, start in enumerate(windows.starts(samples)):
        ids, place, expected = 0, 0, []
        for token in range(start, start + 17):
            if token > start and document[token] != document[token - 1]:
                ids, place = ids + 1, 0
            expected.append((ids, place))
            place += 1
        assert list(zip(doc_ids[sample], positions[sample], strict=True)) == expected


def test_windows_pickle_small(make_store) -> None:
    windows = Windows(TokenStore(make_store("s", [5000])), max_tokens=8)
    data = pickle.dumps(windows)
    assert len(data) < 1000
    assert pickle.loads(data).read(np.asarray([3])).tolist() == windows.read(np.asarray([3])).tolist()


def test_windows_refuse_a_store_shorter_than_a_sequence(make_store) -> None:
    with pytest.raises(DataError, match="8 tokens; a sequence needs 9"):
        Windows(TokenStore(make_store("s", [8])), max_tokens=8)
