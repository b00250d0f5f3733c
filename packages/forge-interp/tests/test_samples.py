import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.samples import Batch, Names, ReadyBatches, Samples, collate, open_dataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

NAMES = Names(pad_id=9)
RAGGED = [[1, 2], [3], [4, 5, 6]]
PADDED = torch.tensor([[1, 2, 9], [3, 9, 9], [4, 5, 6]])
MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])


def batches(dataset: Any, size: int = 3, names: Names = NAMES) -> list[Batch]:
    return list(open_dataset(dataset, size, names).batches(0, None))


class Listed(Dataset):
    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset):
    def __init__(self, items: list[Any]):
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.mark.parametrize(
    "dataset",
    [
        RAGGED,
        [np.array(ids) for ids in RAGGED],
        [np.array(ids, dtype=np.uint16) for ids in RAGGED],
        [torch.tensor(ids) for ids in RAGGED],
        [{"input_ids": ids, "text": "words"} for ids in RAGGED],
        [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in RAGGED],
        {"input_ids": RAGGED, "text": ["a", "b", "c"]},
        Listed(RAGGED),
        Listed([{"input_ids": torch.tensor(ids)} for ids in RAGGED]),
        DataLoader(Listed([torch.tensor(ids) for ids in RAGGED]), 3, collate_fn=lambda s: collate(s, NAMES)),
    ],
)
def test_samples_of_all_kinds_become_one_padded_batch(dataset: Any):
    (batch,) = batches(dataset)
    assert (batch.number, batch.first, batch.size) == (0, 0, 3)
    assert batch.tokens is not None and batch.mask is not None
    assert torch.equal(batch.tokens, PADDED) and torch.equal(batch.mask, MASK)
    assert torch.equal(batch.inputs["input_ids"], PADDED)
    assert torch.equal(batch.inputs["attention_mask"], MASK.long())


def test_samples_equal_those_of_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": RAGGED, "text": ["a", "b", "c"]})
    (batch,) = batches(dataset)
    assert batch.tokens is not None and torch.equal(batch.tokens, PADDED)
    with pytest.raises(InterpError, match="wrap a stream of samples in a DataLoader"):
        batches(dataset.to_iterable_dataset())


def test_samples_are_numbered_wherever_they_begin():
    source = open_dataset(RAGGED * 3, 2, NAMES)
    assert source.num_batches == 5
    assert [(b.number, b.first, b.size) for b in source.batches(3, None)] == [(3, 6, 2), (4, 8, 1)]
    assert [(b.number, b.first, b.size) for b in source.batches(1, 2)] == [(1, 2, 2)]


