import itertools

import numpy as np
import pytest
import torch
from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.cka import linear_cka
from forge_interp.analysis.rdm import compute_rdm
from forge_interp.analysis.rsa import bootstrap_rsa, compare_rdms, evaluate_models, noise_ceiling
from forge_interp.errors import InterpError

RANDOM = np.random.default_rng(0)
MODELS = RANDOM.normal(size=(3, 36)) ** 2
SUBJECTS = np.round(RANDOM.normal(size=(4, 36)) ** 2, 1) + MODELS[0]
TIED = np.round(SUBJECTS)
TOOLBOX_NAMES = {
    "pearson": "corr",
    "spearman": "spearman",
    "kendall": "tau-a",
    "cosine": "cosine",
    "whitened_cosine": "cosine_cov",
    "whitened_pearson": "corr_cov",
}


@pytest.mark.parametrize("method", list(TOOLBOX_NAMES))
def test_compare_rdms_equals_rsatoolbox(method):
    toolbox = pytest.importorskip("rsatoolbox", exc_type=ImportError)
    for data in (SUBJECTS, TIED):
        expected = toolbox.rdm.compare(
            toolbox.rdm.RDMs(MODELS), toolbox.rdm.RDMs(data), method=TOOLBOX_NAMES[method]
        )
        np.testing.assert_allclose(compare_rdms(MODELS, data, method=method), expected, atol=1e-8)


@pytest.mark.filterwarnings("ignore:Noise ceiling for tau")
@pytest.mark.parametrize("method", ["pearson", "spearman", "kendall", "cosine"])
def test_noise_ceiling_equals_rsatoolbox(method):
    toolbox = pytest.importorskip("rsatoolbox", exc_type=ImportError)
    expected = toolbox.inference.boot_noise_ceiling(toolbox.rdm.RDMs(SUBJECTS), method=TOOLBOX_NAMES[method])
    np.testing.assert_allclose(noise_ceiling(SUBJECTS, method=method), expected, atol=1e-8)


def test_kendall_equals_counting_pairs():
    a, b = np.round(MODELS[0], 1), TIED[0]
    signs = [np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]) for i, j in itertools.combinations(range(36), 2)]
    assert compare_rdms(a, b, method="kendall").item() == pytest.approx(np.mean(signs), abs=1e-15)


def inverse_covariance() -> np.ndarray:
    """Of squared distances between 9 conditions with i.i.d. noise, [36, 36]."""
    contrasts = np.zeros((36, 9))
    rows, columns = np.triu_indices(9, 1)
    contrasts[np.arange(36), rows], contrasts[np.arange(36), columns] = 1, -1
    return np.linalg.inv((contrasts @ contrasts.T) ** 2)


def test_whitened_cosine_equals_the_inverse_covariance_form():
    inverse = inverse_covariance()
    a, b = MODELS[0], SUBJECTS[0]
    expected = a @ inverse @ b / np.sqrt(a @ inverse @ a * (b @ inverse @ b))
    assert compare_rdms(a, b, method="whitened_cosine").item() == pytest.approx(expected, abs=1e-12)


def test_whitened_cosine_of_euclidean_rdms_equals_biased_cka():
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 7, dtype=torch.float64)
    found = compare_rdms(
        compute_rdm(x, metric="euclidean"), compute_rdm(y, metric="euclidean"), method="whitened_cosine"
    ).item()
    assert found == pytest.approx(
        linear_cka(Moments.of({"x": x, "y": y}), debiased=False).values[0, 1], abs=1e-10
    )


@pytest.mark.parametrize("method", ["whitened_cosine", "whitened_pearson"])
def test_whitened_noise_ceiling_equals_the_definition(method):
    inverse = inverse_covariance()

    def unit(rdm: np.ndarray) -> np.ndarray:
        rdm = rdm - rdm.mean() if method == "whitened_pearson" else rdm
        return rdm / np.sqrt(rdm @ inverse @ rdm)

    units = np.array([unit(rdm) for rdm in SUBJECTS])
    upper = np.mean([unit(units.mean(0)) @ inverse @ one for one in units])
    lower = np.mean([unit(np.delete(units, i, axis=0).mean(0)) @ inverse @ units[i] for i in range(4)])
    np.testing.assert_allclose(noise_ceiling(SUBJECTS, method=method), (lower, upper), rtol=1e-10)


