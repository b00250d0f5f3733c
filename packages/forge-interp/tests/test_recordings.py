import numpy as np
import pytest
import torch
from forge_interp import InterpError, extract_representations
from forge_interp.recordings import (
    at_scans,
    canonical_response,
    delayed,
    encode,
    lanczos,
    noise_ceiling,
    pool_words,
    word_samples,
)
from forge_interp.recordings.encoding import _shuffled_blocks
from torch import nn

himalaya = pytest.importorskip("himalaya")
transformers = pytest.importorskip("transformers")

WORDS = ["the", "unbelievable", "cat,", "of", "course,", "sat", "un", "believable"]
RUNS = np.repeat(["a", "b", "c", "d"], 60)


def tokenizer():
    """Letters, merged into `un` and ` c`, with marks at both ends: tokens of one to three letters."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing

    letters = ["[", "]", "?", "un", " c", *"abcdefghijklmnopqrstuvwxyz ,"]
    made = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="?"))
    made.pre_tokenizer = Split(Regex("un| c|."), "isolated")
    made.post_processor = TemplateProcessing("[ $A ]", special_tokens=[("[", 0), ("]", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def brain(seed=0, voxels=12, size=5, noise=1.0, runs=RUNS):
    """Features of two bands, and recordings of which the first half follows band `one`, the rest nothing."""
    random = np.random.default_rng(seed)
    bands = {name: random.normal(size=(len(runs), size)) for name in ("one", "two")}
    signal = bands["one"] @ random.normal(size=(size, voxels)) / size**0.5
    signal[:, voxels // 2 :] = 0
    return bands, signal + noise * random.normal(size=signal.shape) + 7


def correlations(a, b):
    return np.array([np.corrcoef(x, y)[0, 1] for x, y in zip(a.T, b.T, strict=True)])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 6)
        self.mix = nn.GRU(6, 6, batch_first=True)

    def forward(self, input_ids):
        return self.mix(self.embed(input_ids))[0]


def test_tokens_of_a_word_are_those_of_its_letters():
    (sample,) = word_samples(WORDS, tokenizer(), before=None)
    names = tokenizer().convert_ids_to_tokens(sample["input_ids"])
    found = [
        "".join(name for name, word in zip(names, sample["word"], strict=True) if word == number)
        for number in range(1, len(WORDS) + 1)
    ]
    assert [text.strip() for text in found] == WORDS
    assert sample["word"][0] == sample["word"][-1] == 0  # the marks at both ends


@pytest.mark.parametrize("before", [0, 2, 100])
def test_a_window_is_the_word_and_those_before_it(before):
    samples = word_samples(WORDS, tokenizer(), before=before)
    for number, sample in enumerate(samples):
        text = " ".join(WORDS[max(0, number - before) : number + 1])
        assert sample["input_ids"].tolist() == tokenizer()(text)["input_ids"]
        letters = tokenizer().convert_ids_to_tokens(sample["input_ids"][sample["word"] == number + 1])
        assert "".join(letters).strip() == WORDS[number] and set(sample["word"].tolist()) == {0, number + 1}


@pytest.mark.parametrize("how", ["mean", "last", "first", "max"])
def test_words_pooled_while_extracting_equal_a_loop_one_by_one(how):
    torch.manual_seed(0)
    model, samples = Reader(), word_samples(WORDS, tokenizer(), before=3)
    store = extract_representations(model, samples, "mix", where="word", pool=how, mask=None, batch_size=1)
    padded = extract_representations(model, samples, "mix", where="word", pool=how, batch_size=3)
    rows = extract_representations(model, samples, "mix", where="word", keep="word")
    for number, sample in enumerate(samples):
        with torch.no_grad():
            mine = model(sample["input_ids"][None])[0][sample["word"] == number + 1]
        expected = {"mean": mine.mean(0), "last": mine[-1], "first": mine[0], "max": mine.amax(0)}[how]
        for found in (store["mix"], padded["mix"], pool_words(rows["mix"], rows.kept("word"), how)):
            torch.testing.assert_close(found[number], expected, atol=1e-6, rtol=0)
    assert rows.position[0] == 1  # behind the mark: positions count all tokens


def test_where_refuses_what_it_cannot_take():
    samples = word_samples(WORDS, tokenizer(), before=2)
    with pytest.raises(InterpError, match="where names 'speech', which is NoneType"):
        extract_representations(Reader(), samples, "mix", where="speech", batch_size=3)
    with pytest.raises(InterpError, match="sample 1 has no token with 'word' to pool"):
        samples[1]["word"][:] = 0
        extract_representations(Reader(), samples, "mix", where="word", pool="mean", batch_size=3)
    with pytest.raises(InterpError, match="a row a sample"):
        extract_representations(nn.Linear(4, 3), torch.zeros(5, 4), "", where="word", tokens=None)


def test_extraction_to_disk_is_of_one_where(tmp_path):
    samples = word_samples(WORDS, tokenizer(), before=2)
    torch.manual_seed(0)
    model = Reader()
    extract_representations(model, samples, "mix", tmp_path / "acts", where="word", pool="last")
    samples = [sample | {"other": sample["word"] * 0 + 1} for sample in samples]
    with pytest.raises(InterpError, match="where"):
        extract_representations(model, samples, "mix", tmp_path / "acts", where="other", pool="last")


def test_a_word_without_a_token_is_refused():
    def pairs(text, return_offsets_mapping):
        spans = [(start, start + 5) for start in range(0, len(text), 5)]
        return {"input_ids": list(range(len(spans))), "offset_mapping": spans}

    with pytest.raises(InterpError, match="word 1, 'b', has no token of its own"):
        word_samples(["a", "b"], pairs, before=None)
    with pytest.raises(InterpError, match="tokenize gave input_ids; expected"):
        word_samples(["a"], lambda text, **_: {"input_ids": [1]}, before=None)
    with pytest.raises(InterpError, match="word 1, '', has no token"):
        word_samples(["a", ""], tokenizer(), before=None)
    with pytest.raises(InterpError, match="side by side"):
        pool_words(torch.zeros(3, 2), [1, 2, 1])


def test_canonical_response_equals_gamma_densities():
    stats = pytest.importorskip("scipy.stats")
    t = np.linspace(-5, 60, 1000)
    expected = (stats.gamma.pdf(t, 6) - stats.gamma.pdf(t, 16) / 6) / (5 / 6)
    np.testing.assert_allclose(canonical_response(t), expected, atol=1e-14)
    fine = np.arange(0, 200, 0.01)
    assert abs(canonical_response(fine).sum() * 0.01 - 1) < 1e-6
    assert abs(fine[canonical_response(fine).argmax()] - 5) < 0.02
    np.testing.assert_allclose(canonical_response(np.array([-1.0, 1e9])), [0, 0], atol=1e-60)


def test_at_scans_equals_a_convolution_on_a_grid():
    random = np.random.default_rng(0)
    step, onsets = 0.05, np.sort(random.choice(2000, 80, replace=False))
    features, scans = random.normal(size=(80, 3)), np.arange(0, 2000, 31)
    impulses = np.zeros((2000, 3))
    impulses[onsets] = features
    kernel = canonical_response(np.arange(2000) * step)
    expected = np.stack([np.convolve(column, kernel)[:2000] for column in impulses.T], axis=1)[scans]
    found = at_scans(torch.tensor(features), onsets * step, scans * step)
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_lanczos_equals_its_formula_in_a_loop():
    onsets, scans, tr = np.array([0.1, 3.3, 4.0]), np.arange(5) * 2.0, 2.0
    found = at_scans(np.eye(3), onsets, scans, lanczos(tr))
    for i, scan in enumerate(scans):
        for j, onset in enumerate(onsets):
            u = np.pi * (scan - onset) / tr
            value = 1.0 if u == 0 else 3 * np.sin(u) * np.sin(u / 3) / u**2 if abs(u) < 3 * np.pi else 0.0
            assert abs(found[i, j] - value) < 1e-12


def test_delayed_equals_a_loop_and_stays_in_its_run():
    features = np.random.default_rng(0).normal(size=(9, 2))
    runs, delays = ["x"] * 4 + ["y"] * 2 + ["z"] * 3, (-1, 0, 2, 5)
    found = delayed(features, delays, runs)
    for scan in range(9):
        for i, delay in enumerate(delays):
            source = scan - delay
            inside = 0 <= source < 9 and runs[source] == runs[scan]
            expected = features[source] if inside else np.zeros(2)
            assert found[scan, 2 * i : 2 * i + 2].tolist() == expected.tolist()


@pytest.mark.parametrize(("size", "delays"), [(5, (1, 2, 3)), (70, (0, 1, 2))])
def test_plain_ridge_equals_scikit_learn_fold_by_fold(size, delays):
    """Also with more features than scans, where himalaya works with kernels."""
    from sklearn.linear_model import Ridge
    from sklearn.metrics import r2_score
    from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict

    bands, y = brain(size=size)
    alphas = np.logspace(-1, 4, 6)
    found = encode(bands["one"], y, RUNS, delays=delays, alphas=alphas)
    for fold, run in enumerate("abcd"):
        train, test = run != RUNS, run == RUNS
        x = (bands["one"] - bands["one"][train].mean(0)) / bands["one"][train].std(0)
        x = delayed(x, delays, RUNS)
        inner = {"cv": LeaveOneGroupOut(), "groups": RUNS[train]}
        guesses = [cross_val_predict(Ridge(alpha=a), x[train], y[train], **inner) for a in alphas]
        best = alphas[np.argmin([((guess - y[train]) ** 2).sum(0) for guess in guesses], axis=0)]
        guess = Ridge(alpha=best).fit(x[train], y[train]).predict(x[test])
        np.testing.assert_allclose(found.penalties[fold, 0], best, rtol=1e-9)
        np.testing.assert_allclose(found.predictions[test], guess, atol=1e-7)
        np.testing.assert_allclose(found.r[fold], correlations(guess, y[test]), atol=1e-7)
        centred = (y[test] - y[test].mean(0), guess - guess.mean(0))
        expected = r2_score(*centred, multioutput="raw_values")
        np.testing.assert_allclose(found.r2[fold], expected, atol=1e-7)


@pytest.mark.parametrize("size", [4, 120])
def test_banded_ridge_equals_the_closed_form_with_its_penalties(size):
    bands, y = brain(size=size)
    found = encode(bands, y, RUNS, draws=8, alphas=[1.0, 30.0])
    assert len(np.unique(found.penalties[0, 0])) > 1
    for fold, run in enumerate("abcd"):
        train, test = run != RUNS, run == RUNS
        x = np.concatenate(list(bands.values()), axis=1)
        x = (x - x[train].mean(0)) / x[train].std(0)
        for voxel in (0, 11):
            penalty = np.diag(np.repeat(found.penalties[fold, :, voxel], size))
            centred = y[train, voxel] - y[train, voxel].mean()
            weights = np.linalg.solve(x[train].T @ x[train] + penalty, x[train].T @ centred)
            guess = x[test] @ weights + y[train, voxel].mean()
            np.testing.assert_allclose(found.predictions[test, voxel], guess, atol=1e-7)


def test_banded_penalties_are_the_best_of_all_draws_and_alphas():
    """Every pair of weights and alpha is tried by hand, each training run left out in turn."""
    bands, y = brain(noise=2.0)
    alphas = np.array([1.0, 30.0, 300.0])
    found = encode(bands, y, RUNS, test_runs=["d"], draws=6, alphas=alphas)
    drawn = himalaya.kernel_ridge.generate_dirichlet_samples(6, 2, [0.1, 1.0], random_state=0)
    drawn[0] = 0.5
    train = RUNS != "d"
    x = np.concatenate(list(bands.values()), axis=1)[train]
    x, target, runs = (x - x.mean(0)) / x.std(0), y[train], RUNS[train]
    best = np.full(12, np.inf), np.zeros((2, 12))
    for weights in drawn:
        for alpha in alphas:
            error = np.zeros(12)
            for run in "abc":
                fit, out = runs != run, runs == run
                a, b = x[fit] - x[fit].mean(0), target[fit] - target[fit].mean(0)
                penalty = np.diag(np.repeat(alpha / weights, 5))
                guess = (x[out] - x[fit].mean(0)) @ np.linalg.solve(a.T @ a + penalty, a.T @ b)
                error += ((guess + target[fit].mean(0) - target[out]) ** 2).sum(0)
            better = error < best[0]
            best[0][better] = error[better]
            best[1][:, better] = (alpha / weights)[:, None]
    np.testing.assert_allclose(found.penalties[0], best[1], rtol=1e-9)


def test_parts_of_bands_sum_to_r2_and_equal_those_of_himalaya():
    bands, y = brain(noise=0.3)
    found = encode(bands, y, RUNS, draws=20)
    np.testing.assert_allclose(found.band_r2.sum(1), found.r2, atol=1e-12)
    test, train = RUNS == "a", RUNS != "a"
    parts = []
    for number, x in enumerate(bands.values()):  # the part of each band in the predictions of the first fold
        one, other = (x - x[train].mean(0)) / x[train].std(0), list(bands.values())[1 - number]
        joint = np.concatenate([one, (other - other[train].mean(0)) / other[train].std(0)], axis=1)
        penalties = np.repeat(found.penalties[0, [number, 1 - number]], 5, axis=0)
        gram, target = joint[train].T @ joint[train], joint[train].T @ (y[train] - y[train].mean(0))
        weights = [np.linalg.solve(gram + np.diag(penalties[:, v]), target[:, v]) for v in range(12)]
        parts.append(one[test] @ np.stack(weights, axis=1)[:5])
    parts = np.stack(parts) - np.mean(parts, axis=1, keepdims=True)
    expected = himalaya.scoring.r2_score_split(y[test] - y[test].mean(0), parts)
    np.testing.assert_allclose(found.band_r2[0], expected, atol=1e-7)
    alone = encode(bands["one"], y, RUNS)
    assert (found.r[:, :6] > alone.r[:, :6] - 0.05).all()


def test_scores_do_not_depend_on_units_or_the_backend():
    bands, y = brain(noise=2.0)
    plain = encode(bands, y, RUNS, draws=8)
    tiny = encode(bands, y * 1e-13, RUNS, draws=8)
    np.testing.assert_allclose(tiny.penalties, plain.penalties, rtol=1e-9)
    np.testing.assert_allclose(tiny.predictions * 1e13, plain.predictions, atol=1e-7)
    try:
        himalaya.backend.set_backend("torch")
        on_torch = encode(bands, torch.tensor(y), RUNS, draws=8)
    finally:
        himalaya.backend.set_backend("numpy")
    np.testing.assert_allclose(on_torch.predictions, plain.predictions, atol=1e-7)


def test_the_test_run_decides_nothing():
    bands, y = brain()
    found = encode(bands, y, RUNS, test_runs=["b"], draws=5)
    changed = y.copy()
    changed[RUNS == "b"] += 100 * np.random.default_rng(1).normal(size=(60, 12))
    again = encode(bands, changed, RUNS, test_runs=["b"], draws=5)
    assert found.penalties.tolist() == again.penalties.tolist()
    np.testing.assert_array_equal(found.predictions, again.predictions)
    assert np.isnan(found.predictions[RUNS != "b"]).all() and len(found.r) == 1


def test_noise_ceiling_is_the_correlation_with_the_truth():
    random = np.random.default_rng(0)
    runs = np.repeat([0, 1], 3000)
    signal = random.normal(size=(6000, 3)) + 50 * runs[:, None]  # a run has its own level
    repeats = signal + np.array([0.5, 1.0, 3.0]) * random.normal(size=(4, 6000, 3))
    repeats[..., 2] -= signal[:, 2] * 0.999999  # a voxel of noise alone
    within = [correlations(signal[runs == run], repeats.mean(0)[runs == run]) for run in (0, 1)]
    ceiling = noise_ceiling(repeats, runs)
    np.testing.assert_allclose(ceiling[:2], np.mean(within, 0)[:2], atol=0.01)
    np.testing.assert_allclose(ceiling[:2] ** 2, 1 / (1 + np.array([0.25, 1]) / 4), atol=0.02)
    assert ceiling[2] < 0.2


def test_a_voxel_outside_of_the_brain_has_no_noise_ceiling_and_warns_of_nothing():
    repeats = np.random.default_rng(0).normal(size=(3, 40, 2))
    repeats[..., 1] = 0
    assert np.isnan(noise_ceiling(repeats, np.repeat([0, 1], 20))).tolist() == [False, True]


def test_blocks_are_shuffled_whole_and_within_their_run():
    runs = np.repeat([0, 1], [25, 40])
    order = _shuffled_blocks(runs, 10, np.random.default_rng(0))
    assert sorted(order) == list(range(65)) and order.tolist() != list(range(65))
    assert runs[order].tolist() == runs.tolist()
    assert (np.diff(order) == 1).sum() >= 65 - 10


def remembering(random, scans, voxels, memory=0.6):
    """Noise that remembers: an autoregression."""
    out = random.normal(size=(scans + 50, voxels))
    for scan in range(1, len(out)):
        out[scan] += memory * out[scan - 1]
    return out[50:]


def null(voxels, size=8, stimulus=None):
    """Features that remember, and recordings that have nothing to do with them."""
    random = np.random.default_rng(3)
    runs = np.repeat([0, 1, 2], 80)
    features = remembering(random, 240, size)
    if stimulus == "same":
        features[80:] = np.tile(features[:80], (2, 1))
    return features, remembering(random, 240, voxels), runs


@pytest.mark.parametrize(("test_runs", "stimulus"), [([2], None), (None, None), (None, "same")])
def test_null_voxels_are_significant_at_the_nominal_rate(test_runs, stimulus):
    """Also when all runs are of one story, where the folds have nearly the same score."""
    features, y, runs = null(400, stimulus=stimulus)
    found = encode(features, y, runs, test_runs=test_runs, alphas=[10.0, 1000.0], permutations=59, block=20)
    assert 0.02 < (found.p <= 0.05).mean() < 0.085  # 5 % +- 3 standard errors of 400 voxels
    assert 0.4 < found.p.mean() < 0.6


def test_voxels_with_a_signal_are_significant_and_a_constant_one_has_no_score():
    bands, y = brain(noise=1.0)
    y[:, 5] = 1.5
    found = encode(bands["one"], y, RUNS, alphas=[10.0], permutations=99, block=5)
    assert (found.p[:5] == 0.01).all() and (found.p[6:] > 0.01).sum() >= 5
    assert np.isnan(found.r[:, 5]).all() and np.isnan(found.p[5])


def test_planted_layers_are_found_by_voxel():
    """Words of a story in three layers; each voxel follows one of them through the blood response."""
    random = np.random.default_rng(0)
    runs, scans, onsets = np.repeat(range(4), 100), np.arange(100) * 2.0, np.arange(400) * 0.5
    layers = {}
    words = random.normal(size=(4, 400, 10))
    for name in ("0", "1", "2"):  # each a nonlinear mix of the one before
        words = np.tanh(words @ random.normal(size=(10, 10)) * 0.5) + 0.3 * words
        layers[name] = np.concatenate([at_scans(run, onsets, scans) for run in words])
    truth = np.repeat([0, 1, 2], 10)
    signal = np.concatenate([x @ random.normal(size=(10, 10)) for x in layers.values()], axis=1)
    signal /= signal.std(0)
    repeats = signal + 0.7 * random.normal(size=(3, *signal.shape))
    scores = np.stack([encode(x, repeats.mean(0), runs).r.mean(0) for x in layers.values()])
    assert (scores.argmax(0) == truth).mean() > 0.95
    share = scores[truth, np.arange(30)] / noise_ceiling(repeats, runs)
    assert abs(np.median(share) - 1) < 0.05
    both = encode(layers, repeats.mean(0), runs, draws=30, alphas=np.logspace(-1, 4, 6))
    assert (both.band_r2.mean(0).argmax(0) == truth).mean() > 0.95


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": RUNS[:-1]}, "runs 239"),
        ({"runs": np.tile([0, 1], 120)}, "240 pieces"),
        ({"runs": np.repeat([0, 1], 120)}, "at least 3 runs"),
        ({"test_runs": ["e"]}, "at least one of them held out"),
        ({"alphas": [0.0]}, "all positive"),
        ({"permutations": 5, "block": 31}, "at most half"),
        ({"recordings": np.full((240, 2), np.nan)}, "NaN"),
    ],
)
def test_encode_refuses(change, message):
    bands, y = brain()
    with pytest.raises(InterpError, match=message):
        encode(**({"bands": bands, "recordings": y, "runs": RUNS} | change))
