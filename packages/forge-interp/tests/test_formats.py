import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.columns import BLOCK_BYTES, Column, as_bytes
from forge_interp.extraction.formats import ROW_COLUMNS, describe, format_of
from torch import Tensor

NAMES = ("acts.npz", "acts.safetensors", "acts.zarr", "acts")
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


def make_values(rows: int, dtypes=DTYPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {
        f"h.{i}:out#{i}": (torch.randn(rows, 3, 2, generator=generator) * 9).to(dtype)
        for i, dtype in enumerate(dtypes)
    }
    values["a/b%:attn.entropy"] = torch.randn(rows, generator=generator)
    return values | {column.name: torch.arange(rows) * 7 - 1 for column in ROW_COLUMNS}


def write(path: Path, values: dict[str, Tensor], block: int = 40) -> list[Path]:
    columns = [Column(name, value.dtype, tuple(value.shape[1:])) for name, value in values.items()]

    def blocks(column: Column) -> Iterator[memoryview]:
        data = as_bytes(values[column.name])
        for start in range(0, len(data), block):
            yield data[start : start + block]

    rows = len(next(iter(values.values())))
    return format_of(path).write(path, columns, rows, blocks, describe(columns, rows, {"seed": 1}))


def bits(value: Tensor) -> list[int]:
    return list(as_bytes(value))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [0, 1, 11])
def test_format_gives_back_every_dtype_bit_for_bit(tmp_path: Path, name: str, rows: int):
    values = make_values(rows)
    assert write(tmp_path / name, values) == [tmp_path / name]
    metadata, located = format_of(tmp_path / name).open(tmp_path / name)
    assert metadata["sites"] == [key for key in values if ":" in key]
    assert metadata["request"] == {"seed": 1}
    for key, value in values.items():
        for found in (located[key].map(), located[key].read(0, rows)):
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert bits(found) == bits(value)


@pytest.mark.parametrize("name", NAMES)
def test_format_reads_any_rows(tmp_path: Path, name: str):
    values = make_values(50, (torch.bfloat16,))
    write(tmp_path / name, values)
    located = format_of(tmp_path / name).open(tmp_path / name)[1]
    for start, stop in [(0, 1), (7, 7), (13, 50), (49, 50)]:
        assert bits(located["h.0:out#0"].read(start, stop)) == bits(values["h.0:out#0"][start:stop])


@pytest.mark.parametrize("name", NAMES)
def test_format_maps_copies_that_do_not_reach_the_file(tmp_path: Path, name: str):
    values = make_values(5)
    write(tmp_path / name, values)
    located = format_of(tmp_path / name).open(tmp_path / name)[1]
    located["h.1:out#1"].map().zero_()
    assert bits(located["h.1:out#1"].map()) == bits(values["h.1:out#1"])


@pytest.mark.parametrize("name", ["acts.npz", "acts.safetensors"])
def test_format_aligns_mapped_arrays(tmp_path: Path, name: str):
    write(tmp_path / name, make_values(5))
    located = format_of(tmp_path / name).open(tmp_path / name)[1]
    assert all(located[key].map().data_ptr() % located[key].column.dtype.itemsize == 0 for key in located)


def test_npz_opens_with_numpy(tmp_path: Path):
    values = make_values(9)
    write(tmp_path / "acts.npz", values)
    with np.load(tmp_path / "acts.npz") as archive:
        np.testing.assert_array_equal(archive["h.1:out#1"], values["h.1:out#1"].numpy())
        np.testing.assert_array_equal(
            archive["h.3:out#3"], values["h.3:out#3"].view(torch.int16).numpy().view("u2")
        )
        np.testing.assert_array_equal(archive["sample_id"], values["sample_id"].numpy())
        assert json.loads(str(archive["metadata"]))["dtypes"]["h.3:out#3"] == "bfloat16"


def test_safetensors_opens_with_safetensors(tmp_path: Path):
    values = make_values(9)
    write(tmp_path / "acts.safetensors", values)
    found = safetensors.torch.load_file(tmp_path / "acts.safetensors")
    assert found.keys() == values.keys()
    assert all(
        found[key].dtype == value.dtype and bits(found[key]) == bits(value) for key, value in values.items()
    )


def test_folder_opens_with_numpy(tmp_path: Path):
    values = make_values(9)
    write(tmp_path / "acts", values)
    mapped = np.load(tmp_path / "acts" / "h.0:out#0.npy", mmap_mode="r")
    np.testing.assert_array_equal(mapped, values["h.0:out#0"].numpy())


def test_zarr_opens_with_zarr(tmp_path: Path):
    zarr = pytest.importorskip("zarr")
    generator = torch.Generator().manual_seed(0)
    values = make_values(9) | {"wide:out": torch.randn(300, 24, 512, generator=generator)[:9]}
    write(tmp_path / "acts.zarr", values)
    group = zarr.open_group(tmp_path / "acts.zarr", mode="r")
    assert group.attrs["forge_interp"]["rows"] == 9
    np.testing.assert_array_equal(group["h.0:out#0"][:], values["h.0:out#0"].numpy())
    np.testing.assert_array_equal(group["h.7:out#7"][:], values["h.7:out#7"].numpy())
    np.testing.assert_array_equal(group["wide:out"][3:7], values["wide:out"][3:7].numpy())
    assert group["h.3:out#3"].dtype == np.uint16
    assert group["h.3:out#3"].attrs["dtype"] == "bfloat16"


