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
    for constant in (0.1, 1e6 + 0.1, 0.0, 7.0):
        train[:, 1] = constant * (1 + 1e-15 * train[:, 0])
        found, moved = z_score(train, test)
        assert not found[:, 1].any() and not moved[:, 1].any()
    torch.testing.assert_close(found[:, 0].std(correction=0), found.new_tensor(1.0))
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
    found = probe_layers(layers, y, kind="ridge", alphas=(5.0,), num_folds=3)
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


@pytest.mark.parametrize("num_classes", [2, 4])
def test_logistic_equals_scikit_learn_newton_to_1e_6(num_classes):
    linear = pytest.importorskip("sklearn.linear_model")
    x, y = make_classes(num_classes)
    for alpha in (0.1, 1.0, 10.0):
        model = linear.LogisticRegression(C=1 / alpha, solver="newton-cg", tol=1e-12, max_iter=5000)
        expected, found = model.fit(x, y), fit_logistic(x, y, alpha=alpha)
        np.testing.assert_allclose(found.weights.T, expected.coef_, atol=1e-6)
        np.testing.assert_allclose(found.logits(x), model.decision_function(x).reshape(200, -1), atol=2e-6)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_logistic_does_not_change_with_a_large_mean(num_classes):
    x, y = make_classes(num_classes)
    found, moved = fit_logistic(x, y), fit_logistic(x + 1e5, y)
    torch.testing.assert_close(moved.weights, found.weights, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(moved.predict(x + 1e5), found.predict(x))
    torch.testing.assert_close(moved.logits(x + 1e5), found.logits(x), atol=1e-4, rtol=0)


def test_logistic_takes_tensors_of_any_dtype():
    x, y = make_classes(2)
    found = fit_logistic(torch.as_tensor(x), torch.as_tensor(y).bfloat16())
    torch.testing.assert_close(found.weights, fit_logistic(x, y).weights)
    assert found.classes is not None and found.classes.tolist() == [0, 1]


def test_logistic_refuses_values_that_are_not_finite():
    x, y = make_classes(2)
    bad = np.arange(200) == 7
    with pytest.raises(InterpError, match="y holds 1 values"):
        fit_logistic(x, np.where(bad, np.nan, y))
    with pytest.raises(InterpError, match="x holds 6 values"):
        fit_logistic(np.where(bad[:, None], np.inf, x), y)
    with pytest.raises(InterpError, match="rows are"):
        fit_logistic(x, y[:-1])


def test_group_folds_balance_sizes_with_one_giant_group_and_repeat_with_their_seed():
    groups = np.r_[np.zeros(50, int), np.arange(1, 101)]
    folds = group_folds(groups, 3, seed=4)
    assert sorted(len(test) for _, test in folds) == [50, 50, 50]
    again, other = group_folds(groups, 3, seed=4), group_folds(groups, 3, seed=5)
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(folds, again, strict=True))
    assert not all(np.array_equal(a[1], b[1]) for a, b in zip(folds, other, strict=True))
    with pytest.raises(InterpError, match="num_folds is 1 for"):
        group_folds(groups, 1)


def test_control_task_keeps_the_shape_and_refuses_other_samples():
    types, y = np.arange(30) % 7, np.random.default_rng(0).normal(size=(30, 2))
    found = control_task(types, y, seed=1)
    assert found.shape == y.shape
    assert all(row.tolist() in y.tolist() for row in found)
    assert not np.array_equal(found, control_task(types, y, seed=2))
    with pytest.raises(InterpError, match="types has 29 entries"):
        control_task(types[:-1], y)


def test_selectivity_is_low_for_a_layer_that_only_knows_the_type_and_high_for_one_that_knows_the_property():
    # One-hot token types let a probe learn any function of the type: real task and control alike.
    random = np.random.default_rng(0)
    types = random.integers(20, size=800)
    y = random.integers(2, size=20)[types]
    layers = {"types": np.eye(20)[types] + 0.1 * random.normal(size=(800, 20)), "property": None}
    layers["property"] = random.normal(size=(800, 5))
    layers["property"][:, 0] += 4 * y
    found = probe_layers(layers, y, kind="logistic", types=types, alphas=(1.0,))
    assert found.scores.min() > 0.95
    assert found.control is not None and found.control[0].mean() > 0.95
    assert abs(found.selectivity[0]) < 0.03 < 0.3 < found.selectivity[1]


