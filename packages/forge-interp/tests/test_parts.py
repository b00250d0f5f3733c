import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.folder import Parts
from forge_interp.extraction.run import parts as writing
from forge_interp.extraction.run.parts import Column, Part, PartWriter, as_bytes, dump, replacing
from forge_interp.extraction.samples import Batch, Names
from forge_interp.extraction.store import ActivationStore
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.uint8,
    torch.bool,
)
IDS = torch.randint(9, (12, 5), generator=torch.Generator().manual_seed(0))
BATCH = Batch.of(IDS, Names(), 7, 0)


def make_values(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {
        f"h.{i}:out#{i}": (torch.randn(rows, 3, 2, generator=generator) * 9).to(dtype)
        for i, dtype in enumerate(DTYPES)
    }
    return values | {"a/b%:attn.entropy": torch.randn(rows, generator=generator)}


def bits(value: Tensor) -> list[int]:
    return list(as_bytes(value))


def write(folder: Path | None, *batches: dict[str, Tensor]) -> PartWriter:
    writer = PartWriter((), folder)
    for batch in batches:
        for name, values in batch.items():
            writer.write(name, values)
        writer.commit(BATCH)
    return writer


def extract(out: Path, **options: Any) -> ActivationStore:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    return extract_representations(model, IDS, "*", out, batch_size=2, progress=False, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("held_bytes", [1, 1 << 24])
@pytest.mark.parametrize("rows", [(0,), (1,), (11,), (3, 0, 5)])
def test_part_gives_back_every_dtype_bit_for_bit(
    tmp_path: Path, rows: tuple[int, ...], held_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writing, "_SPOOL_BYTES", held_bytes)
    batches = [make_values(count, seed) for seed, count in enumerate(rows)]
    write(tmp_path, *batches).publish(tmp_path / "part", dump({"seed": 1}))
    part = Part.read(tmp_path / "part")
    assert part is not None and part.is_intact
    assert (part.rows, part.batches, part.request) == (sum(rows), len(rows), {"seed": 1})
    assert [column.name for column in part.columns] == list(batches[0])
    found = load_file(tmp_path / "part")
    writer = write(None, *batches)
    held = writer.tensors()
    writer.close()
    for name in batches[0]:
        expected = torch.cat([batch[name] for batch in batches])
        for values in (found[name], held[name]):
            assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
            assert bits(values) == bits(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


def test_part_holds_no_more_in_memory_than_it_is_meant_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "_SPOOL_BYTES", 1000)
    writer = write(tmp_path, {"x:out": torch.zeros(240)}, {"x:out": torch.zeros(240)})
    assert writer._spool._rolled
    writer.close()
    assert not list(tmp_path.iterdir())


def test_part_is_damaged_when_a_byte_was_changed_or_cut(tmp_path: Path):
    path = tmp_path / "part"
    write(tmp_path, make_values(5)).publish(path, "{}")
    data = path.read_bytes()
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(len(data), (150,), generator=generator).tolist()
    padding = data[: int.from_bytes(data[:8], "little") + 8].rstrip(b" ")
    for place in [*range(12), *places]:
        if len(padding) <= place < int.from_bytes(data[:8], "little") + 8:
            continue
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        part = Part.read(path)
        assert part is None or not part.is_intact, place
        path.write_bytes(data[:place])
        assert Part.read(path) is None
    path.unlink()
    assert Part.read(path) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"a:out": torch.zeros(3, 5), "b:out": torch.zeros(3).bfloat16()},
            r"batch 7 captured a:out \[5\] float32, those before a:out \[4\] float32;.*pool",
        ),
        (
            {"a:out": torch.zeros(3, 4).half(), "b:out": torch.zeros(3).bfloat16()},
            r"a:out \[4\] float16, those before a:out \[4\] float32",
        ),
        (
            {"a:out": torch.zeros(3, 4)},
            r"batch 7 captured nothing else, those before b:out \[\] bfloat16;.*call of their own",
        ),
        (
            {"a:out": torch.zeros(3, 4), "b:out": torch.zeros(2).bfloat16()},
            r"batch 7 has rows \{'a:out': 3, 'b:out': 2\}",
        ),
        (
            {"a:out": torch.zeros(3, 4), "b:out": torch.zeros(3).bfloat16(), "c:out": torch.zeros(3)},
            r"batch 7 captured c:out \[\] float32, those before nothing else",
        ),
        ({"a:out": torch.zeros(3, 4).to(torch.complex64)}, "view_as_real"),
    ],
)
def test_part_refuses_a_batch_unlike_the_first(tmp_path: Path, values: dict[str, Tensor], text: str):
    writer = write(tmp_path, {"a:out": torch.ones(2, 4), "b:out": torch.ones(2).bfloat16()})
    with pytest.raises(InterpError, match=text):
        for name, value in values.items():
            writer.write(name, value)
        writer.commit(BATCH)
    writer.close()


def test_part_refuses_a_site_twice_in_a_batch(tmp_path: Path):
    writer = PartWriter((Column("a:out", torch.float32, ()),), tmp_path)
    writer.write("a:out", torch.zeros(3))
    with pytest.raises(InterpError, match="twice"):
        writer.write("a:out", torch.zeros(3))
    writer.close()