def test_collate_pads_what_is_as_long_as_the_ids():
    samples = [
        {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(ids),
            "type": torch.ones(len(ids)),
            "at": len(ids),
        }
        for ids in RAGGED
    ]
    samples = [sample | {"at": torch.tensor(sample["at"])} for sample in samples]
    found = collate(samples, NAMES)
    assert found["labels"].tolist() == [[1, 2, -100], [3, -100, -100], [4, 5, 6]]
    assert found["type"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert found["at"].tolist() == [2, 1, 3]
    assert found["attention_mask"].tolist() == MASK.long().tolist()
    assert "attention_mask" not in collate([samples[0], samples[0]], NAMES)


@pytest.mark.parametrize("dataset", [[[], [1, 2], [3]], [[1, 2], [], [3]], [{"input_ids": []}] * 2])
def test_samples_may_be_empty(dataset: list[Any]):
    for size in (1, 3):
        found = batches(dataset, size)
        assert all(b.tokens is not None and b.tokens.shape[1] > 0 for b in found)
        tokens = [
            t for b in found for t in (b.tokens if b.mask is None else b.tokens[b.mask]).flatten().tolist()
        ]
        assert tokens == [t for ids in dataset for t in (ids if isinstance(ids, list) else [])]


def test_samples_keep_what_is_no_array():
    samples = [{"input_ids": [1, 2], "boxes": [[1], [2, 3]], "name": "x", "none": None}] * 2
    (batch,) = batches(samples)
    assert batch.inputs["boxes"] == [[[1], [2, 3]]] * 2
    assert batch.inputs["name"] == ["x", "x"]


def test_samples_may_name_their_entries_in_any_order():
    (batch,) = batches([{"input_ids": [1], "a": 1}, {"a": 2, "input_ids": [3]}])
    assert batch.inputs["a"].tolist() == [1, 2]
    with pytest.raises(InterpError, match=r"\['input_ids'\] and \['other'\]"):
        batches([{"input_ids": [1]}, {"other": [1]}])


def test_samples_of_pixels_stay_bytes():
    (batch,) = batches([np.zeros((3, 2, 2), np.uint8)] * 2)
    assert (batch.inputs.dtype, batch.inputs.shape, batch.tokens) == (torch.uint8, (2, 3, 2, 2), None)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ([], "no samples"),
        (iter([]), "no batches"),
        (DataLoader(Stream([])), "no batches"),
        ("words", "tokenize it first"),
        (["words"], "tokenize texts first"),
        (Stream([torch.zeros(2)]), "wrap a stream of samples in a DataLoader"),
        (3, "the dataset is a int"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"a sample has shapes \[2, 3\], \[2, 4\]"),
        ([(torch.zeros(2), 1), (torch.zeros(3), 1)], r"item 0 has shapes"),
        (
            [{"input_ids": [1, 2], "attention_mask": [1]}],
            r"'attention_mask' is \[1, 1\], 'input_ids' \[1, 2\]",
        ),
        (iter([{"input_ids": torch.zeros(3)}]), "must give ready batches"),
        (iter([{"name": "x"}]), "without a tensor"),
        ({"a": [1, 2], "b": [1]}, "lengths"),
    ],
)
def test_open_dataset_says_what_it_cannot_take(dataset: Any, text: str):
    with pytest.raises(InterpError, match=text):
        batches(dataset)


def test_samples_of_truth_values_are_no_ids():
    (batch,) = batches(torch.ones(2, 3).bool())
    assert batch.tokens is None
    with pytest.raises(InterpError, match=r"a sample has shapes \[2\], \[3\]"):
        batches([[True, False], [True, False, True]])


def test_samples_refuse_a_batch_size_of_nothing():
    with pytest.raises(InterpError, match="batch_size is 0"):
        batches(RAGGED, 0)


def test_ready_batches_of_a_stream_have_no_length():
    items = [torch.full((3,), i) for i in range(5)]
    source = open_dataset(DataLoader(Stream(items), batch_size=2), 7, NAMES)
    assert isinstance(source, ReadyBatches) and source.num_batches is None
    for _ in range(2):  # it can be read again
        found = list(source.batches(0, None))
        assert [(b.number, b.first, b.size) for b in found] == [(0, 0, 2), (1, 2, 2), (2, 4, 1)]
        assert torch.equal(torch.cat([b.inputs for b in found]), torch.stack(items))


def test_ready_batches_take_all_that_comes():
    class Longer(Stream):
        def __len__(self) -> int:
            return 1

    source = ReadyBatches(Longer([torch.zeros(2, 3)] * 3), NAMES)
    assert source.num_batches == 1
    assert [b.number for b in source.batches(0, 1)] == [0, 1, 2]


def test_ready_batches_end_where_the_share_ends():
    source = open_dataset(DataLoader(TensorDataset(torch.zeros(9, 2)), batch_size=2), 7, NAMES)
    assert [(b.number, b.first) for b in source.batches(2, 4)] == [(2, 4), (3, 6)]


def test_fingerprint_sees_any_sample_of_a_small_dataset():
    ids = torch.randint(50, (200, 3))
    before = Samples(ids, 4, NAMES).fingerprint()
    for index in (0, 7, 199):
        changed = ids.clone()
        changed[index, 1] += 1
        assert Samples(changed, 4, NAMES).fingerprint() != before
    assert Samples(ids, 8, NAMES).fingerprint() == before
    assert Samples(ids[:199], 8, NAMES).fingerprint() != before
    assert Samples(torch.zeros(3000, 1), 8, NAMES).fingerprint()["samples"] == 3000


def test_fingerprint_sees_where_samples_begin():
    prints = [Samples(data, 1, NAMES).fingerprint() for data in ([[1, 2], [3]], [[1], [2, 3]])]
    assert prints[0] != prints[1]


