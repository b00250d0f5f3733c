import sys

import numpy as np
import pytest
from forge_interp.analysis.cka import LayerSimilarity
from forge_interp.analysis.encoding import EncodingResult
from forge_interp.analysis.probe import ProbeCurve
from forge_interp.errors import InterpError
from forge_interp.plot import plot_attention, plot_encoding, plot_probe, plot_similarity

LAYERS = ("layers.0", "layers.1", "layers.2")
SIMILARITY = LayerSimilarity(np.array([[1.0, 0.4, -0.1], [0.4, 1.0, 0.7]]), LAYERS[:2], LAYERS, "CKA")


def labels(ticks) -> list[str]:
    return [tick.get_text() for tick in ticks]


def encoding(score: float, normalized: bool) -> EncodingResult:
    r = np.full((2, 3), score)
    return EncodingResult(
        r, r, r, r[..., None], ("features",), np.array([1.0, 0.8, np.nan]) if normalized else None
    )


def test_plot_similarity_draws_the_values_with_their_layers():
    pytest.importorskip("matplotlib")
    axes = plot_similarity(SIMILARITY).axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), SIMILARITY.values)
    assert axes.images[0].get_clim() == (-0.1, 1.0)
    assert (labels(axes.get_yticklabels()), labels(axes.get_xticklabels())) == (
        list(LAYERS[:2]),
        list(LAYERS),
    )


def test_plot_attention_draws_one_row_per_query():
    pytest.importorskip("matplotlib")
    pattern = np.tril(np.ones((3, 3))) / np.arange(1, 4)[:, None]
    axes = plot_attention(pattern, tokens=["a", "b", "c"], title="head 0").axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), pattern)
    assert labels(axes.get_yticklabels()) == ["a", "b", "c"]
    with pytest.raises(InterpError, match="2 tokens for 3 keys"):
        plot_attention(pattern, tokens=["a", "b"])


def test_plot_probe_draws_scores_and_controls():
    pytest.importorskip("matplotlib")
    scores = np.arange(6.0).reshape(3, 2)
    axes = plot_probe(ProbeCurve(LAYERS, scores, scores / 2, "accuracy")).axes[0]
    lines = [np.asarray(line.get_ydata()) for line in axes.lines]
    np.testing.assert_allclose(lines, [scores.mean(1), scores.mean(1) / 2])
    assert axes.get_ylabel() == "held-out accuracy"
    with pytest.raises(InterpError, match="2 kinds"):
        plot_probe({unit: ProbeCurve(LAYERS, scores, None, unit) for unit in ("R2", "accuracy")})


def test_plot_encoding_uses_normalized_scores_only_when_all_have_them():
    pytest.importorskip("matplotlib")
    axes = plot_encoding({"a": encoding(0.2, True), "b": encoding(0.4, True)}).axes[0]
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata()), [0.9, 0.9])
    axes = plot_encoding({"a": encoding(0.2, True), "b": encoding(0.4, False)}).axes[0]
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata()), [0.2, 0.4])
    assert axes.get_ylabel().startswith("held-out r (")


def test_figures_can_be_saved(tmp_path):
    pytest.importorskip("matplotlib")
    plot_similarity(SIMILARITY).savefig(tmp_path / "similarity.png")
    assert (tmp_path / "similarity.png").read_bytes().startswith(b"\x89PNG")


def test_plot_names_the_extra_when_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install 'forge-interp\\[plot\\]'"):
        plot_similarity(SIMILARITY)
