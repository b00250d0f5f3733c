"""benchmarks/muon_tokens.py reads the records of runs; here records whose answer is known."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 100


@pytest.fixture(scope="module")
def sweep():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import muon_tokens
    finally:
        sys.path.remove(str(BENCHMARKS))
    return muon_tokens


def record(folder: Path, losses: list[float], end: float) -> None:
    """What a run of 10 tokens a step leaves behind."""
    folder.mkdir(parents=True)
    lines = [{"step": step, "tokens": 10 * step, "loss": loss} for step, loss in enumerate(losses, 1)]
    lines.append({"step": STEPS, "tokens": 10 * STEPS, "eval/loss": end})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "exit.json").write_text("{}")


@pytest.fixture
def root(sweep, tmp_path):
    """AdamW falls to 4 in a straight line, Muon twice as fast; the second rate is the best of both."""
    for side, speed in (("adamw", 0.05), ("muon", 0.1)):
        for index, lr in enumerate(sweep.GRIDS[side]):
            for seed in sweep.SEEDS:
                losses = [9.0 - speed * step + (-1) ** seed for step in range(1, STEPS + 1)]
                wrong = [20.0] * STEPS
                ends = 2.0 + abs(index - 1) + seed
                record(sweep.run_of(tmp_path, side, lr, seed), losses if index == 1 else wrong, ends)
    return tmp_path


def test_summary_counts_tokens_to_the_end_of_adamw_at_the_best_rates(sweep, root, monkeypatch):
    monkeypatch.setattr(sweep, "WINDOW", 1)
    results, curves = sweep.summary(root, sweep.GRIDS)
    assert [row["lr"] for row in results["sweep"] if row["best"] == "best"] == [
        sweep.GRIDS["adamw"][1],
        sweep.GRIDS["muon"][1],
    ]
    assert results["tokens"] == 1000 and results["adamw_loss"] == pytest.approx(4.0)
    assert results["muon_tokens"] in (500, 510) and results["fraction"] == pytest.approx(0.5, abs=0.01)
    assert [len(points) for points in curves.values()] == [STEPS, STEPS]


def test_summary_averages_over_seeds_and_steps(sweep, root):
    results, curves = sweep.summary(root, sweep.GRIDS)
    window = sweep.WINDOW
    assert curves["adamw"][0] == (10 * window, pytest.approx(9.0 - 0.05 * (window + 1) / 2))
    assert [row["held-out loss"] for row in results["sweep"][:4]] == pytest.approx([3.5, 2.5, 3.5, 4.5])


def test_summary_marks_a_best_rate_at_the_edge(sweep, root):
    for seed in sweep.SEEDS:
        metrics = sweep.run_of(root, "muon", sweep.GRIDS["muon"][-1], seed) / "metrics.jsonl"
        metrics.write_text(metrics.read_text() + json.dumps({"tokens": 1000, "eval/loss": 0.5}) + "\n")
    rows = sweep.summary(root, sweep.GRIDS)[0]["sweep"]
    assert [(row["side"], row["lr"]) for row in rows if row["best"] == "best, at the edge"] == [
        ("muon", sweep.GRIDS["muon"][-1])
    ]


@pytest.mark.parametrize(
    ("losses", "found"), [((5, 3, 4, 2), 40), ((5, 3, 2, 4), None), ((1, 1, 1, 1), 10), ((3, 3, 3, 3), 10)]
)
def test_tokens_to_a_loss_counts_where_the_curve_stays_below(sweep, losses, found):
    assert sweep.tokens_to(list(zip((10, 20, 30, 40), losses, strict=True)), 3) == found


def test_complete_run_is_not_done_again_and_a_failed_one_ends_the_sweep(sweep, root):
    lr = sweep.GRIDS["adamw"][1]
    before = sweep.held_out(sweep.run_of(root, "adamw", lr, 0))
    sweep.train(root, [], "adamw", lr, 0)
    assert sweep.held_out(sweep.run_of(root, "adamw", lr, 0)) == before
    with pytest.raises(SystemExit, match=r"train\.steps"):
        sweep.train(root, ["--train.steps=none"], "adamw", 0.5, 0)


def test_picture_holds_both_curves_and_is_the_same_every_time(sweep, root, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "PICTURE", tmp_path / "picture.svg")
    results, curves = sweep.summary(root, sweep.GRIDS)
    drawn = []
    for _ in range(2):
        sweep.draw(curves, results["muon_tokens"])
        drawn.append(sweep.PICTURE.read_text())
    assert drawn[0] == drawn[1] and ">adamw<" in drawn[0] and ">muon<" in drawn[0]