@pytest.mark.parametrize("grouped", [False, True])
def test_probe_layers_equals_a_nested_search_with_scikit_learn(grouped):
    linear = pytest.importorskip("sklearn.linear_model")
    layers, _, sentences, _ = make_layers(60)
    random, alphas = np.random.default_rng(1), [0.1, 30.0, 1e4]
    y = np.stack([layers["late"][:, 1] + random.normal(size=60), random.normal(size=60)], axis=1)
    found = probe_layers(layers, y, groups=sentences if grouped else None, alphas=alphas, num_folds=3, seed=2)
    for i, x in enumerate(layers.values()):
        for fold, (train, test) in enumerate(group_folds(sentences if grouped else np.arange(60), 3, seed=2)):
            z = (x - x[train].mean(0)) / x[train].std(0)
            inner = (
                group_folds(sentences[train], 3)
                if grouped
                else group_folds(np.arange(len(train)), len(train))
            )
            errors = np.zeros((3, 2))
            for fit_on, held in inner:
                for a, alpha in enumerate(alphas):
                    fit = linear.Ridge(alpha=alpha).fit(z[train][fit_on], y[train][fit_on])
                    errors[a] += np.square(fit.predict(z[train][held]) - y[train][held]).sum(0)
            best = linear.Ridge(alpha=np.array(alphas)[errors.argmin(0)]).fit(z[train], y[train])
            assert found.scores[i, fold] == pytest.approx(best.score(z[test], y[test]), abs=1e-8)


def test_logistic_probe_chooses_its_penalty_without_the_test_fold():
    layers, y, sentences, _ = make_layers(150)
    options = {"kind": "logistic", "groups": sentences, "alphas": (0.1, 100.0), "num_folds": 2}
    found = probe_layers(layers, y, **options)
    for fold, (_, test) in enumerate(group_folds(sentences, 2)):
        flipped = y.copy()
        flipped[test] = 1 - flipped[test]
        again = probe_layers(layers, flipped, **options)
        np.testing.assert_allclose(again.scores[:, fold], 1 - found.scores[:, fold], atol=1e-12)


def test_ridge_probe_refuses_a_target_without_variance_in_a_fold_and_nan():
    layers = {"x": np.random.default_rng(0).normal(size=(60, 4))}
    y = np.random.default_rng(1).normal(size=(60, 2))
    y[:, 1] = 0.1
    with pytest.raises(InterpError, match=r"targets \[1\] never vary in a held-out fold of 12 samples"):
        probe_layers(layers, y)
    with pytest.raises(InterpError, match="y holds 1 values"):
        probe_layers(layers, np.where(np.arange(60) == 3, np.nan, np.arange(60)))
    with pytest.raises(InterpError, match="x holds 3 values"):
        probe_layers({"x": np.where(np.arange(240).reshape(60, 4) < 3, np.nan, layers["x"])}, y[:, 0])
    with pytest.raises(InterpError, match=r"groups has shape \(30,\); expected \(60,\)"):
        probe_layers(layers, y[:, 0], groups=np.arange(30) // 3)


@pytest.mark.parametrize("kind", ["int", "bool", "str", "torch"])
def test_probe_of_labels_is_a_classifier_unless_told_otherwise(kind):
    """Three classes far apart, numbered so that no line goes through them in order."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=120)
    x = np.eye(3)[labels] * 9 + random.normal(size=(120, 3))
    y = {
        "int": lambda: np.array([5, 900, 7])[labels],
        "bool": lambda: labels == 1,
        "str": lambda: np.array(["cat", "dog", "cow"])[labels],
        "torch": lambda: torch.as_tensor(labels),
    }[kind]()
    found = probe_layers({"x": x}, y, alphas=(1.0,))
    assert found.unit == "accuracy" and found.scores.mean() == 1.0
    assert kind == "str" or probe_layers({"x": x}, y, kind="ridge", alphas=(1.0,)).unit == "R2"
    assert probe_layers({"x": x}, x[:, 0], alphas=(1.0,)).unit == "R2"
