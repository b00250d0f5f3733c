"""What stays for good because somebody said so: pins, and dense windows of steps."""

import shutil

import msgspec
import pytest
import torch
from forge_ckpt import CheckpointConfig, CheckpointError, DenseConfig, Snapshot, Store
from forge_ckpt import pins as pins_module
from forge_ckpt.pins import pin, pins, unpin


def saved(root, *steps: int, **options) -> Store:
    store = Store(root, **options)
    for step in steps:
        store.save(step, Snapshot({"w": torch.tensor(float(step))}))
    return store


def test_pinned_checkpoint_is_kept_by_retention_and_by_prune_until_it_is_unpinned(tmp_path):
    saved(tmp_path, 1, 2)
    pin(tmp_path, 1)
    pin(tmp_path, 1)
    store = saved(tmp_path, 3, 4, 5, keep=2)
    assert store.steps() == [1, 4, 5] and pins(tmp_path) == [1]
    assert Store(tmp_path, keep=1).prune() == [4]
    unpin(tmp_path, 1)
    assert Store(tmp_path, keep=1).prune() == [1]


def test_what_is_not_there_is_neither_pinned_nor_unpinned(tmp_path, monkeypatch):
    assert pins(tmp_path / "none") == []
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
        pin(tmp_path, 2)
    with pytest.raises(CheckpointError, match="step 1 is not pinned"):
        unpin(tmp_path, 1)
    touch = pins_module.Path.touch

    def removed_meanwhile(path):
        touch(path)
        shutil.rmtree(tmp_path / "step-000000001")

    monkeypatch.setattr(pins_module.Path, "touch", removed_meanwhile)
    with pytest.raises(CheckpointError, match="no checkpoint of step 1"):
        pin(tmp_path, 1)
    assert pins(tmp_path) == []


def test_dense_windows_hold_their_steps_and_stay(tmp_path):
    config = CheckpointConfig(
        dense=(DenseConfig(to_step=20), DenseConfig(from_step=30, to_step=50, every=10)), keep=2
    )
    dense = [step for step in range(100) if config.is_dense(step)]
    assert dense == [1, 2, 4, 8, 16, 30, 40, 50]
    store = saved(tmp_path, 1, 2, 3, 4, 5, 6, keep=2, stays=config.is_dense)
    assert store.steps() == [1, 2, 4, 5, 6]
    assert Store(tmp_path, keep=1).prune() == [5]  # those of windows say so themselves


def test_what_stays_for_good_does_not_count_among_the_newest(tmp_path):
    config = CheckpointConfig(dense=(DenseConfig(from_step=6, to_step=8, every=1),), keep=2)
    store = saved(tmp_path, 2, 4, 5, 6, 7, 8, keep=2, stays=config.is_dense)
    assert store.steps() == [4, 5, 6, 7, 8]
    assert Store(tmp_path, keep=1).prune() == [4]
    store = saved(tmp_path / "milestones", 5, 10, 12, 15, 20, keep=2, keep_every_steps=10)
    assert store.steps() == [10, 12, 15, 20]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"from_step": 9, "to_step": 8}, "is before"),
        ({"from_step": 9, "to_step": 15}, "no power of two"),
        ({"to_step": 0}, "1"),
        ({"to_step": 5, "every": 0}, "every"),
        ({}, "to_step"),
    ],
)
def test_dense_windows_without_steps_are_refused(given, expected):
    with pytest.raises(msgspec.ValidationError, match=expected):
        msgspec.convert(given, DenseConfig)


@pytest.mark.parametrize("window", [(9, 16), (8, 8), (5, 8), (1, 1)])
def test_dense_windows_with_one_power_of_two_are_taken(window):
    config = DenseConfig(from_step=window[0], to_step=window[1])
    assert sum(config.holds(step) for step in range(20)) == 1
