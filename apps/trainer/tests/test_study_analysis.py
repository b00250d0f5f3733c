"""What a study says of runs whose law is known: constants, lowest points, intervals, doubts, pictures."""

import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from forge_ckpt import Snapshot, Store
from forge_trainer.cli import main
from forge_trainer.study.compare import optimizers
from forge_trainer.study.config import AnalysisConfig
from forge_trainer.study.findings import best_values, isoflops, law, seeds
from forge_trainer.study.optima import optimum, trend
from forge_trainer.study.picture import Series, picture
from forge_trainer.study.scaling import DELTA, Scaling, bootstrap, fit, interval

TRUE = Scaling(1.7, 400.0, 410.0, 0.34, 0.28)
HOW = AnalysisConfig(loss="loss", bootstrap=100)


def runs(noise, seed, sizes=5, ratios=(5, 10, 20, 40, 80)):
    n, r = (x.ravel() for x in np.meshgrid(np.geomspace(1e6, 1e9, sizes), ratios))
    rng = np.random.default_rng(seed)
    y = [TRUE.loss(*size) for size in zip(n, n * r, strict=True)]
    return n, n * r, np.array(y) * np.exp(rng.normal(0, noise, len(n)))


def row(**given):
    common = {"state": "complete", "parameters": 1e6, "tokens": 1e8, "flops": 6e14, "batch_tokens": 1e5}
    return {**common, "lr": 1e-3, "optimizer": "adamw", "seed": 0, "run": repr(given), **given}