def test_noise_ceiling_brackets_the_true_model():
    random = np.random.default_rng(0)
    truth = random.normal(size=190)
    subjects = truth + random.normal(size=(20, 190))
    for method in ("pearson", "spearman", "whitened_pearson"):
        lower, upper = noise_ceiling(subjects, method=method)
        assert lower < compare_rdms(truth, subjects, method=method).mean() < upper + 0.01
        assert upper - lower < 0.1


def test_noise_ceiling_is_nan_for_one_subject():
    assert np.isnan(noise_ceiling(SUBJECTS[:1])).all()


def test_rsa_takes_named_models():
    found = evaluate_models({"layer.0": MODELS[0], "layer.1": MODELS[1]}, SUBJECTS, method="pearson")
    assert found.similarity.shape == (2, 4)
    assert found.similarity[0].mean() > found.similarity[1].mean() + 0.2
    assert found.ceiling == noise_ceiling(SUBJECTS, method="pearson")


@pytest.mark.parametrize("over", ["conditions", "subjects", "both"])
def test_bootstrap_is_centred_on_the_estimate_and_repeats_with_its_seed(over):
    options = {"method": "pearson", "num_samples": 400, "over": over}
    found = bootstrap_rsa(MODELS, SUBJECTS, **options)
    estimate = compare_rdms(MODELS, SUBJECTS, method="pearson").mean(1)
    assert np.abs(found.mean(0) - estimate).max() < 0.1
    assert found.std(0).min() > 0.005
    np.testing.assert_array_equal(found, bootstrap_rsa(MODELS, SUBJECTS, **options))


def test_bootstrap_over_subjects_has_the_standard_error_of_the_mean():
    random = np.random.default_rng(0)
    subjects = MODELS[0] + random.normal(size=(30, 36))
    each = compare_rdms(MODELS[0], subjects, method="pearson")[0]
    found = bootstrap_rsa(MODELS[:1], subjects, method="pearson", num_samples=3000, over="subjects")
    assert found.std() == pytest.approx(each.std() / 30**0.5, rel=0.1)


def test_bootstrap_leaves_out_pairs_of_a_condition_with_itself():
    # Were they kept, both RDMs would share entries of 0 beside entries around 10, and correlate.
    random = np.random.default_rng(0)
    model, data = 10 + random.normal(size=(1, 190)), 10 + random.normal(size=(1, 190))
    found = bootstrap_rsa(model, data, method="pearson", num_samples=200, over="conditions")
    assert abs(found.mean()) < 0.15


def test_rsa_refuses_what_it_cannot_do():
    with pytest.raises(InterpError, match="method is 'tau'"):
        compare_rdms(MODELS, SUBJECTS, method="tau")
    with pytest.raises(InterpError, match="36 and 28"):
        compare_rdms(MODELS, SUBJECTS[:, :28])
    with pytest.raises(InterpError, match="over='subjects'"):
        bootstrap_rsa(MODELS, SUBJECTS, method="whitened_cosine")
    with pytest.raises(InterpError, match="over is 'all'"):
        bootstrap_rsa(MODELS, SUBJECTS, over="all")


@pytest.mark.parametrize("method", list(TOOLBOX_NAMES))
def test_rsa_refuses_nan_whatever_the_method(method):
    broken = np.where(np.arange(36) == 5, np.nan, SUBJECTS)
    for call in (
        lambda: compare_rdms(MODELS, broken, method=method),
        lambda: noise_ceiling(broken, method=method),
        lambda: bootstrap_rsa(MODELS, broken, method=method, over="subjects"),
    ):
        with pytest.raises(InterpError, match="an RDM holds 4 values"):
            call()


@pytest.mark.parametrize("method", ["pearson", "spearman", "kendall", "whitened_pearson"])
def test_comparison_with_a_constant_rdm_is_nan(method):
    for constant in (0.0, 0.1, 3.3):
        assert np.isnan(compare_rdms(np.full(36, constant), SUBJECTS, method=method)).all()
        assert np.isnan(compare_rdms(np.full(36, constant), np.full(36, 0.3), method=method)).all()


