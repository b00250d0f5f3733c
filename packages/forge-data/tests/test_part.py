"""Documents of a store that are held out: read as if they had been tokenized into a store of their own."""

import pickle

import numpy as np
import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.packing.text import pack
from forge_data.sources.config import TokensConfig
from forge_data.store.part import StorePart, held_out_part
from forge_data.store.tokens import TokenStore, Writer

LENGTHS = np.random.default_rng(0).integers(1, 30, 60).tolist()
T = 8


def written(folder, documents):
    """A store of documents [(tokens, targets)]."""
    with Writer(folder, 100_000, "bytes-256", targets=True) as writer:
        for tokens, targets in documents:
            writer.add(np.array(tokens), [len(tokens)], np.array(targets, dtype=np.uint8))
    return TokenStore(folder)


@pytest.mark.parametrize("packing", ["concat", "bestfit", "pad"])
@pytest.mark.parametrize("held_out", [0.05, 0.3, 0.999])
def test_both_parts_are_as_stores_of_their_documents(tmp_path, packing, held_out):
    rng, at, documents = np.random.default_rng(1), 1, []
    for length in LENGTHS:
        documents.append((list(range(at, at + length)), rng.integers(0, 2, length).tolist()))
        at += length
    whole = written(tmp_path / "whole", documents)
    data = DataConfig(max_tokens=T, packing=packing, sources=[TokensConfig(path="x")])
    digests, seen = {pack(whole, data, tmp_path).digest}, 0
    train, held = (held_out_part(whole, held_out, split) for split in ("train", "validation"))
    cut = len(train.doc_ends)
    assert 1 <= cut < len(LENGTHS) and (cut == 1 or len(held) >= held_out * len(whole))
    for part, own in ((train, documents[:cut]), (held, documents[cut:])):
        alone = pack(written(tmp_path / f"alone{seen}", own), data, tmp_path / f"cache{seen}")
        mine = pack(pickle.loads(pickle.dumps(part)), data, tmp_path / "cache")
        every = np.arange(len(alone))
        assert len(mine) == len(alone)
        ours, theirs = mine.read(every), alone.read(every)
        assert (ours.tokens == theirs.tokens).all()
        assert all((a == b).all() for a, b in zip(ours.ignored, theirs.ignored, strict=True))
        digests.add(mine.digest)
        seen += len(part)
    assert seen == len(whole) and len(digests) == 3, "every token is in one of them, and their names differ"


def test_source_trains_on_one_part_and_is_evaluated_on_the_other(make_store, tmp_path):
    class Tokenizer:
        digest = "bytes-256"

        def build(self):
            return self

    source = TokensConfig(path=str(make_store("s", [10] * 20)), held_out=0.1)
    assert source.has_validation() and not source.whole().has_validation()
    train, held = (source.open(split, Tokenizer(), tmp_path) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert (len(train), len(held)) == (180, 20)
    assert held.read(np.array([0]), 3).tolist() == [[180, 181, 182]]
    assert len(source.whole().open("train", Tokenizer(), tmp_path)) == 200  # type: ignore[arg-type]


def test_what_cannot_be_held_out_is_refused(make_store, tmp_path):
    with pytest.raises(DataError, match="has 1 document; name a store as validation"):
        held_out_part(TokenStore(make_store("one", [50])), 0.1, "train")
    with pytest.raises(ValueError, match="expected one of them"):
        TokensConfig(path="a", validation="b", held_out=0.1)
    targets = written(tmp_path / "t", [([1, 2, 3], [1, 1, 1]), ([4, 5, 6], [0, 0, 0])])
    with pytest.raises(DataError, match=r"no token of the documents 1 to 1 of .* is a target"):
        StorePart(targets, 1, 2).require_targets()
