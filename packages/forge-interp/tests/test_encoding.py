import numpy as np
import pytest
from forge_interp.analysis.probe import group_folds
from forge_interp.encoding_models.ceiling import repeat_ceiling, split_half_ceiling
from forge_interp.encoding_models.encode import _band_candidates, encode, encode_layers
from forge_interp.encoding_models.timing import fir_delays
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


def test_encoding_chooses_and_fits_without_the_held_out_run():
    x, y = make_layers()["layer.2"], make_recordings(make_layers()["layer.2"], targets=4).mean(0)
    options = {"alphas": (1.0, 1e3, 1e6), "delays": DELAYS, "num_band_samples": 4}
    bands = {"a": x[:, :5], "b": x[:, 5:]}
    found = encode(bands, y, RUNS, **options)
    for fold, (_, test) in enumerate(group_folds(RUNS, 5)):
        scaled = y.copy()
        scaled[test] = 1e3 * scaled[test] - 7
        again = encode(bands, scaled, RUNS, **options)
        np.testing.assert_allclose(again.r[fold], found.r[fold], rtol=1e-9)
        moved = {
            name: np.where(np.isin(np.arange(600), test)[:, None], 50 * b, b) for name, b in bands.items()
        }
        other = encode(moved, y, RUNS, **options)
        for result in (again, other):
            np.testing.assert_array_equal(result.alpha[fold], found.alpha[fold])
            np.testing.assert_array_equal(result.band_weights[fold], found.band_weights[fold])


def test_banded_encoding_equals_a_search_with_scikit_learn():
    linear = pytest.importorskip("sklearn.linear_model")
    random = np.random.default_rng(0)
    bands = {"a": random.normal(size=(80, 4)) * 3 + 1e6, "b": random.normal(size=(80, 6))}
    useful = np.stack([bands["a"][:, 0] - 1e6, bands["b"][:, 1], np.zeros(80)], axis=1)
    y, runs = useful + random.normal(size=(80, 3)), np.repeat([5, 3, 9, 1], 20)
    alphas = (0.1, 10.0, 1e3)
    found = encode(bands, y, runs, alphas=alphas, num_band_samples=6, delays=(0, 1), seed=3)
    candidates = _band_candidates(2, 6, 3)

    def weighted(parts: list[np.ndarray], weights: np.ndarray) -> np.ndarray:
        return np.concatenate([part * w**0.5 for part, w in zip(parts, weights, strict=True)], axis=1)

    for fold, (train, test) in enumerate(group_folds(runs, 4, seed=3)):
        parts = []
        for x in bands.values():
            z = (x - x[train].mean(0)) / x[train].std(0)
            before = np.where((np.r_[runs[0], runs[:-1]] == runs)[:, None], np.roll(z, 1, axis=0), 0)
            before[0] = 0
            parts.append(np.concatenate([z, before], axis=1))
        errors = np.zeros((len(candidates), 3, 3))
        for c, weights in enumerate(candidates):
            x = weighted(parts, weights)[train]
            for inner, held in group_folds(runs[train], 3):
                for a, alpha in enumerate(alphas):
                    fit = linear.Ridge(alpha=alpha, solver="svd").fit(x[inner], y[train][inner])
                    errors[c, a] += np.square(fit.predict(x[held]) - y[train][held]).sum(0)
        for target in range(3):
            c, a = np.unravel_index(errors[:, :, target].argmin(), errors.shape[:2])
            x = weighted(parts, candidates[c])
            fit = linear.Ridge(alpha=alphas[a], solver="svd").fit(x[train], y[train, target])
            guess, truth = fit.predict(x[test]), y[test, target]
            assert found.alpha[fold, target] == alphas[a]
            np.testing.assert_array_equal(found.band_weights[fold, target], candidates[c])
            assert found.r[fold, target] == pytest.approx(np.corrcoef(guess, truth)[0, 1], abs=1e-8)
            r2 = 1 - np.square(guess - truth).sum() / np.square(truth - truth.mean()).sum()
            assert found.r2[fold, target] == pytest.approx(r2, abs=1e-8)


def test_band_candidates_are_points_of_the_simplex_with_equal_weights_first():
    found = _band_candidates(3, 31, 0)
    assert found.shape == (32, 3)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-8)
    np.testing.assert_array_equal(found[0], 1 / 3)
    assert found.min() > 0
    sparse, even = found[1:16], found[16:]
    assert np.median(sparse.max(1)) > 0.9 > 0.75 > np.median(even.max(1))


def test_encoding_of_a_constant_recording_has_r_zero_and_no_r2():
    x, y = make_layers()["layer.0"], np.random.default_rng(0).normal(size=(600, 3))
    y[:, 1:] = 0.1, 1e6 + 0.1
    found = encode(x, y, RUNS, alphas=(1.0,))
    np.testing.assert_array_equal(found.r[:, 1:], 0)
    assert np.isnan(found.r2[:, 1:]).all() and np.isfinite(found.r2[:, 0]).all()


def test_encoding_takes_samples_without_an_order():
    x = make_layers()["layer.0"][:120]
    y = 3 * x[:, :2] + np.random.default_rng(0).normal(size=(120, 2))
    found = encode(x, y, range(120), num_folds=4, alphas=(1.0, 10.0))
    assert found.r.shape == (4, 2) and found.score.min() > 0.5
    np.testing.assert_allclose(found.score, found.r.mean(0))
    with pytest.raises(InterpError, match="tests 1 rows and trains on 119 of 120 runs"):
        encode(x, y, range(120))


def test_encoding_normalizes_the_mean_over_folds_by_the_ceiling():
    x, repeats = make_layers()["layer.1"], make_recordings(make_layers()["layer.1"], targets=6)
    repeats[:, :, 0] = np.random.default_rng(9).normal(size=repeats.shape[:2])
    ceiling = repeat_ceiling(repeats)
    found = encode(x, repeats.mean(0), RUNS, delays=DELAYS, ceiling=ceiling, min_ceiling=0.3)
    assert found.normalized is not None
    assert np.isnan(found.normalized[0])
    np.testing.assert_allclose(found.normalized[1:], found.r.mean(0)[1:] / ceiling.r[1:], rtol=1e-12)
    assert encode(x, repeats.mean(0), RUNS, alphas=(1.0,)).normalized is None


def test_encoding_refuses_folds_without_enough_runs_and_values_that_are_not_finite():
    x, y = make_layers()["layer.0"], np.random.default_rng(0).normal(size=(600, 4))
    with pytest.raises(InterpError, match="trains on 1 of 3 runs"):
        encode(x, y, np.repeat([0, 1, 2], 200), num_folds=2)
    bad = np.arange(600)[:, None] == 3
    with pytest.raises(InterpError, match="recordings holds 4 values"):
        encode(x, np.where(bad, np.nan, y), RUNS)
    with pytest.raises(InterpError, match="b holds 8 values"):
        encode({"a": x, "b": np.where(bad, np.inf, x)}, y, RUNS)
    with pytest.raises(InterpError, match="features is empty"):
        encode({}, y, RUNS)
    with pytest.raises(InterpError, match="one label per row"):
        encode(x, y, RUNS[:-1])
