"""Ranks that do not agree on what they save: told on all of them, and nothing is published."""

import threading

import pytest
import torch
from faults import on_ranks
from forge_ckpt import CheckpointError, Snapshot, Store


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((7, 5), float(step)), "model.ids": torch.arange(step, step + 4)}


def on_three(root, *saves) -> list:
    """Each of three ranks saves what it is given."""

    def save(rank, ranks):
        store = Store(root, keep=9)
        store._ranks = ranks
        store.save(*saves[rank])

    return on_ranks(3, save)


@pytest.mark.parametrize("there", [[], [1]])
def test_ranks_that_save_different_steps_are_told(tmp_path, there):
    for step in there:
        Store(tmp_path).save(step, Snapshot(tensors(step)))
    results = on_three(tmp_path, *((step, Snapshot(tensors(1), {})) for step in (1, 1, 2)))
    assert all("rank 2: this is step 2 here, and 1 on the first rank" in str(one) for one in results)
    assert Store(tmp_path).steps() == there


def test_ranks_of_other_machines_do_not_share_memory(monkeypatch):
    machine_of: dict[int, str] = {}

    def count(rank, ranks):
        machine_of[threading.get_ident()] = "aba"[rank]
        return ranks.on_this_machine()

    monkeypatch.setattr("forge_ckpt.ranks.this_machine", lambda: machine_of[threading.get_ident()])
    assert on_ranks(3, count) == [2, 1, 2]


@pytest.mark.parametrize("value", [object(), "\ud800", float("nan"), {1: 2}])
def test_what_one_rank_cannot_write_down_fails_the_save_on_all(tmp_path, value):
    values = [{"a.b.c": 1}, {"a.b.d": value}, {}]
    results = on_three(tmp_path, *((1, Snapshot(tensors(1), {}, one)) for one in values))
    assert all(isinstance(one, CheckpointError) and "rank 1: " in str(one) for one in results), results
    assert on_three(tmp_path, *[(2, Snapshot(tensors(2), {}))] * 3) == [None] * 3
    assert Store(tmp_path).steps() == [2] and not list(tmp_path.glob(".tmp-*"))


def test_ranks_with_values_of_their_own_still_share_the_writing(tmp_path):
    held = {f"w{number}": torch.full((100,), float(number)) for number in range(6)}
    snapshots = [Snapshot(held, {}, {f"data.place.{rank}": rank}) for rank in range(3)]
    assert on_three(tmp_path, *((1, one) for one in snapshots)) == [None] * 3
    sizes = [(tmp_path / "step-000000001" / f"rank-0000{rank}.bin").stat().st_size for rank in range(3)]
    assert max(sizes) < 2 * min(sizes)
    assert Store(tmp_path).newest().values == {f"data.place.{rank}": rank for rank in range(3)}
