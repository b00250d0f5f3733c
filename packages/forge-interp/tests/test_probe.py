import sys

import numpy as np
import pytest
import torch
from forge_interp.analysis.probe import control_task, group_folds, probe_layers
from forge_interp.errors import InterpError

linear = pytest.importorskip("sklearn.linear_model")


def test_group_folds_split_all_samples_and_no_group():
    groups = np.random.default_rng(0).integers(17, size=300)
    folds = group_folds(groups, 4)
    assert sorted(np.concatenate([test for _, test in folds]).tolist()) == list(range(300))
    for train, test in folds:
        assert not set(groups[train]) & set(groups[test])
        assert len(train) + len(test) == 300
        assert 60 <= len(test) <= 90
    with pytest.raises(ValueError, match="n_splits=18 greater than the number of groups: 17"):
        group_folds(groups, 18)


def test_group_folds_balance_sizes_with_one_giant_group_and_repeat_with_their_seed():
    groups = np.r_[np.zeros(50, int), np.arange(1, 101)]
    folds = group_folds(groups, 3, seed=4)
    assert sorted(len(test) for _, test in folds) == [50, 50, 50]
    again, other = group_folds(groups, 3, seed=4), group_folds(groups, 3, seed=5)
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(folds, again, strict=True))
    assert not all(np.array_equal(a[1], b[1]) for a, b in zip(folds, other, strict=True))
    with pytest.raises(ValueError, match="n_splits=1"):
        group_folds(groups, 1)


def test_control_task_is_a_function_of_the_type_with_the_real_distribution():
    random = np.random.default_rng(0)
    types, y = random.integers(2000, size=9000), (random.random(9000) < 0.2).astype(int)
    found = control_task(types, y)
    assert all(len(set(found[types == t])) == 1 for t in np.unique(types)[:50])
    assert found.mean() == pytest.approx(0.2, abs=0.04)
    assert np.mean(found == y) == pytest.approx(0.68, abs=0.04)


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
    with pytest.raises(InterpError, match=r"alphas are \[1.0, 0.0\]; expected at least one, all positive"):
        probe_layers(layers, y, alphas=(1.0, 0.0))
    with pytest.raises(InterpError, match="early has 400 rows"):
        probe_layers(layers, y[:-1])
    with pytest.raises(InterpError, match="no control task"):
        _ = probe_layers(layers, y, alphas=(1.0,)).selectivity


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
    with pytest.raises(InterpError, match="y holds values that are NaN"):
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


def test_probe_of_zeros_and_ones_in_columns_equals_one_probe_for_each_label():
    layers, y, sentences, _ = make_layers(200)
    labels = np.stack([y, np.roll(y, 1)], axis=1)
    options = {"groups": sentences, "alphas": (10.0,)}
    both = probe_layers(layers, labels, **options)
    alone = [probe_layers(layers, column, **options).scores for column in labels.T]
    np.testing.assert_allclose(both.scores, np.mean(alone, axis=0), rtol=1e-12)
    assert both.unit == "accuracy" and both.scores[1].mean() > 0.7


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_probe_scores_do_not_change_with_units_means_and_constant_features(kind):
    layers, y, _, _ = make_layers(200)
    moved = {}
    for name, x in layers.items():
        constants = np.tile([0.1, 1e6 + 0.1, 0.0], (200, 1))
        moved[name] = np.concatenate([1e5 + 1e-3 * x, constants * (1 + 1e-15 * x[:, :1])], axis=1)
    options = {"kind": kind, "alphas": (0.01, 1.0)}
    found, expected = (probe_layers(each, y, **options).scores for each in (moved, layers))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_probe_takes_tensors_of_any_dtype():
    layers, y, _, _ = make_layers(100)
    expected = probe_layers({name: x.astype(np.float32) for name, x in layers.items()}, y)
    tensors = {name: torch.as_tensor(x).float().requires_grad_() for name, x in layers.items()}
    np.testing.assert_array_equal(probe_layers(tensors, torch.as_tensor(y)).scores, expected.scores)
    as_numbers = probe_layers(tensors, torch.as_tensor(y).bfloat16())
    np.testing.assert_array_equal(as_numbers.scores, probe_layers(tensors, y, kind="ridge").scores)


def test_probe_that_does_not_converge_is_an_error():
    random = np.random.default_rng(0)
    x = random.normal(size=(1000, 1)) + 1e-4 * random.normal(size=(1000, 60))  # features that are nearly one
    with pytest.raises(InterpError, match=r"failed to converge(?s:.*)raise alphas"):
        probe_layers({"x": x}, random.integers(8, size=1000), alphas=(1e-12,), num_folds=2)


def test_probe_without_scikit_learn_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InterpError, match=r"probe_layers needs sklearn; .*'forge-interp\[probes\]'"):
        probe_layers({"x": np.zeros((9, 2))}, np.zeros(9))
