import sys

import numpy as np
import pytest
import torch
from forge_interp.analysis.cka import LayerSimilarity
from forge_interp.analysis.probe import ProbeCurve
from forge_interp.encoding_models.encode import EncodingResult
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


def test_plot_similarity_takes_limits_and_refuses_values_that_are_all_nan():
    pytest.importorskip("matplotlib")
    assert plot_similarity(SIMILARITY, limits=(-1, 1)).axes[0].images[0].get_clim() == (-1, 1)
    some = LayerSimilarity(np.array([[np.nan, 2.0]]), LAYERS[:1], LAYERS[:2], "CKA")
    figure = plot_similarity(some)
    assert figure.axes[0].images[0].get_clim() == (0, 2)
    assert figure.axes[1].get_ylabel() == "CKA"
    with pytest.raises(InterpError, match="every CKA is NaN"):
        plot_similarity(LayerSimilarity(np.full((1, 1), np.nan), LAYERS[:1], LAYERS[:1], "CKA"))


def test_plot_attention_of_a_tensor_with_more_keys_than_queries_labels_the_keys_only():
    pytest.importorskip("matplotlib")
    axes = plot_attention(torch.full((2, 3), 1 / 3, requires_grad=True), tokens=["a", "b", "c"]).axes[0]
    assert labels(axes.get_xticklabels()) == ["a", "b", "c"]
    assert labels(axes.get_yticklabels()) != ["a", "b", "c"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.images[0].get_clim()) == ("key", "query", (0, 1))


def test_plot_probe_labels_curves_and_dashes_control_tasks():
    pytest.importorskip("matplotlib")
    scores = np.arange(6.0).reshape(3, 2)
    axes = plot_probe({"a": ProbeCurve(LAYERS, scores, scores / 2, "R2")}).axes[0]
    assert [line.get_label() for line in axes.lines] == ["a", "a, control task"]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--"]
    assert labels(axes.get_xticklabels()) == list(LAYERS)
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == scores[0].mean() - 0.5 and band[:, 1].max() == scores[2].mean() + 0.5


def test_plot_encoding_refuses_what_has_no_score():
    with pytest.raises(InterpError, match="results is empty"):
        plot_encoding({})
    r = np.full((2, 3), 0.5)
    nothing = EncodingResult(r, r, r, r[..., None], ("features",), np.full(3, np.nan))
    with pytest.raises(InterpError, match=r"\['b'\] have no target with a score"):
        plot_encoding({"a": encoding(0.2, True), "b": nothing})
