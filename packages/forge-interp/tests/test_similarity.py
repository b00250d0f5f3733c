import subprocess
import sys

import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.similarity import MEASURES, compare_layers, linear_cka
from forge_interp.errors import InterpError


def layers(prefix: str, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"{prefix}{i}": torch.randn(50, 4 + i, generator=random) for i in range(3)}


@pytest.mark.parametrize("measure", list(MEASURES))
def test_compare_layers_gives_every_pair_of_two_models_for_every_measure(measure):
    first, second = layers("a", 0), {**layers("a", 1), "b": torch.randn(50, 9)}
    found = compare_layers(first, second, measure=measure)
    both = Moments.of({"x": first["a1"], "y": second["a2"]}, between=(["x"], ["y"]))
    assert (found.rows, found.columns) == (("a0", "a1", "a2"), ("a0", "a1", "a2", "b"))
    assert found.values[1, 2] == pytest.approx(MEASURES[measure](both).values.item(), abs=1e-12)


def test_compare_layers_of_one_model_is_its_own_cka():
    first = layers("a", 0)
    np.testing.assert_array_equal(compare_layers(first).values, linear_cka(Moments.of(first)).values)
    with pytest.raises(InterpError, match="measure is 'cosine'"):
        compare_layers(first, measure="cosine")


def gram_cka(x, y):
    """Debiased CKA by the unbiased estimator of HSIC on whole Gram matrices."""

    def hsic(k, m):
        n, one = len(k), torch.ones(len(k), dtype=k.dtype)
        k, m = k - k.diag().diag(), m - m.diag().diag()
        cross = one @ k @ m @ one
        return (k @ m).trace() + k.sum() * m.sum() / (n - 1) / (n - 2) - 2 * cross / (n - 2)

    k, m = x @ x.T, y @ y.T
    return float(hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt())


def test_compare_layers_takes_the_smaller_of_samples_and_features(monkeypatch):
    """No sum of products is wider than there are samples, and every measure is what it was."""
    random = torch.Generator().manual_seed(0)
    wide = {f"{i}": torch.randn(20, 300 + i, generator=random, dtype=torch.float64) for i in range(3)}
    expected = {measure: MEASURES[measure](Moments.of(wide)).values for measure in MEASURES}
    widths = []
    of = Moments.of.__func__
    monkeypatch.setattr(
        Moments, "of", classmethod(lambda cls, blocks, **o: widths.append(blocks) or of(cls, blocks, **o))
    )
    for measure in MEASURES:
        found = compare_layers(wide, measure=measure)
        np.testing.assert_allclose(found.values, expected[measure], rtol=1e-7, atol=1e-9)
    assert all(x.shape == (20, 20) for blocks in widths for x in blocks.values())
    x, y = wide["0"], wide["1"]
    assert compare_layers({"x": x}, {"y": y}).values.item() == pytest.approx(gram_cka(x, y), abs=1e-10)


@pytest.mark.slow
def test_compare_layers_of_very_wide_layers_in_little_memory():
    """Two layers [200, 50000] in under 2 GB: their products would take 60 GB."""
    code = (
        "import resource, torch; from forge_interp import compare_layers;"
        "wide = {n: torch.randn(200, 50_000) for n in 'ab'};"
        "print(compare_layers(wide).values.shape, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(out.split()[-1]) < 2


def brute_knn(x: np.ndarray, k: int, metric: str) -> list[set[int]]:
    if metric == "cosine":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    found = []
    for i, row in enumerate(x):
        distances = np.linalg.norm(x - row, axis=1)
        distances[i] = np.inf
        found.append(set(np.argsort(distances)[:k].tolist()))
    return found


def test_compare_layers_refuses_other_samples_and_no_layers():
    first = layers("a", 0)
    with pytest.raises(InterpError, match="rows are"):
        compare_layers(first, {"b": torch.randn(49, 3)})
    with pytest.raises(InterpError, match="widths are"):
        compare_layers({})
