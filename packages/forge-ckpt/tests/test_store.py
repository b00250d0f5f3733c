import errno
import os
import random
import signal
import time

import pytest
import torch
from forge_ckpt import CheckpointError, DamagedError, Snapshot, Store
from forge_ckpt import manifest as manifests


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.w": torch.randn(7, 5, generator=generator),
        "model.b": torch.randn(3, generator=generator).bfloat16(),
        "optimizer.step.w": torch.tensor(float(step)),
        "model.ids": torch.arange(step, step + 4),
        "model.empty": torch.zeros(0, 3),
    }


def blanks() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 77) for key, value in tensors(0).items()}


def resume(root) -> tuple[dict[str, torch.Tensor], manifests.Manifest | None]:
    into = blanks()
    return into, Store(root).resume(lambda held: into)


def assert_holds(into: dict[str, torch.Tensor], step: int) -> None:
    for key, value in tensors(step).items():
        assert torch.equal(into[key], value) and into[key].dtype == value.dtype, key


def saved(root, *steps: int, **options) -> Store:
    store = Store(root, **options)
    for step in steps:
        store.save(step, Snapshot(tensors(step), {"at": step}))
    return store


def test_store_gives_back_every_bit_and_the_meta(tmp_path):
    saved(tmp_path, 1, 2)
    into, found = resume(tmp_path)
    assert found is not None and found.meta == {"at": 2} and found.step == 2
    assert_holds(into, 2)


def test_store_of_a_new_run_has_nothing_to_resume(tmp_path):
    assert resume(tmp_path / "none")[1] is None


def test_saving_a_step_twice_changes_nothing(tmp_path):
    store = saved(tmp_path, 5)
    before = {p.name: p.stat().st_mtime_ns for p in store.folder(5).iterdir()}
    store.save(5, Snapshot(tensors(6), {}))
    assert {p.name: p.stat().st_mtime_ns for p in store.folder(5).iterdir()} == before


def test_saving_a_damaged_step_again_replaces_it(tmp_path):
    store = saved(tmp_path, 4, 5)
    (store.folder(5) / "rank-00000.bin").unlink()
    store.save(5, Snapshot(tensors(5), {}))
    store.verify(5)


def damage_every_byte(path, rng: random.Random, count: int = 40):
    """Copies of a file with one bit flipped, at places all over it."""
    data = path.read_bytes()
    for place in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(count))}:
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        yield bytes(changed)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.bin"])
def test_flipped_bit_anywhere_is_found_or_harmless(tmp_path, name):
    store = saved(tmp_path, 1)
    used = [c for entry in manifests.read(store.folder(1)).tensors.values() for c in entry.chunks]
    path = store.folder(1) / name
    data = path.read_bytes()
    for changed in damage_every_byte(path, random.Random(0)):
        path.write_bytes(changed)
        place = next(i for i, (a, b) in enumerate(zip(data, changed, strict=True)) if a != b)
        padding = name != "manifest.json" and not any(
            c.offset <= place < c.offset + c.num_bytes for c in used
        )
        if padding:
            store.verify(1)
        else:
            with pytest.raises(DamagedError):
                store.verify(1)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.bin"])
@pytest.mark.parametrize("how", ["truncated", "missing", "stale", "symlink"])
def test_damaged_newest_is_put_aside_and_the_older_one_taken(tmp_path, name, how):
    store = saved(tmp_path, 1, 2)
    path = store.folder(2) / name
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "missing":
        path.unlink()
    elif how == "stale":
        path.write_bytes((store.folder(1) / name).read_bytes())
    else:
        elsewhere = tmp_path / "elsewhere"
        # the data are intact there, but who prunes or copies the checkpoint does not take them along
        intact = path.read_bytes()
        elsewhere.write_bytes(intact[:-1] + b"x" if name == "manifest.json" else intact)
        path.unlink()
        path.symlink_to(elsewhere)
    into, found = resume(tmp_path)
    if how == "stale" and name == "manifest.json":
        # the manifest of step 1 in the folder of step 2 does not describe the data of step 2
        assert found is not None and found.meta == {"at": 1}
    assert found is not None and found.step == 1
    assert_holds(into, 1)
    assert list(tmp_path.glob(".bad-000000002-*"))


def test_run_that_lost_all_its_checkpoints_does_not_start_anew(tmp_path):
    store = saved(tmp_path, 1, 2)
    for step in (1, 2):
        (store.folder(step) / "manifest.json").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="once held step 2"):
        resume(tmp_path)