def test_fit_without_noise_finds_the_constants():
    assert fit(*runs(0, 0)) == pytest.approx(TRUE, rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_fit_ends_where_scipy_does(seed):
    optimize = pytest.importorskip("scipy.optimize")
    n, d, y = runs(0.02, seed)

    def objective(theta):
        a, b, e, alpha, beta = theta
        terms = np.stack([a - alpha * np.log(n), b - beta * np.log(d), np.full(len(n), e)])
        residual = np.abs(np.log(np.exp(terms).sum(0)) - np.log(y))
        huber = np.where(residual <= DELTA, residual**2 / 2, DELTA * (residual - DELTA / 2))
        return 1e4 * huber.sum()

    def theta(one):
        return np.array([*np.log([one.a, one.b, one.e]), one.alpha, one.beta])

    found = fit(n, d, y)
    starts = [theta(found), theta(TRUE)]
    best = min(
        optimize.minimize(objective, s, method="Nelder-Mead", options={"maxiter": 20000, "xatol": 1e-9}).fun
        for s in starts
    )
    assert objective(theta(found)) <= best * (1 + 1e-4)


def inside(seeds, noise=0.005):
    hits = np.zeros(2)
    for seed in seeds:
        data = runs(noise, seed)
        laws = bootstrap(*data, samples=200, seed=seed)
        for k, key in enumerate(("alpha", "beta")):
            low, high = interval([getattr(one, key) for one in laws], 0.9, len(data[0]))
            hits[k] += low <= getattr(TRUE, key) <= high
    return hits


def test_true_exponents_are_inside_the_intervals():
    assert (inside(range(10)) >= 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_true_exponents_are_inside_85_of_100_intervals(noise):
    assert (inside(range(100), noise) >= 85).all()


def test_a_law_predicts_and_doubts_what_is_far():
    n, d, y = runs(0.002, 1)
    rows = [row(parameters=a, tokens=b, loss=c) for a, b, c in zip(n, d, y, strict=True)]
    how = AnalysisConfig(loss="loss", bootstrap=100, predict=[(2e9, 4e10), (1e11, 2e12)])
    found = law(rows, how)
    near, far = found.numbers["predictions"]
    assert near["low"] < TRUE.loss(2e9, 4e10) < near["high"] and near["beyond"] < 10 < far["beyond"]
    assert len(found.doubts) == 1 and "1e+11 parameters and 2e+12 tokens are" in found.doubts[0]


def test_a_law_of_one_ratio_or_few_runs_is_doubted_or_not_fitted():
    n, d, y = runs(0.002, 1, ratios=(20,))
    rows = [row(parameters=a, tokens=b, loss=c) for a, b, c in zip(n, d, y, strict=True)]
    assert law(rows, HOW) is None, "five runs"
    n, d, y = runs(0.002, 1, sizes=8, ratios=(20,))
    rows = [row(parameters=a, tokens=b, loss=c) for a, b, c in zip(n, d, y, strict=True)]
    said = " ".join(law(rows, HOW).doubts)
    assert "cannot be told apart" in said and "believe a fit of 10" in said
    small = [
        row(parameters=a, tokens=b, loss=TRUE.loss(a, b)) for a in (1e6, 2e6, 3e6) for b in (1e8, 2e8, 3e8)
    ]
    assert "span a factor of 3" in " ".join(law(small, HOW).doubts)


def test_isoflop_curves_find_the_analytic_best_size():
    rows, budgets = [], np.geomspace(1e18, 1e21, 4)
    power = TRUE.size_exponent
    factor = (TRUE.alpha * TRUE.a / (TRUE.beta * TRUE.b)) ** (1 / (TRUE.alpha + TRUE.beta))
    for c in budgets:
        best = factor * (c / 6) ** power
        for n in best * np.geomspace(0.4, 2.5, 7):
            rows.append(row(parameters=n, tokens=c / 6 / n, flops=c, loss=TRUE.loss(n, c / 6 / n)))
    found = isoflops(rows, HOW)
    for c, place in zip(budgets, found.numbers["optima"], strict=True):
        assert place["parameters"] == pytest.approx(factor * (c / 6) ** power, rel=0.1)
        assert place["tokens"] == pytest.approx(c / 6 / place["parameters"], rel=0.05)
    assert found.numbers["parameters"]["power"] == pytest.approx(power, abs=0.02)
    assert found.doubts == []


def test_best_learning_rate_and_its_trend():
    rows = []
    for n in np.geomspace(1e6, 1e9, 4):
        best = 3e-3 * (n / 1e6) ** -0.25
        for lr in best * np.array([0.25, 0.5, 1, 2, 4]) * 1.3:
            rows.append(row(parameters=n, tokens=20 * n, lr=lr, loss=3 + 0.02 * math.log(lr / best) ** 2))
    found = best_values(rows, HOW, "lr")
    assert [one["lr"] for one in found.numbers["optima"]] == pytest.approx(
        [3e-3 * (n / 1e6) ** -0.25 for n in np.geomspace(1e6, 1e9, 4)], rel=1e-6
    )
    assert found.numbers["trends"]["adamw"]["power"] == pytest.approx(-0.25)
    assert found.doubts == []


def test_batches_of_as_many_steps_are_not_compared():
    rows = [row(batch_tokens=b, tokens=1e3 * b, loss=4 - b / 1e4) for b in (1e3, 2e3, 4e3, 8e3)]
    found = best_values(rows, HOW, "batch_tokens", "tokens")
    assert found.numbers["optima"] == [] and found.lines == [] and not found.svg
    assert "saw as many tokens (1e+06 to 8e+06), so they are not compared" in found.doubts[0]


def test_batches_are_compared_at_each_length_with_steps_rounded():
    def loss(batch, tokens):
        return 3 + 1e5 / tokens + 0.02 * math.log(batch / 3e3) ** 2

    rows = [
        row(batch_tokens=b, tokens=b * round(t / b), loss=loss(b, t))
        for t in (1e6, 2e6)
        for b in (1e3, 2e3, 4e3, 7e3)
    ]
    found = best_values(rows, HOW, "batch_tokens", "tokens")
    assert [one["batch_tokens"] for one in found.numbers["optima"]] == pytest.approx([3e3, 3e3], rel=1e-6)
    assert found.doubts == []


def test_budgets_that_grow_little_by_little_are_not_one():
    sizes = np.geomspace(1e6, 3e6, 40)
    rows = [row(parameters=n, tokens=1e7, flops=6e7 * n, loss=TRUE.loss(n, 1e7)) for n in sizes]
    found = isoflops(rows, HOW)
    assert len(found.numbers["optima"]) > 10
    assert all("a parabola needs 3" in said for said in found.doubts if "FLOPs:" in said)


def test_a_law_of_one_length_or_of_losses_that_are_none_is_doubted():
    sizes = np.geomspace(1e6, 1e8, 8)
    one = law([row(parameters=n, tokens=1e7, loss=TRUE.loss(n, 1e7)) for n in sizes], HOW)
    assert any("all runs have as many tokens" in said for said in one.doubts)
    none = law([row(parameters=n, tokens=10 * n, loss=0.0) for n in sizes], HOW)
    assert "loss is 0 in a run" in none.doubts[0] and none.numbers == {}


@pytest.mark.parametrize(
    ("losses", "doubt"),
    [
        ([3.0, 2.0, 1.0, 0.5], "at the edge"),
        ([1.0, 3.0, 3.1, 1.1], "opens downwards"),
        ([2.0, 1.0], "needs 3"),
    ],
)
def test_lowest_points_that_are_none_are_doubted(losses, doubt):
    found = optimum([2.0**n for n in range(len(losses))], losses, 50, 0.9, 0)
    assert any(doubt in said for said in found.doubts)


def test_interval_of_a_lowest_point_holds_it_in_most_of_many_draws():
    x, hits = np.geomspace(1e-4, 1e-2, 9), 0
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0, 0.01, 9)
        found = optimum(x, 3 + 0.05 * np.log(x / 1e-3) ** 2 + noise, 200, 0.9, seed)
        hits += found.low <= 1e-3 <= found.high
    assert hits >= 80


def test_a_trend_of_few_sizes_is_doubted():
    assert "4" not in "".join(trend([1, 2, 4, 8], [1, 2, 4, 8], 50, 0.9, 0).doubts)
    assert "believe a trend of four" in "".join(trend([1, 2], [1, 2], 50, 0.9, 0).doubts)


def test_seeds_give_the_pooled_deviation():
    losses = {1e-3: [3.0, 3.2, 3.1], 2e-3: [2.0, 2.2]}
    rows = [row(lr=lr, seed=k, loss=y) for lr, ys in losses.items() for k, y in enumerate(ys)]
    squares = sum(np.var(ys) * len(ys) for ys in losses.values())
    assert seeds(rows, HOW).numbers["deviation"] == pytest.approx(math.sqrt(squares / 3))
    assert "3 degrees of freedom" in seeds(rows, HOW).doubts[0]
    assert seeds(rows[:1], HOW) is None


def test_optimizers_are_compared_by_tokens_time_and_loss():
    losses = {"adamw": {1e-3: 3.1, 2e-3: 3.0, 4e-3: 3.2}, "muon": {1e-2: 2.8, 2e-2: 2.9}}
    rows = [
        row(lr=lr, optimizer=kind, loss=y, run=f"{kind}{lr}")
        for kind, found in losses.items()
        for lr, y in found.items()
    ]
    tokens = np.linspace(1e6, 1e8, 400)

    def curve(run):
        fast = 2.0 if run.startswith("muon") else 1.0
        seconds = tokens / 1e6 * (1.5 if fast > 1 else 1)
        return [(t, s, 5 - fast * t / 1e8) for t, s in zip(tokens, seconds, strict=True)]

    found = optimizers(rows, HOW, curve)
    (pair,) = found.numbers["pairs"]
    assert (pair["one"], pair["other"]) == ("adamw0.002", "muon0.01")
    assert pair["equal_tokens"] == pytest.approx(-0.2)
    assert pair["to_equal_loss"] == pytest.approx(0.5, abs=0.03)
    # after 100 s adamw has seen all, and lost 1; muon two thirds, and lost 4/3
    assert pair["equal_time"] == pytest.approx(-1 / 3, abs=0.03)
    assert len(found.doubts) == 1 and "muon" in found.doubts[0], (
        "its rate is at the edge, that of adamw is not"
    )


def test_best_rate_of_an_optimizer_is_that_of_the_mean_over_seeds_not_of_a_lucky_run():
    losses = {
        ("adamw", 1e-3): [3.3, 3.3],
        ("adamw", 2e-3): [3.0, 3.1],
        ("adamw", 4e-3): [2.9, 3.9],  # the best single run, and the worst
        ("muon", 1e-2): [3.2, 3.2],
        ("muon", 2e-2): [2.9, 2.9],
        ("muon", 4e-2): [3.0, 3.0],
    }
    rows = [
        row(lr=lr, optimizer=kind, seed=seed, loss=y, run=f"{kind}{lr}-{seed}")
        for (kind, lr), ys in losses.items()
        for seed, y in enumerate(ys)
    ]
    found = optimizers(rows, HOW, lambda run: [(1.0, 1.0, 3.0), (2.0, 2.0, 2.5)])
    (pair,) = found.numbers["pairs"]
    assert pair["one"].startswith("adamw0.002") and pair["other"].startswith("muon0.02")
    assert pair["equal_tokens"] == pytest.approx(2.9 - 3.05)
    assert found.doubts == []


def test_pictures_are_svg_that_shows_all_points():
    text = picture("a < b", "x", "y & z", [Series("one", [(1, 2), (10, 3)], [(1, 2), (10, 3)], [(1, 1, 3)])])
    tree = ElementTree.fromstring(text)
    assert len([e for e in tree.iter() if e.tag.endswith("circle")]) == 3, "two points and the legend"
    for number in (1, 1e-9, 1e9):
        ElementTree.fromstring(picture("t", "x", "y", [Series("s", [(number, number)])], log_y=True))


STUDY = """
name = "law"
base = "base.toml"
root = "{root}"
[grid]
model.dim = [8, 16, 32, 64, 128]
rules.tokens_per_parameter = [5.0, 20.0, 80.0]
[analysis]
bootstrap = 20
"""
BASE = """
job.name = "base"
model = { vocab_size = 272, num_layers = 2, max_tokens = 32, dim = 8, attention = { num_heads = 2 } }
schedule.type = "constant"
optimizer = { type = "adamw", lr = 1e-2 }
train = { steps = 100, global_batch = 8, micro_batch = 4 }
[data]
max_tokens = 32
tokenizer.type = "bytes"
sources = [{ type = "python-stdlib" }]
"""


def test_a_study_is_analysed_by_one_command(tmp_path, capsys):
    (tmp_path / "base.toml").write_text(BASE)
    file, root = tmp_path / "study.toml", tmp_path / "runs"
    file.write_text(STUDY.replace("{root}", str(root)))
    assert main(["study", str(file), "--analyse"]) == 78
    assert "no run of law is complete" in capsys.readouterr().err
    from forge_trainer.study.config import load_study
    from forge_trainer.study.points import points_of

    study, _ = load_study(file)
    for point in points_of(study, file, root):
        run = root / point.name
        steps = point.job.train.steps
        Store(run / "checkpoints").save(steps, Snapshot({"w": torch.zeros(1)}))
        loss = 1.5 + 30 / point.measures["parameters"] ** 0.4 + 60 / point.measures["tokens"] ** 0.3
        (run / "metrics.jsonl").write_text(json.dumps({"step": steps, "eval/loss": loss}) + "\n")
    assert main(["study", str(file), "--analyse"]) == 0
    said = capsys.readouterr().out
    found = json.loads((root / "analysis" / "analysis.json").read_text())["law"]
    assert (found["alpha"], found["beta"]) == pytest.approx((0.4, 0.3), rel=0.02)
    assert "15 of 15 runs" in said and "## Loss by parameters and tokens" in said
    ElementTree.parse(root / "analysis" / "law.svg")
