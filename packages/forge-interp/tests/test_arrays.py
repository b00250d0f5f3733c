import numpy as np
import pytest
import torch
from forge_interp.analysis.arrays import as_labels, as_matrix
from forge_interp.analysis.probe import probe_layers
from forge_interp.analysis.similarity import compare_layers
from forge_interp.errors import InterpError


def test_as_matrix_shares_a_read_only_memory_map(tmp_path):
    values = np.random.default_rng(0).normal(size=(50, 4))
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = as_matrix(mapped, "x")
    assert found.data_ptr() == mapped.ctypes.data
    np.testing.assert_array_equal(found, values)


def test_analyses_take_a_read_only_memory_map_and_leave_it_as_it_is(tmp_path):
    values = np.random.default_rng(0).normal(size=(50, 4))
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(compare_layers({"a": mapped}).values, compare_layers({"a": values}).values)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), values)
    pytest.importorskip("sklearn")
    found, expected = (probe_layers({"a": x}, values[:, 0] ** 2, alphas=(1.0,)) for x in (mapped, values))
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), values)


@pytest.mark.parametrize("kind", [">f8", ">f4", "<f2", "i2", "u1", "bool"])
def test_as_matrix_takes_every_real_dtype_and_byte_order(kind):
    values = (np.arange(12).reshape(6, 2) % 5).astype(kind)
    found = as_matrix(values, "x")
    assert found.dtype == torch.float64
    np.testing.assert_array_equal(found, values.astype(np.float64))


def test_as_matrix_makes_a_column_of_a_vector_and_drops_the_graph():
    vector = torch.arange(3.0, requires_grad=True)
    found = as_matrix(vector, "x", dtype=None)
    assert (found.shape, found.dtype, found.requires_grad) == ((3, 1), torch.float32, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones((2, 2)) * 1j, "x is complex128; expected real"),
        (torch.ones(2, 2, dtype=torch.complex64), "x is torch.complex64; expected real"),
        (np.array([["a"]]), "x is <U1; expected real"),
        (np.array([[None]]), "x is object; expected real"),
        (np.ones((2, 2, 2)), r"x has shape \(2, 2, 2\); expected \[samples, features\]"),
    ],
)
def test_as_matrix_refuses_what_is_no_matrix_of_numbers(values, message):
    with pytest.raises(InterpError, match=message):
        as_matrix(values, "x")


def test_as_labels_takes_any_tensor():
    assert as_labels(torch.tensor([1.5, 2.0], dtype=torch.bfloat16)).tolist() == [1.5, 2.0]
    assert as_labels(torch.tensor([3, 4])).dtype == np.int64
    assert as_labels(["a", "b"]).tolist() == ["a", "b"]