def test_zarr_cuts_rows_into_chunks(tmp_path: Path):
    values = {"x:out": torch.randn(700, 8192), **{c.name: torch.arange(700) for c in ROW_COLUMNS}}  # 22 MiB
    write(tmp_path / "acts.zarr", values, block=BLOCK_BYTES - 8)
    files = sorted(path for path in (tmp_path / "acts.zarr" / "x:out" / "c").rglob("*") if path.is_file())
    assert [path.stat().st_size for path in files] == [234 * 8192 * 4] * 3
    ids = sorted(path for path in (tmp_path / "acts.zarr" / "position" / "c").iterdir())
    assert [path.stat().st_size for path in ids] == [700 * 8]
    located = format_of(tmp_path / "acts.zarr").open(tmp_path / "acts.zarr")[1]
    assert torch.equal(located["x:out"].read(250, 600), values["x:out"][250:600])


def test_npy_holds_one_site_with_the_ids_beside_it(tmp_path: Path):
    values = make_values(6, ())
    path = tmp_path / "acts.npy"
    assert write(path, values) == [tmp_path / "acts.rows.npz", path]
    np.testing.assert_array_equal(np.load(path), values["a/b%:attn.entropy"].numpy())
    _, located = format_of(path).open(path)
    assert all(torch.equal(located[key].map(), value) for key, value in values.items())


def test_npy_refuses_two_sites(tmp_path: Path):
    with pytest.raises(InterpError, match=r"2 sites.*name a folder"):
        write(tmp_path / "acts.npy", make_values(6, (torch.float32,)))


def test_npz_is_zip64_so_that_members_may_exceed_4_gib(tmp_path: Path):
    write(tmp_path / "acts.npz", make_values(2))
    data = (tmp_path / "acts.npz").read_bytes()
    assert data[:4] == b"PK\x03\x04"
    assert data[18:26] == b"\xff" * 8  # both sizes are in the extra field


@pytest.mark.parametrize("name", NAMES)
def test_format_writes_equal_bytes_for_equal_rows(tmp_path: Path, name: str):
    for folder, block in ((tmp_path / "a", 40), (tmp_path / "b", 64)):
        folder.mkdir()
        write(folder / name, make_values(9), block)
    first, second = ({p.relative_to(f): p for p in f.rglob("*")} for f in (tmp_path / "a", tmp_path / "b"))
    assert first.keys() == second.keys()
    assert all(first[p].read_bytes() == second[p].read_bytes() for p in first if first[p].is_file())


@pytest.mark.parametrize("name", ["acts.h5", "acts.pt", "acts.parquet"])
def test_format_of_refuses_suffixes_of_other_kinds(name: str):
    with pytest.raises(InterpError, match=r"expected a name that ends in \.npz"):
        format_of(Path(name))


def test_format_of_keeps_other_dots_in_the_name(tmp_path: Path):
    write(tmp_path / "run.v1", make_values(2))
    assert (tmp_path / "run.v1" / "manifest.json").is_file()


def test_column_refuses_complex_numbers():
    with pytest.raises(InterpError, match="view_as_real"):
        Column("x:out", torch.complex64)


def test_format_names_a_file_of_another_writer(tmp_path: Path):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "empty").mkdir()
    for name in ("other.npz", "other.safetensors", "empty"):
        with pytest.raises(InterpError, match="expected a f"):
            format_of(tmp_path / name).open(tmp_path / name)


def test_column_has_a_file_name_of_its_own():
    names = ["a/b:out", "a%2Fb:out", "a%252Fb:out", "a%b:out"]
    found = {Column(name, torch.float32).file_name for name in names}
    assert len(found) == 4 and not any("/" in name for name in found)


@pytest.mark.parametrize("name", [*NAMES, "acts.npy"])
def test_format_puts_every_file_on_the_disk(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.readlink(f"/proc/self/fd/{file}")))
    write(tmp_path / name, make_values(9, (torch.float32,)[: name != "acts.npy"]))
    assert synced == {str(path) for path in tmp_path.rglob("*") if path.is_file()}


def test_as_bytes_leaves_the_storage_resizable():
    weights = torch.arange(4, dtype=torch.int16)
    data = as_bytes(weights)
    assert bytes(data) == b"\0\0\1\0\2\0\3\0"
    weights.untyped_storage().resize_(0)
    data = as_bytes(torch.full((3,), 7, dtype=torch.uint8))
    assert bytes(data) == b"\7\7\7"
    assert bytes(as_bytes(torch.arange(6, dtype=torch.uint8).view(2, 3).T)) == b"\0\3\1\4\2\5"