@pytest.mark.parametrize("method", list(TOOLBOX_NAMES))
@pytest.mark.parametrize("factor", [1e-20, 1e20])
def test_comparison_does_not_change_with_the_units_of_an_rdm(method, factor):
    expected = compare_rdms(MODELS, SUBJECTS, method=method)
    np.testing.assert_allclose(compare_rdms(factor * MODELS, SUBJECTS, method=method), expected, rtol=1e-10)
    found = noise_ceiling(factor * SUBJECTS, method=method)
    np.testing.assert_allclose(found, noise_ceiling(SUBJECTS, method=method), rtol=1e-10)


def test_whitened_pearson_equals_the_inverse_covariance_form_of_centred_rdms():
    inverse = inverse_covariance()
    a, b = MODELS[0] - MODELS[0].mean(), SUBJECTS[0] - SUBJECTS[0].mean()
    expected = a @ inverse @ b / np.sqrt(a @ inverse @ a * (b @ inverse @ b))
    found = compare_rdms(MODELS[0], SUBJECTS[0], method="whitened_pearson").item()
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("method", ["pearson", "spearman", "kendall", "cosine"])
def test_bootstrap_is_nan_for_draws_of_fewer_than_three_conditions_only(method):
    model, data = MODELS[:1, :6], SUBJECTS[:2, :6]
    found = bootstrap_rsa(model, data, method=method, num_samples=300, over="conditions")
    random = np.random.default_rng(0)
    few = np.array([len(np.unique(random.integers(4, size=4))) < 3 for _ in range(300)])
    assert few.any()
    np.testing.assert_array_equal(np.isnan(found[:, 0]), few)


@pytest.mark.parametrize(("shared", "times"), [(True, 1.0), (False, 3.0)])
def test_bootstrap_over_conditions_scatters_as_new_conditions_and_counts_what_pairs_add_thrice(shared, times):
    # Entries are the sum of what both conditions add (alike in both systems), or noise of single pairs.
    random, (rows, columns) = np.random.default_rng(0), np.triu_indices(40, 1)

    def draw() -> np.ndarray:
        own = random.normal(size=(1, 40)) + 0.8 * random.normal(size=(2, 40))
        return own[:, rows] + own[:, columns] if shared else random.normal(size=(2, 780))

    sets = [draw() for _ in range(300)]
    truth = np.var([compare_rdms(a, b, method="pearson") for a, b in sets])
    found = [
        bootstrap_rsa(a, b, method="pearson", num_samples=100, over="conditions").var() for a, b in sets[:40]
    ]
    assert np.mean(found) / truth == pytest.approx(times, rel=0.25)


def test_bootstrap_refuses_what_it_cannot_draw():
    with pytest.raises(InterpError, match="there is 1 subject"):
        bootstrap_rsa(MODELS, SUBJECTS[:1])
    with pytest.raises(InterpError, match="36 and 28"):
        bootstrap_rsa(MODELS, SUBJECTS[:, :28])
    with pytest.raises(InterpError, match="method is 'tau'"):
        bootstrap_rsa(MODELS, SUBJECTS, method="tau")
    with pytest.raises(InterpError, match="method is 'tau'"):
        noise_ceiling(SUBJECTS, method="tau")
    with pytest.raises(InterpError, match="7 entries"):
        noise_ceiling(SUBJECTS[:, :7])


def test_models_by_name_are_those_in_an_array():
    random = np.random.default_rng(0)
    models, data = random.random((2, 15)), random.random((3, 15))
    named = {"early": models[0], "late": models[1]}
    result = evaluate_models(named, data)
    assert result.names == ("early", "late")
    assert evaluate_models(models, data).names == ("0", "1")
    np.testing.assert_array_equal(result.similarity, evaluate_models(models, data).similarity)
    draws = [bootstrap_rsa(given, data, num_samples=5) for given in (named, models)]
    np.testing.assert_array_equal(*draws)