def test_fingerprint_sees_another_first_batch():
    a, b, c = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3) * 2
    prints = [ReadyBatches(iter(order), NAMES).fingerprint() for order in ([a, b], [a, c], [b, a])]
    assert prints[0] == prints[1] != prints[2]


def test_checksum_depends_on_all_inputs():
    def checksum(**entries: Any) -> int:
        return Batch.of({"input_ids": torch.ones(2, 3, dtype=torch.int64)} | entries, NAMES, 0, 0).checksum()

    pixels = torch.zeros(2, 4)
    assert checksum(a=pixels) == checksum(a=pixels.clone())
    assert checksum(a=pixels, b=pixels + 1) == checksum(b=pixels + 1, a=pixels)
    assert len({checksum(), checksum(a=pixels), checksum(a=pixels + 1), checksum(a=(pixels, pixels))}) == 4


def tagged(tags: Any) -> int:
    return Batch.of({"input_ids": torch.ones(1, 3), "tags": [tags]}, Names(tokens=None), 0, 0).checksum()


def test_checksum_of_a_set_of_texts_is_the_same_in_each_process():
    code = (
        "import torch\nfrom forge_interp.extraction.samples import Batch, Names\n"
        "inputs = {'x': torch.ones(1, 3), 'tags': [{'a', 'b', 'c', 'd', 'e', frozenset('fgh')}]}\n"
        "print(Batch.of(inputs, Names(tokens=None), 0, 0).checksum())"
    )
    found = {
        subprocess.check_output([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert tagged({"a", "b"}) == tagged({"b", "a"}) != tagged({"a", "c"})


def test_checksum_tells_texts_bytes_and_numbers_apart():
    values = ["1", b"1", 1, 1.5, True, None, {"1"}, {1}, np.array(["1", "2"]), np.array(["1", "3"]), ["1", 2]]
    assert len({tagged(value) for value in values}) == len(values)
    assert tagged(np.str_("a")) == tagged("a") and tagged(np.array(["a"])) == tagged(["a"])


class Unordered:
    def __init__(self) -> None:
        self.names = {"a", "b"}


@pytest.mark.parametrize("value", [Unordered(), {"a", Unordered()}, np.array([Unordered()], object)])
def test_checksum_refuses_objects(value: Any):
    with pytest.raises(InterpError, match=r"a sample holds a Unordered, which cannot be compared"):
        tagged(value)


@pytest.mark.parametrize("place", [0, 7, 8, 63, 64, 299, 599])
def test_checksum_and_fingerprint_see_every_number_of_long_samples(place):
    before = torch.arange(600).reshape(2, 300)
    after = before.flatten().index_fill(0, torch.tensor([place]), 1000).reshape(2, 300)
    sums = [Batch.of(inputs, NAMES, 0, 0).checksum() for inputs in (before, after)]
    assert sums[0] != sums[1]
    prints = [Samples(inputs, 1, NAMES).fingerprint() for inputs in (before, after)]
    assert prints[0] != prints[1]


def test_batch_takes_the_mask_of_places_without_ids():
    embeds, mask = torch.zeros(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
    inputs: dict[str, Tensor] = {"inputs_embeds": embeds, "attention_mask": mask}
    batch = Batch.of(inputs, NAMES, 0, 0)
    assert batch.tokens is None and batch.mask is not None and torch.equal(batch.mask, mask.bool())
    assert Batch.of(inputs, Names(tokens=None), 0, 0).mask is None
    assert Batch.of(inputs, Names(mask=None), 0, 0).mask is None
    assert Batch.of(inputs | {"attention_mask": torch.ones(2, 3)}, NAMES, 0, 0).mask is None


def test_a_mask_of_the_encoder_is_refused_for_rows_of_the_decoder():
    ready = {"input_ids": PADDED, "attention_mask": MASK, "decoder_input_ids": PADDED.flip(0)}
    with pytest.raises(InterpError, match=r"that of the encoder.*mask='decoder_attention_mask'"):
        batches(iter([ready]), names=Names("decoder_input_ids"))
    (batch,) = batches(iter([ready]), names=Names("decoder_input_ids", None))
    assert batch.mask is None
