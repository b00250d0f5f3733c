import numpy as np
import pytest
import torch
from forge_interp.analysis.probe import control_task, fit_logistic, group_folds, probe_layers, z_score
from forge_interp.errors import InterpError


def make_classes(num_classes: int, n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(n, 6))
    scores = x @ random.normal(size=(6, num_classes)) + random.gumbel(size=(n, num_classes))
    return x, scores.argmax(1)


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_logistic_equals_scikit_learn(num_classes, alpha):
    linear = pytest.importorskip("sklearn.linear_model")
    x, y = make_classes(num_classes)
    expected = linear.LogisticRegression(C=1 / alpha, tol=1e-10, max_iter=5000).fit(x, y)
    found = fit_logistic(x, y, alpha=alpha)
    np.testing.assert_allclose(found.weights.T, expected.coef_, atol=1e-5)
    np.testing.assert_array_equal(found.predict(x), expected.predict(x))


def test_logistic_multi_label_equals_one_binary_fit_per_label():
    x, y = make_classes(3)
    labels = np.stack([y == 0, y == 1], axis=1).astype(np.int64)
    found = fit_logistic(x, labels, alpha=2.0)
    for i in range(2):
        alone = fit_logistic(x, labels[:, i], alpha=2.0)
        torch.testing.assert_close(found.weights[:, i], alone.weights[:, 0], atol=1e-5, rtol=1e-4)
    assert found.predict(x).shape == (200, 2)


def test_logistic_keeps_string_labels():
    x, y = make_classes(3)
    names = np.array(["noun", "verb", "other"])
    np.testing.assert_array_equal(fit_logistic(x, names[y]).predict(x), names[fit_logistic(x, y).predict(x)])


def test_logistic_refuses_what_it_cannot_fit():
    x, y = make_classes(3)
    with pytest.raises(InterpError, match="at least two"):
        fit_logistic(x, np.zeros(200))
    with pytest.raises(InterpError, match="zeros and ones"):
        fit_logistic(x, np.stack([y, y], axis=1))
    with pytest.raises(InterpError, match="L-BFGS stopped"):
        fit_logistic(1e4 * x, y, alpha=1e-6, max_steps=2)


def test_group_folds_split_all_samples_and_no_group():
    groups = np.random.default_rng(0).integers(17, size=300)
    folds = group_folds(groups, 4)
    assert sorted(np.concatenate([test for _, test in folds]).tolist()) == list(range(300))
    for train, test in folds:
        assert not set(groups[train]) & set(groups[test])
        assert len(train) + len(test) == 300
        assert 60 <= len(test) <= 90
    with pytest.raises(InterpError, match="num_folds is 18 for 17 groups"):
        group_folds(groups, 18)


def test_control_task_is_a_function_of_the_type_with_the_real_distribution():
    random = np.random.default_rng(0)
    types, y = random.integers(2000, size=9000), (random.random(9000) < 0.2).astype(int)
    found = control_task(types, y)
    assert all(len(set(found[types == t])) == 1 for t in np.unique(types)[:50])
    assert found.mean() == pytest.approx(0.2, abs=0.04)
    assert np.mean(found == y) == pytest.approx(0.68, abs=0.04)


def test_z_score_uses_the_training_rows_and_zeroes_constant_columns():
    train, test = torch.randn(50, 3, dtype=torch.float64) * 4 + 2, torch.randn(5, 3, dtype=torch.float64)
    train[:, 1] = 7.0
    found, moved = z_score(train, test)
    torch.testing.assert_close(found[:, 0].std(correction=0), found.new_tensor(1.0))
    assert not found[:, 1].any() and not moved[:, 1].any()
    torch.testing.assert_close(moved[:, 0], (test[:, 0] - train[:, 0].mean()) / train[:, 0].std(correction=0))


def make_layers(n: int = 400) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """A property that "late" holds and "early" does not; 40 sentences; 200 token types."""
    random = np.random.default_rng(0)
    y, sentences, tokens = random.integers(2, size=n), np.arange(n) // 10, random.integers(200, size=n)
    early = random.normal(size=(n, 12))
    late = early.copy()
    late[:, 0] += 4 * y
    return {"early": early, "late": late}, y, sentences, tokens


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_probe_layers_finds_the_layer_that_knows(kind):
    layers, y, sentences, tokens = make_layers()
    found = probe_layers(layers, y, kind=kind, groups=sentences, types=tokens, alphas=(1.0, 100.0))
    chance, known = (0.0, 0.6) if kind == "ridge" else (0.5, 0.95)
    assert found.scores[0].mean() == pytest.approx(chance, abs=0.1)
    assert found.scores[1].mean() > known
    assert found.selectivity[1] > 0.4 > 0.1 > abs(found.selectivity[0])


def test_probe_layers_with_groups_scores_at_chance_what_only_leaks_between_neighbours():
    random = np.random.default_rng(0)
    sentences = np.arange(300) // 10
    y = random.normal(size=30)[sentences]
    layers = {"x": np.eye(30)[sentences] + 0.01 * random.normal(size=(300, 30))}
    leaking = probe_layers(layers, y, alphas=(0.01, 1.0))
    honest = probe_layers(layers, y, groups=sentences, alphas=(0.01, 1.0))
    assert leaking.scores.mean() > 0.9
    assert honest.scores.mean() < 0.1


def test_probe_layers_chooses_the_penalty_by_groups():
    # Chosen by single samples, the small penalty wins and new sentences come out far worse than the mean.
    random = np.random.default_rng(0)
    sentences = np.arange(300) // 10
    layers = {"x": random.normal(size=(30, 20))[sentences] + 0.01 * random.normal(size=(300, 20))}
    y = random.normal(size=30)[sentences]
    found = probe_layers(layers, y, groups=sentences, alphas=(0.01, 1e5))
    fixed = probe_layers(layers, y, groups=sentences, alphas=(0.01,))
    assert fixed.scores.mean() < -1
    assert found.scores.mean() > -0.5


def test_probe_layers_equals_scikit_learn_cross_validation():
    linear = pytest.importorskip("sklearn.linear_model")
    layers, y, _, _ = make_layers(120)
    found = probe_layers(layers, y, alphas=(5.0,), num_folds=3)
    for i, x in enumerate(layers.values()):
        for fold, (train, test) in enumerate(group_folds(np.arange(120), 3)):
            scaled = (x - x[train].mean(0)) / x[train].std(0)
            expected = linear.Ridge(alpha=5.0).fit(scaled[train], y[train]).score(scaled[test], y[test])
            assert found.scores[i, fold] == pytest.approx(expected, abs=1e-8)


def test_probe_layers_refuses_bad_requests():
    layers, y, _, _ = make_layers()
    with pytest.raises(InterpError, match="kind is 'svm'"):
        probe_layers(layers, y, kind="svm")
    with pytest.raises(InterpError, match="early has 400 rows"):
        probe_layers(layers, y[:-1])
    with pytest.raises(InterpError, match="no control task"):
        _ = probe_layers(layers, y, alphas=(1.0,)).selectivity
