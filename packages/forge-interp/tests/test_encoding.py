import numpy as np
import pytest
from forge_interp.analysis.ceiling import repeat_ceiling, split_half_ceiling
from forge_interp.analysis.encoding import encode, encode_layers
from forge_interp.analysis.probe import group_folds
from forge_interp.analysis.timing import fir_delays
from forge_interp.errors import InterpError

RUNS = np.repeat(np.arange(5), 120)
DELAYS = (1, 2, 3)


def make_layers(num_layers: int = 5, width: int = 8) -> dict[str, np.ndarray]:
    """Layers of a residual stream: each adds something new to the one before."""
    random = np.random.default_rng(0)
    x, layers = np.zeros((600, width)), {}
    for i in range(num_layers):
        x = 0.6 * x + random.normal(size=(600, width))
        layers[f"layer.{i}"] = np.tanh(x)
    return layers


def make_recordings(layer: np.ndarray, targets: int = 20, repeats: int = 4, noise: float = 1.5) -> np.ndarray:
    """[repeats, n, targets]: a delayed response to `layer`, and noise that differs between repeats."""
    random = np.random.default_rng(1)
    delayed = fir_delays(layer, DELAYS, RUNS).numpy()
    signal = delayed @ random.normal(size=(delayed.shape[1], targets))
    signal /= signal.std(0)
    return signal + noise * random.normal(size=(repeats, *signal.shape))


@pytest.mark.parametrize("planted", [1, 3])
@pytest.mark.parametrize("ceiling", [split_half_ceiling, repeat_ceiling])
def test_encoding_finds_the_planted_layer_with_a_normalized_score_of_one(planted, ceiling):
    layers = make_layers()
    repeats = make_recordings(layers[f"layer.{planted}"])
    found = encode_layers(layers, repeats.mean(0), RUNS, delays=DELAYS, ceiling=ceiling(repeats))
    scores = {name: np.nanmean(np.asarray(result.normalized)) for name, result in found.items()}
    assert max(scores, key=scores.__getitem__) == f"layer.{planted}"
    assert scores[f"layer.{planted}"] == pytest.approx(1, abs=0.05)
    others = [score for name, score in scores.items() if name != f"layer.{planted}"]
    assert max(others) < 0.85


def test_encoding_equals_scikit_learn_fold_by_fold():
    linear = pytest.importorskip("sklearn.linear_model")
    x, y = make_layers()["layer.2"], make_recordings(make_layers()["layer.2"]).mean(0)
    alphas = (0.1, 10.0, 1000.0, 1e5)
    found = encode(x, y, RUNS, alphas=alphas, inner_folds=4)
    for fold, (train, test) in enumerate(group_folds(RUNS, 5)):
        scaled = (x - x[train].mean(0)) / x[train].std(0)
        errors = np.zeros((4, y.shape[1]))
        for a, alpha in enumerate(alphas):
            for inner, held in group_folds(RUNS[train], 4):
                fit = linear.Ridge(alpha=alpha).fit(scaled[train][inner], y[train][inner])
                errors[a] += np.square(fit.predict(scaled[train][held]) - y[train][held]).sum(0)
        chosen = np.array(alphas)[errors.argmin(0)]
        np.testing.assert_array_equal(found.alpha[fold], chosen)
        guess = linear.Ridge(alpha=chosen).fit(scaled[train], y[train]).predict(scaled[test])
        expected = [np.corrcoef(guess[:, t], y[test][:, t])[0, 1] for t in range(y.shape[1])]
        np.testing.assert_allclose(found.r[fold], expected, atol=1e-6)


def test_encoding_of_noise_scores_zero():
    noise = np.random.default_rng(5).normal(size=(600, 50))
    found = encode(make_layers()["layer.0"], noise, RUNS)
    assert abs(found.score.mean()) < 0.03
    assert found.r2.mean() < 0.01


def test_encoding_with_three_runs_differs_between_targets_in_alpha():
    runs = np.repeat(np.arange(3), 200)
    x = make_layers()["layer.0"]
    strong, noise = x[:, :1] * 5, np.random.default_rng(0).normal(size=(600, 1))
    found = encode(x, np.concatenate([strong, noise], axis=1), runs)
    assert found.r.shape == (3, 2)
    assert (found.alpha[:, 0] < found.alpha[:, 1]).all()


def test_banded_ridge_weighs_the_band_that_matters_and_beats_plain_ridge():
    random = np.random.default_rng(0)
    useful, useless = random.normal(size=(250, 10)), random.normal(size=(250, 200))
    runs = np.repeat(np.arange(5), 50)
    y = useful @ random.normal(size=(10, 8)) + 2 * random.normal(size=(250, 8))
    banded = encode({"useful": useful, "useless": useless}, y, runs, num_band_samples=12)
    plain = encode(np.concatenate([useful, useless], axis=1), y, runs)
    assert banded.bands == ("useful", "useless")
    np.testing.assert_allclose(banded.band_weights.sum(2), 1, atol=1e-6)
    assert banded.band_weights[..., 0].mean() > 0.8
    assert banded.score.mean() > plain.score.mean() + 0.05


def test_encoding_refuses_bad_requests():
    x, y = make_layers()["layer.0"], np.random.default_rng(0).normal(size=(600, 4))
    with pytest.raises(InterpError, match="2 runs"):
        encode(x, y, np.repeat([0, 1], 300))
    with pytest.raises(InterpError, match="not contiguous"):
        encode(x, y, np.tile(np.arange(5), 120))
    with pytest.raises(InterpError, match="ceiling of 3 targets"):
        encode(x, y, RUNS, ceiling=repeat_ceiling(np.random.default_rng(0).normal(size=(2, 9, 3))))
    with pytest.raises(InterpError, match="rows are"):
        encode(x[:-1], y, RUNS)
