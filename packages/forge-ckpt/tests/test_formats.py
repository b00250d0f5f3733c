"""Every format that was ever written still loads: fixtures of each lie in the repository, never changed."""

import shutil
from pathlib import Path

import pytest
import torch
from forge_ckpt import CheckpointError, DamagedError, Snapshot, Store, UnsupportedError
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


@pytest.fixture(params=[1, 2])
def root(request, tmp_path):
    """A copy of a checkpoint of step 4 in one of the formats; that of format 1 was written by two ranks."""
    return Path(shutil.copytree(FIXTURES / f"format-{request.param}", tmp_path / "checkpoints"))


def test_a_checkpoint_of_each_format_loads_bit_for_bit(root):
    live = {name: torch.full_like(value, 9) for name, value in STATE.items()}
    found = Store(root).resume(lambda held: live)
    assert found is not None and found.step == 4 and found.values == {"state.step.w": 9}
    assert found.meta["note"].startswith("of format")
    assert all(torch.equal(live[name], value) for name, value in STATE.items())
    held = Store(root).tensors(4)
    assert all(torch.equal(held[name], value) for name, value in STATE.items())


def test_a_run_goes_on_from_each_format_and_keeps_it(root):
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"file":"rank-00001.bin"', b'"file":"../../secret"'),
        (b'"world_size":2', b'"world_size":1'),
        (b'"start":[3,0]', b'"start":[2,0]'),
        (b'"shape":[3,5]', b'"shape":[4,5]'),
        (b'"offset":0', b'"offset":8'),
        (b'"num_bytes":60', b'"num_bytes":61'),
        (b'"dtype":"float64"', b'"dtype":"object"'),
        (b'"format":1', b'"format":3'),
    ],
)
def test_forged_manifests_of_format_1_are_refused(tmp_path, old, new):
    root = Path(shutil.copytree(FIXTURES / "format-1", tmp_path / "checkpoints"))
    path = root / "step-000000004" / "manifest.json"
    body = path.read_bytes().partition(b"\n")[2]
    assert old in body
    forged = body.replace(old, new)
    path.write_bytes(digest(forged).hex().encode() + b"\n" + forged)
    with pytest.raises(CheckpointError) as caught:
        Store(root).verify(4)
    assert isinstance(caught.value, UnsupportedError | DamagedError)
