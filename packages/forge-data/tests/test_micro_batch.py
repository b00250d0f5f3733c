"""How micro-batches travel to a GPU: in one copy each, of memory that is pinned once."""

import contextlib
import itertools

import msgspec
import numpy as np
import pytest
import torch
from forge_data.config import DataConfig
from forge_data.loading.batches import Group
from forge_data.loading.loader import build_loader
from forge_data.loading.micro_batch import micro_batches
from forge_data.packing.packing import Ragged
from forge_data.sources.config import TokensConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Copies(TorchDispatchMode):
    """Copies to a played device: of how many elements, whether pinned, contiguous, and waited for."""

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self.pinned, self.found = pinned, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            (x,) = args
            waits = not (kwargs or {}).get("non_blocking", False)
            at = x.untyped_storage().data_ptr()
            self.found.append((x.numel(), at in self.pinned, x.is_contiguous(), waits))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def pinned(monkeypatch) -> set[int]:
    """The storages that were pinned, of which none really is."""
    known: set[int] = set()
    kept: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        kept.append(copy := tensor.contiguous().clone())
        known.add(copy.untyped_storage().data_ptr())
        return copy

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    return known


def drawn(labels: bool = True) -> Group:
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 99, (3, 2, 9))
    return Group(
        rows,
        generator.integers(-100, 99, (3, 2, 8)) if labels else None,
        {"doc_ids": generator.integers(0, 9, (3, 2, 8)), "weights": generator.random((3, 2, 8), np.float32)},
        {"images": Ragged(generator.random((7, 4), np.float32), np.asarray([[1, 0], [2, 2], [0, 2]]))},
        generator.integers(0, 2, (3, 2)),
        generator.integers(0, 16, 3),
    )


@pytest.mark.parametrize("labels", [False, True], ids=["next tokens", "labels"])
def test_each_micro_batch_is_one_pinned_copy_for_all_that_is_counted(labels, pinned):
    group = drawn(labels)
    plain = micro_batches(group, ("a", "b"), frozenset())
    for found, wanted in zip(micro_batches(group, ("a", "b"), frozenset(), True), plain, strict=True):
        with Copies(pinned) as copies:
            there = found.to("meta")
        width = 9 + 8 + 1 + (8 if labels else 0)
        assert copies.found[0] == (2 * width, True, True, False)
        # weights, images, and the count of targets
        assert [one[1:] for one in copies.found[1:]] == [(True, True, False)] * 3
        assert there.inputs.keys() == wanted.inputs.keys() and there.statistics.keys() == {
            "source",
            "targets",
        }
        here = found.to("cpu")
        for name, value in {**wanted.inputs, **wanted.statistics}.items():
            assert torch.equal({**found.inputs, **found.statistics}[name], value), name
            assert torch.equal({**here.inputs, **here.statistics}[name], value), name
            assert {**there.inputs, **there.statistics}[name].shape == value.shape


def test_inputs_that_were_replaced_travel_as_they_are(pinned):
    found = micro_batches(drawn(), (), frozenset(), True)[0]
    found.inputs["labels"] = found.inputs["labels"] + 1
    assert torch.equal(found.to("cpu").inputs["labels"], found.inputs["labels"])


def test_inputs_of_the_host_are_neither_pinned_nor_moved(pinned):
    found = micro_batches(drawn(), (), frozenset({"doc_ids", "images"}), True)[0]
    there = found.to("meta")
    assert there.inputs["doc_ids"].device.type == there.inputs["images"].device.type == "cpu"
    assert (
        not {x.untyped_storage().data_ptr() for x in (there.inputs["doc_ids"], there.inputs["images"])}
        & pinned
    )


@pytest.mark.parametrize("mask_documents", [False, True])
def test_loader_pins_each_group_once(mask_documents, make_store, pinned):
    source = TokensConfig(path=str(make_store("a", [30] * 20)))
    config = DataConfig(max_tokens=8, sources=[source])
    config = msgspec.structs.replace(config, mask_documents=mask_documents)
    steps = []
    for pin in (False, True):
        loader = build_loader(config, "train", micro_batch=2, global_batch=4)
        loader.pinned = pin
        with contextlib.closing(loader):
            steps.append(list(itertools.islice(iter(loader), 3)))
    for plain, found in zip(*steps, strict=True):
        for one, other in zip(plain, found, strict=True):
            with Copies(pinned) as copies:
                other.to("meta")
            assert len(copies.found) == 2 and all(pin and not waits for _, pin, _, waits in copies.found)
            assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
    assert len(pinned) == 2, "one group: its rows, and the counts of targets"
