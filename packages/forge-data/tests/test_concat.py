import pickle

import numpy as np
import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.packing.concat import Concat
from forge_data.packing.packing import IGNORE
from forge_data.packing.text import pack
from forge_data.sources.config import PythonStdlibConfig
from forge_data.store.tokens import TokenStore


@pytest.mark.parametrize("size", [9, 10, 16, 17, 24, 25, 100])
def test_concat_makes_every_token_but_the_first_a_target_once(make_store, size: int) -> None:
    concat = Concat(TokenStore(make_store("s", [size])), max_tokens=8)
    read = concat.read(np.arange(len(concat)))
    labels = read.tokens[:, 1:].astype(np.int64)
    labels[read.ignored] = IGNORE
    assert sorted(labels[labels >= 0].tolist()) == list(range(1, size))
    assert (labels[:-1] >= 0).all()


def test_concat_reads_what_slices_read(make_store) -> None:
    store = TokenStore(make_store("s", [70]))
    concat = Concat(store, max_tokens=8)
    for sample in (0, 3, 7, 8):
        start = min(sample * 8, 70 - 9)
        assert concat.read(np.asarray([sample])).tokens[0].tolist() == list(range(start, start + 9))


def test_concat_documents_agree_with_a_walk_over_the_tokens(make_store) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 50).tolist()
    concat = Concat(TokenStore(make_store("s", lengths)), max_tokens=16, mask_documents=True)
    document = np.repeat(np.arange(50), lengths)
    samples = np.arange(len(concat) - 1)
    read = concat.read(samples)
    ignored = np.zeros((len(samples), 16), dtype=bool)
    ignored[read.ignored] = True
    for sample, start in enumerate(concat.starts(samples)):
        ids, place, expected = 0, 0, []
        for token in range(start, start + 16):
            if token > start and document[token] != document[token - 1]:
                ids, place = ids + 1, 0
            expected.append((ids, place, document[token] != document[token + 1]))
            place += 1
        found = read.extra["doc_ids"][sample], read.extra["positions"][sample], ignored[sample]
        assert list(zip(*found, strict=True)) == expected


def test_concat_pickles_small(make_store) -> None:
    concat = Concat(TokenStore(make_store("s", [5000])), max_tokens=8)
    data = pickle.dumps(concat)
    assert len(data) < 1000
    assert (
        pickle.loads(data).read(np.asarray([3])).tokens.tolist()
        == concat.read(np.asarray([3])).tokens.tolist()
    )


def test_concat_refuses_a_store_shorter_than_a_sequence(make_store) -> None:
    with pytest.raises(DataError, match="8 tokens; a sequence needs 9"):
        Concat(TokenStore(make_store("s", [8])), max_tokens=8)


@pytest.mark.parametrize("lengths", [[2], [8], [3, 2], [1, 3, 4], [2, 6]])
def test_text_shorter_than_a_sequence_is_one_sequence_with_padding(make_store, tmp_path, lengths) -> None:
    store = TokenStore(make_store("s", lengths))
    packing = pack(store, DataConfig(max_tokens=8, sources=[PythonStdlibConfig()]), tmp_path)
    read = packing.read(np.arange(len(packing)))
    labels = read.tokens[:, 1:].astype(np.int64)
    labels[read.ignored] = IGNORE
    size = sum(lengths)
    assert read.tokens[:, :size].tolist() == [list(range(size))]
    assert labels.tolist() == [[*range(1, size), *[IGNORE] * (9 - size)]]