def test_part_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    path = tmp_path / "part"
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, path.exists())))
    write(tmp_path, make_values(5)).publish(path, "{}")
    assert synced == [(path.stat().st_ino, False)]


def test_index_is_written_when_all_names_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []

    def sync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(name).suffix, (tmp_path / "a" / "index.json").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    extract(tmp_path / "a")
    assert synced == [(".tmp", False)] * 6 + [("", False), (".tmp", False), ("", True)]


def test_replacing_leaves_nothing_when_the_disk_is_full(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(OSError, match="No space"), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert contents(tmp_path) == {"a": b"before"}


def test_replacing_gives_way_to_a_process_that_has_done_the_same(tmp_path: Path):
    def tidy_up() -> None:
        for left in tmp_path.glob("*.tmp"):
            left.unlink()

    with replacing(tmp_path / "a") as file:
        file.write(b"same")
        (tmp_path / "a").write_bytes(b"same")
        tidy_up()
    assert contents(tmp_path) == {"a": b"same"}
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "b"):
        tidy_up()


def test_extract_goes_on_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    extract(tmp_path / "whole")
    synced = []

    def limited(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", limited)
        with pytest.raises(OSError, match="No space left") as caught:
            extract(tmp_path / "cut")
    assert "call again, and it goes on" in caught.value.__notes__[0]
    assert sorted(contents(tmp_path / "cut")) == [f"part-0000{i}.safetensors" for i in range(3)]
    extract(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_extract_writes_a_part_again_that_a_disk_has_changed(tmp_path: Path):
    extract(tmp_path / "a")
    whole = contents(tmp_path / "a")
    for name in ("part-00001.safetensors", "part-00004.safetensors"):
        data = bytearray(whole[name])
        data[-3] ^= 1
        (tmp_path / "a" / name).write_bytes(data)
    extract(tmp_path / "a")
    assert contents(tmp_path / "a") == whole


def test_extract_replaces_parts_of_another_format_but_not_those_of_another_call(tmp_path: Path):
    extract(tmp_path / "whole")
    extract(tmp_path / "a")
    for path in (tmp_path / "a").glob("part-*"):
        rows = load_file(path)
        save_file(rows, path, {"forge_interp": dump({"request": {}, "rows": len(rows["sample_id"])})})
    before = contents(tmp_path / "a")
    with pytest.raises(InterpError, match='pool: null there, "mean" asked'):
        extract(tmp_path / "a", pool="mean")
    assert contents(tmp_path / "a") == before
    store = extract(tmp_path / "a")
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")
    assert store.rows == ActivationStore.open(tmp_path / "whole").rows


def test_extract_uses_hardly_more_of_the_disk_than_the_rows(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 256), nn.Linear(256, 256))
    most = 0

    def used() -> int:
        return sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))

    def forward(model: nn.Module, ids: Tensor) -> None:
        nonlocal most
        model(ids)
        most = max(most, used())

    ids = torch.randint(9, (64, 128))
    store = extract_representations(model, ids, "*", tmp_path / "a", forward=forward, identity="measured")
    payload = sum(store[site].nbytes for site in store) + 3 * store.rows * 8
    assert max(most, used()) < 1.05 * payload


def test_parts_of_other_calls_do_not_become_one(tmp_path: Path):
    for number, request in enumerate(({"a": 1}, {"a": 1}, {"a": 2})):
        path = Parts(tmp_path, {}).path(number)
        write(tmp_path, {"x:out": torch.zeros(number, 2 + number % 2)}).publish(path, dump(request))
    for total, text in ((3, r"holds x:out \[3\] float32, part-00000.safetensors holds x:out \[2\]"),):
        with pytest.raises(InterpError, match=text):
            Parts(tmp_path, {}).finish(total)
    write(tmp_path, {"x:out": torch.zeros(2, 2)}).publish(Parts(tmp_path, {}).path(1), dump({"a": 1}))
    with pytest.raises(InterpError, match="a: 2 there, 1 asked"):
        Parts(tmp_path, {}).finish(3)
    assert not (tmp_path / "index.json").exists()
    assert Parts(tmp_path, {}).finish(2)


def test_parts_may_be_more_than_a_hundred_thousand(tmp_path: Path):
    parts = Parts(tmp_path, {})
    for number in (7, 123456):
        write(tmp_path, {"x:out": torch.zeros(1)}).publish(parts.path(number), "{}")
    assert sorted(parts.intact(0, None)) == [7, 123456]


def test_as_bytes_leaves_the_storage_resizable():
    weights = torch.arange(4, dtype=torch.int16)
    data = as_bytes(weights)
    assert bytes(data) == b"\0\0\1\0\2\0\3\0"
    weights.untyped_storage().resize_(0)
    data = as_bytes(torch.full((3,), 7, dtype=torch.uint8))
    assert bytes(data) == b"\7\7\7"
    assert bytes(as_bytes(torch.arange(6, dtype=torch.uint8).view(2, 3).T)) == b"\0\3\1\4\2\5"
