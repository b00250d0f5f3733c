from pathlib import Path

import numpy as np
import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.run import parts
from forge_interp.extraction.store import ActivationStore
from torch import Tensor


def make(rows: int, one: bool = False) -> ActivationStore:
    generator = torch.Generator().manual_seed(0)
    values = {"a/b%:out": torch.randn(rows, 3, 2, generator=generator)}
    values |= {} if one else {"h.1:out#1": torch.randn(rows, 5, generator=generator).bfloat16()}
    ids = {name: torch.arange(rows) * 7 - 1 for name in parts.ROW_COLUMNS}
    return ActivationStore.of(values | ids)


def bits(values: Tensor) -> np.ndarray:
    return values.view(torch.uint16).numpy()


@pytest.mark.parametrize("rows", [0, 1, 50])
@pytest.mark.parametrize("block_bytes", [40, 1 << 22])
def test_export_opens_with_other_tools(
    tmp_path: Path, rows: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts, "BLOCK_BYTES", block_bytes)
    store = make(rows)
    store.export(str(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as arrays:
        assert sorted(arrays) == sorted(["a%2Fb%25:out", "h.1:out#1", *parts.ROW_COLUMNS])
        np.testing.assert_array_equal(arrays["a%2Fb%25:out"], store["a/b%"].numpy())
        np.testing.assert_array_equal(arrays["h.1:out#1"], bits(store["h.1#1"]))
        np.testing.assert_array_equal(arrays["sample_id"], store.sample_id.numpy())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz"]


def test_export_writes_one_site_as_npy(tmp_path: Path):
    store = make(6, one=True)
    store.export(tmp_path / "a.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy", mmap_mode="r"), store["a/b%"].numpy())
    with pytest.raises(InterpError, match=r"single .npy file for 2 sites.*take .npz"):
        make(6).export(tmp_path / "b.npy")


def test_export_writes_equal_bytes_for_equal_rows(tmp_path: Path):
    for name in ("a", "b"):
        make(9).export(tmp_path / f"{name}.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize("name", ["acts.h5", "acts.zarr", "acts"])
def test_export_refuses_other_endings(tmp_path: Path, name: str):
    with pytest.raises(InterpError, match=r"expected a name that ends in \.npz, \.npy"):
        make(3).export(tmp_path / name)