def test_live_tensors_stay_untouched_when_nothing_is_intact(tmp_path):
    store = saved(tmp_path, 1)
    path = store.folder(1) / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    into = blanks()
    with pytest.raises(CheckpointError):
        Store(tmp_path).resume(lambda held: into)
    assert all(torch.equal(value, blanks()[key]) for key, value in into.items())


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"model.w": torch.zeros(7, 6)}, r"model.w is float32 \[7, 5\], wanted float32 \[7, 6\]"),
        ({"model.w": torch.zeros(7, 5, dtype=torch.float64)}, "wanted float64"),
        ({"model.new": torch.zeros(1)}, "model.new is not in the checkpoint"),
    ],
)
def test_checkpoint_that_does_not_fit_is_an_error_not_damage(tmp_path, change, needle):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=needle):
        Store(tmp_path).resume(lambda held: blanks() | change)
    assert Store(tmp_path).steps() == [1]


def test_tensor_that_nobody_wants_is_an_error(tmp_path):
    saved(tmp_path, 1)
    wanted = {key: value for key, value in blanks().items() if key != "model.b"}
    with pytest.raises(CheckpointError, match=r"model.b is not wanted"):
        Store(tmp_path).resume(lambda held: wanted)


def test_prune_keeps_the_newest_and_the_milestones(tmp_path):
    store = saved(tmp_path, *range(1, 11), keep=2, keep_every_steps=4)
    assert store.steps() == [4, 8, 9, 10]
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith((".tmp", ".trash"))]


def test_prune_never_removes_the_last_intact_one(tmp_path):
    store = saved(tmp_path, 1, 2, 3, 4, keep=4)
    for step in (2, 3, 4):
        (store.folder(step) / "manifest.json").unlink()
    store.keep = 2
    store.prune()
    assert 1 in store.steps()
    assert_holds(resume(tmp_path)[0], 1)


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_disk_that_is_full_is_an_error_and_leaves_the_older_one(tmp_path, monkeypatch, failing):
    store = saved(tmp_path, 1)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "write":
        monkeypatch.setattr("forge_ckpt.shards.write_boxes", fail)
    else:
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises((CheckpointError, OSError), match="No space left"):
        store.save(2, Snapshot(tensors(2), {}))
    monkeypatch.undo()
    into, found = resume(tmp_path)
    assert found is not None and found.step == 1
    assert_holds(into, 1)


def save_forever(root) -> None:
    store = Store(root, keep=2)
    step = max([0, *store.steps()])
    while True:
        step += 1
        store.save(step, Snapshot(tensors(step), {"at": step}))


@pytest.mark.slow
def test_killed_at_any_moment_leaves_an_intact_newest(tmp_path, forks):
    rng = random.Random(0)
    newest = 0
    for _ in range(25):
        child = forks.start(save_forever, tmp_path)
        end = time.monotonic() + 30
        while time.monotonic() < end and Store(tmp_path).progress() <= newest:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert forks.wait(child) == -signal.SIGKILL
        committed = Store(tmp_path).progress()
        into, found = resume(tmp_path)
        assert found is not None and found.step >= committed > newest
        assert_holds(into, found.step)
        newest = committed


def save_until(root, call: int) -> None:
    """Save, and end just before the given one of the calls that make it durable, as by SIGKILL."""
    count = 0

    def counted(original):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                os._exit(9)
            return original(*args, **kwargs)

        return run

    os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
    saved(root, 2)


@pytest.mark.parametrize("call", range(1, 9))
def test_killed_at_each_durable_call_of_a_save(tmp_path, forks, call):
    saved(tmp_path, 1)
    code = forks.run(save_until, tmp_path, call)
    into, found = resume(tmp_path)
    assert found is not None
    assert found.step == (2 if code == 0 or call > 4 else 1)
    assert_holds(into, found.step)
    saved(tmp_path, 3)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".t")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rank-00000.bin":', b'"../../etc/passwd":'),
        (b'"rank-00000.bin":', b'"/etc/passwd":'),
        (b'"offset":0', b'"offset":-9'),
        (b'"shape":[7,5]', b'"shape":[7,9]'),
        (b'"format":1', b'"format":9'),
    ],
)
def test_manifest_with_a_good_digest_but_bad_content_is_refused(tmp_path, old, new):
    store = saved(tmp_path, 1)
    path = store.folder(1) / manifests.NAME
    body = path.read_bytes().partition(b"\n")[2].replace(old, new, 1)
    import xxhash

    path.write_bytes(xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body)
    with pytest.raises(DamagedError):
        manifests.read(store.folder(1))
