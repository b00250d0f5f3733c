"""The format that runs have written still loads: a fixture of it lies here and is never changed."""

import shutil
from pathlib import Path

import pytest
import torch
from forge_ckpt import DamagedError, Snapshot, Store, UnsupportedError
from forge_ckpt.manifest import digest

FIXTURES = Path(__file__).parent / "fixtures"
WHOLE = torch.arange(30.0).reshape(6, 5)
STATE = {
    "model.w": WHOLE,
    "model.b": torch.arange(7).to(torch.bfloat16),
    "model.none": torch.zeros(0, 3),
    "model.s": torch.tensor(2.5, dtype=torch.float64),
    "optimizer.exp_avg.w": WHOLE * 2,
}


@pytest.fixture
def root(tmp_path):
    """A copy of a checkpoint of step 4."""
    return Path(shutil.copytree(FIXTURES / "format-2", tmp_path / "checkpoints"))


def test_a_checkpoint_of_an_earlier_version_loads_bit_for_bit(root):
    live = {name: torch.full_like(value, 9) for name, value in STATE.items()}
    found = Store(root).resume(lambda held: live)
    assert found is not None and found.step == 4 and found.values == {"state.step.w": 9}
    assert found.meta["note"].startswith("of format")
    assert all(torch.equal(live[name], value) for name, value in STATE.items())
    held = Store(root).tensors(4)
    assert all(torch.equal(held[name], value) for name, value in STATE.items())


def test_a_run_goes_on_from_it_and_keeps_it(root):
    store = Store(root, keep=2)
    store.save(4, Snapshot(STATE))  # is there
    store.save(5, Snapshot({"x": torch.ones(2)}))
    assert store.steps() == [4, 5] and store.verify(4).step == 4
    store.save(6, Snapshot({"x": torch.ones(2)}))
    assert store.prune() == [] and store.steps() == [5, 6]


def test_each_flipped_bit_of_values_is_found(root):
    count = 0
    for path in sorted((root / "step-000000004").glob("*.bin")):
        data = path.read_bytes()
        values = {
            place
            for value in STATE.values()
            for rows in (value, *(value.split(3) if value.ndim == 2 else ()))
            if (raw := rows.flatten().view(torch.uint8).numpy().tobytes()) and (first := data.find(raw)) >= 0
            for place in range(first, first + len(raw))
        }
        count += len(values)
        for place in sorted(values)[::3]:
            path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
            with pytest.raises(DamagedError):
                Store(root).verify(4)
        path.write_bytes(data)
    assert count == sum(value.nbytes for value in STATE.values()) and Store(root).verify(4).step == 4


def test_lost_short_and_forged_files_are_found(root):
    for path in sorted((root / "step-000000004").iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(DamagedError):
            Store(root).verify(4)
        path.unlink()
        with pytest.raises(DamagedError):
            Store(root).verify(4)
        path.write_bytes(data)


@pytest.mark.parametrize("version", [1, 3])
def test_other_formats_are_refused_by_their_number(root, version):
    path = root / "step-000000004" / "manifest.json"
    body = path.read_bytes().partition(b"\n")[2]
    assert b'"format":2' in body
    other = body.replace(b'"format":2', f'"format":{version}'.encode())
    path.write_bytes(digest(other).hex().encode() + b"\n" + other)
    with pytest.raises(UnsupportedError, match=f"format {version}; this version reads format 2"):
        Store(root).verify(4)
