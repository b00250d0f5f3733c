"""The page of `forge report`, the table of `forge compare`, and how metrics are read for both."""

import csv
import json
import math
import os
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from forge_config import ConfigError
from forge_resilience.goodput import Line
from forge_trainer.cli import main
from forge_trainer.report.charts import charts_of
from forge_trainer.report.facts import config_of, differing, find_runs, marks_of, names_of
from forge_trainer.report.page import page
from forge_trainer.report.series import read_metrics, thinned

CONFIG = """
[job]
name = "{name}"
root = "runs"
seed = {seed}
[model]
dim = {dim}
[data]
max_tokens = 32
[[data.sources]]
type = "files"
paths = ["a </script> b"]
[train]
steps = 40
global_batch = 8
[optimizer]
type = "{optimizer}"
lr = {lr}
"""


def make(directory, records=(), optimizer="adamw", lr=1e-3, seed=0, dim=32):
    """A run directory with these metrics."""
    directory.mkdir(parents=True)
    text = CONFIG.format(name=directory.name, optimizer=optimizer, lr=lr, seed=seed, dim=dim)
    (directory / "config.toml").write_text(text)
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


def trained(last, steps=20, speed=1000.0, validation=None, tokens=256):
    """Records of a run whose loss falls to `last`."""
    records = []
    for step in range(1, steps + 1):
        records.append(
            {
                "step": step, "tokens": step * tokens, "loss": last + (steps - step), "lr": 1e-3,
                "grad_norm": 1.0, "tokens_per_s": speed + step % 3 - 1, "time": 100.0 + step,
            }
        )  # fmt: skip
    if validation is not None:
        records.append({"step": steps, "tokens": steps * tokens, "eval/loss": validation, "time": 200.0})
    return records


def facts_of(text):
    """What the page draws."""
    begin = text.index('id="data">') + len('id="data">')
    return json.loads(text[begin : text.index("</script>", begin)])


# reading -------------------------------------------------------------------------------------------------


def test_later_lines_of_a_continued_run_count_and_damage_is_passed_over(tmp_path):
    lines = [{"step": s, "loss": float(s)} for s in (1, 2, 3, 4)]
    lines.append({"step": 4, "eval/loss": 40.0})
    lines += [{"step": s, "loss": s + 0.5} for s in (3, 4)]  # begun again at step 2
    lines.append({"step": 5, "loss": None, "text": "x", "yes": True, "list": [1]})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    text += '{"step": 6, "lo\n[]\n{"loss": 1}\n{"step": "7", "loss": 1}\n\x00\n{"step": 8, "loss": 9.0'
    (tmp_path / "m.jsonl").write_text(text)
    found = read_metrics(tmp_path / "m.jsonl")
    assert set(found) == {"loss"}, "the evaluation was of a step that was given up"
    assert list(found["loss"].steps) == [1, 2, 3, 4, 5]
    assert list(found["loss"].values)[:4] == [1.0, 2.0, 3.5, 4.5] and math.isnan(found["loss"].values[4])
    assert found["loss"].last == (4, 4.5)
    assert read_metrics(tmp_path / "m.jsonl", {"lr"}) == {}
    assert read_metrics(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize("seed", range(10))
def test_thinned_curve_keeps_ends_and_peaks_and_dips(seed):
    draw = random.Random(seed)
    values = [draw.gauss(0, 1) for _ in range(draw.randrange(50, 3000))]
    values[draw.randrange(len(values))] = 99.0
    values[draw.randrange(len(values))] = -99.0
    bad = draw.sample(range(len(values)), 5)
    for at in bad:
        values[at] = values[at] if abs(values[at]) == 99.0 else math.nan
    kept = thinned(values, 40)
    assert kept == sorted(set(kept)) and len(kept) <= 40
    assert kept[0] == 0 and kept[-1] == len(values) - 1
    finite = [v for v in values if not math.isnan(v)]
    seen = [values[at] for at in kept if not math.isnan(values[at])]
    assert max(seen) == max(finite) and min(seen) == min(finite)
    assert any(math.isnan(values[at]) for at in kept) == any(map(math.isnan, values))
    # each stretch of the curve keeps its own least and greatest
    for begin in range(0, len(values), len(values) // 8):
        part = [v for v in values[begin : begin + len(values) // 8] if not math.isnan(v)]
        near = [values[at] for at in kept if begin - len(values) // 8 <= at < begin + len(values) // 4]
        assert max(part) <= max(v for v in near if not math.isnan(v))


def test_short_curve_is_kept_whole():
    assert thinned([1.0, math.nan, 3.0], 8) == [0, 1, 2]


def test_every_series_is_in_one_chart():
    names = ["step", "loss", "loss/code", "eval/loss", "eval/news/loss", "eval/loss/code", "eval/perplexity"]
    names += ["lr", "grad_norm", "tokens_per_s", "tokens_per_s_per_device", "mfu", "memory_gib", "mine"]
    names += ["memory/allocated_gib", "memory/utilization", "goodput", "eval/tasks/arc/acc", "time/step_s"]
    names += ["layers.1.ffn/load_max_over_mean", "norms/weight/layers.0", "interp/layers.0:out/rms"]
    found = {chart.title: mine for chart, mine in charts_of([*names[1:], "tokens", "time"])}
    drawn = [name for mine in found.values() for name in mine]
    assert sorted(drawn) == sorted(names[1:])
    assert found["Loss (nats a token)"] == ["loss", "loss/code"]
    assert found["Validation loss (nats a token)"] == ["eval/loss", "eval/news/loss", "eval/loss/code"]
    assert found["Tasks"] == ["eval/tasks/arc/acc"]


# the page ------------------------------------------------------------------------------------------------


def test_page_holds_curves_events_differences_and_needs_no_network(tmp_path, capsys):
    one = make(tmp_path / "runs" / "one", trained(1.0, validation=1.5), lr=1e-3)
    make(tmp_path / "runs" / "two", trained(2.0, validation=2.5), lr=3e-3)
    ledger = [Line(0, 0.0, 10.0, 0, 12, {"step": 9.0}), Line(1, 15.0, 40.0, 10, 20, {"step": 20.0}, True)]
    (one / "ledger.jsonl").write_text("".join(json.dumps(asdict(line)) + "\n" for line in ledger))
    incident = {"kind": "rollback", "to": 4, "first": 5, "end": 8, "why": "</script><b>bad", "skip": True}
    (one / "incidents.jsonl").write_text(json.dumps(incident) + "\n{")
    event = {"step": 7, "key": "optimizer.lr", "old": 1, "new": 2}
    (one / "history.jsonl").write_text(json.dumps(event) + "\n")
    (one / "plan.json").write_text(json.dumps({"memory": {"peak_gib": 3.0}, "tokens_per_s": 900.0}))
    assert main(["report", str(tmp_path / "runs")]) == 0
    out = tmp_path / "runs" / "report.html"
    assert capsys.readouterr().out.startswith(f"{out}: 2 runs, ")
    text = out.read_text()
    assert text.lower().count("</script>") == 3, "no text of a run ends a script"
    for address in ("http://", "https://"):
        place = text.replace("http://www.w3.org", "").find(address)
        assert place < 0 or 'src="' not in text[place - 10 : place], text[place - 50 : place + 80]
    assert 'src="' not in text and "@import" not in text and "@@" not in text and "url(" not in text
    assert "The MIT License" in text and "Leon Sorokin" in text, "it goes with every copy of uPlot"
    facts = facts_of(text)
    assert [run["name"] for run in facts["runs"]] == ["one", "two"]
    assert facts["differences"] == [["optimizer.lr", "1, 2 from step 7", "0.003"]]
    marks = facts["runs"][0]["marks"]
    assert marks == [
        [5, "rollback", "steps 5 to 7: </script><b>bad; back to step 4 without their data"],
        [7, "change", "optimizer.lr: 1 -> 2"],
        [10, "start", "went on from step 10; 2 steps were done again"],
    ]
    assert facts["runs"][1]["marks"] == [] and facts["runs"][1]["plan"] == []
    assert facts["runs"][0]["plan"] == [["memory.peak_gib", "3.0", ""], ["tokens_per_s", "900.0", "1001"]]
    assert facts["runs"][0]["last"]["eval/loss"] == [20, 1.5]
    loss = next(chart for chart in facts["charts"] if chart["title"].startswith("Loss"))
    assert [curve["run"] for curve in loss["curves"]] == [0, 1]
    assert loss["curves"][1]["x"] == list(range(1, 21)) and loss["curves"][1]["y"][-1] == 2
    assert facts["runs"][0]["axes"]["tokens"][-1] == 20 * 256
    assert main(["report", str(one), "--out", str(tmp_path / "x.html")]) == 0
    assert facts_of((tmp_path / "x.html").read_text())["title"] == "one"


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    records = [{"step": s, "loss": None if s == 3 else 1.0 / s} for s in range(1, 6)]
    facts = facts_of(page([make(tmp_path / "a", records)], tmp_path))
    assert facts["charts"][0]["curves"][0]["y"] == [1, 0.5, None, 0.25, 0.2]


def test_counts_that_are_not_finite_do_not_spoil_the_page(tmp_path):
    records = [{"step": s, "tokens": None, "time": None, "loss": 1.0} for s in range(1, 6)]
    facts = facts_of(page([make(tmp_path / "a", records)], tmp_path))
    assert facts["runs"][0]["axes"] == {"step": [], "tokens": []}


def test_run_that_is_named_twice_counts_once(tmp_path, monkeypatch):
    run = make(tmp_path / "a", trained(1.0))
    monkeypatch.chdir(tmp_path)
    assert find_runs([run, tmp_path, Path("a")]) == [run]


def test_run_without_metrics_has_a_page(tmp_path):
    run = make(tmp_path / "a")
    (run / "metrics.jsonl").unlink()
    facts = facts_of(page([run], tmp_path))
    assert facts["charts"] == [] and facts["runs"][0]["step"] == 0


def test_checkpoints_are_linked_from_where_the_page_lies(tmp_path):
    run = make(tmp_path / "runs" / "a", trained(1.0))
    (run / "checkpoints" / "step-000000020").mkdir(parents=True)
    facts = facts_of(page([run], tmp_path))
    [[step, path]] = facts["runs"][0]["checkpoints"]
    assert step == 20 and (tmp_path / path).is_dir()


@pytest.mark.parametrize("command", ["report", "compare"])
def test_what_is_no_run_is_refused(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 78
    assert "is no run and no folder of runs" in capsys.readouterr().err
    make(tmp_path / "bad")
    (tmp_path / "bad" / "config.toml").write_text("[")
    assert main([command, str(tmp_path)]) == 78
    assert "cannot be used" in capsys.readouterr().err
    run = make(tmp_path / "good" / "a", trained(1.0))
    flags = ["--out"] if command == "report" else ["--csv"]
    assert main([command, str(run), *flags, str(tmp_path / "none" / "x")]) == 78
    assert "cannot be written" in capsys.readouterr().err


def hundred_thousand(path):
    """As many logged steps as a long run has, with 28 numbers each."""
    draw = random.Random(0)
    names = [f"norms/grad/layers.{n}" for n in range(12)] + [f"time/part{n}_s" for n in range(8)]
    rest = ", ".join(f'"{name}": %.15f' for name in names)
    with path.open("w") as file:
        for step in range(1, 100_001):
            noise = draw.random()
            file.write(
                f'{{"step": {step}, "tokens": {step * 4096}, "loss": {2 + 800 / (100 + step) + noise / 10}, '
                f'"grad_norm": {0.3 + noise}, "lr": 1e-3, "tokens_per_s": {1e5 + noise}, "goodput": 0.97, '
                f'{rest % ((noise,) * len(names))}, "time": {1e9 + step}}}\n'
            )


def test_hundred_thousand_steps_make_a_small_page_in_time(tmp_path):
    run = make(tmp_path / "a")
    hundred_thousand(run / "metrics.jsonl")
    begin = time.process_time()
    assert main(["report", str(run)]) == 0
    took_s = time.process_time() - begin
    text = (run / "report.html").read_text()
    assert len(text.encode()) < 5e6 and took_s < 10
    facts = facts_of(text)
    loss = next(chart for chart in facts["charts"] if chart["title"].startswith("Loss"))["curves"][0]
    assert loss["x"][0] == 1 and loss["x"][-1] == 100_000 and len(loss["x"]) > 500


# the table -----------------------------------------------------------------------------------------------


def table_of(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_seeds_are_one_row_with_mean_and_deviation_and_the_best_comes_first(tmp_path, capsys):
    found = {0: 2.0, 1: 2.2, 2: 2.7}
    for seed, loss in found.items():
        make(tmp_path / f"adamw-{seed}", trained(1.0, validation=loss), seed=seed)
    make(tmp_path / "muon", trained(1.0, validation=1.75), optimizer="muon", lr=2e-2)
    make(tmp_path / "young", trained(1.0), lr=5e-4)
    out = tmp_path / "table.csv"
    assert main(["compare", str(tmp_path), "--csv", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["runs", "n", "validation", "loss", "tokens", "tokens/s", "optimizer", "lr"]
    mean, deviation = statistics.fmean(found.values()), statistics.stdev(found.values())
    assert lines[1].startswith("muon ") and "1.7500" in lines[1]
    assert lines[2].startswith("adamw-0 and 2 more") and f"{mean:.4f} ± {deviation:.4f}" in lines[2]
    assert lines[3].startswith("young ") and lines[3].split()[2] == "-"
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["runs"] for row in rows] == ["muon", "adamw-0 adamw-1 adamw-2", "young"]
    assert float(rows[1]["validation"]) == pytest.approx(mean, rel=1e-15)
    assert float(rows[1]["validation_deviation"]) == pytest.approx(deviation, rel=1e-15)
    assert rows[0]["validation_deviation"] == "" and rows[2]["validation"] == ""
    assert rows[0]["optimizer.type"] == "muon" and float(rows[0]["speed"]) == 1000.0
    assert "job.seed" not in rows[0] and rows[0]["tokens"] == str(20.0 * 256)
    assert "model.dim" not in rows[0], "all runs have the same"


def test_keys_that_are_given_group_the_runs(tmp_path, capsys):
    make(tmp_path / "a", trained(1.0, validation=2.0), dim=32, lr=1e-3)
    make(tmp_path / "b", trained(1.0, validation=3.0), dim=32, lr=2e-3)
    make(tmp_path / "c", trained(1.0, validation=1.0), dim=64, lr=1e-3)
    assert main(["compare", str(tmp_path), "--by", "model.dim"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "dim" and len(lines) == 3
    assert lines[1].startswith("c ") and lines[1].split()[-1] == "64"
    assert lines[2].startswith("a and 1 more") and "2.5000 ± 0.7071" in lines[2]
    assert main(["compare", str(tmp_path), "--by", "model.dims"]) == 78
    assert "no run has this key; near it: model.dim" in capsys.readouterr().err


def test_losses_after_other_numbers_of_tokens_are_said_not_to_compare(tmp_path, capsys):
    make(tmp_path / "a", trained(1.0, validation=2.0))
    make(tmp_path / "b", trained(1.0, validation=3.0), lr=1.0)
    assert main(["compare", str(tmp_path)]) == 0
    assert "do not compare" not in capsys.readouterr().out
    make(tmp_path / "c", trained(1.0, steps=40, validation=3.0), lr=2.0)
    assert main(["compare", str(tmp_path)]) == 0
    assert "losses are of 5.12 k to 10.2 k tokens" in capsys.readouterr().out


def test_loss_of_training_is_the_mean_of_the_last_tenth(tmp_path, capsys):
    records = [{"step": s, "tokens": s, "loss": 10.0 if s <= 90 else float(s % 2)} for s in range(1, 101)]
    make(tmp_path / "a", [*records, {"step": 101, "tokens": 101, "loss": None}])
    assert main(["compare", str(tmp_path / "a")]) == 0
    assert "0.5000" in capsys.readouterr().out


def test_run_whose_key_was_changed_is_no_repetition(tmp_path, capsys):
    make(tmp_path / "a", trained(1.0, validation=2.0), lr=1e-4, seed=1)
    changed = make(tmp_path / "b", trained(1.0, validation=3.0), lr=1e-4, seed=2)
    events = [
        {"step": 5, "key": "optimizer.lr", "old": 0.003, "new": 0.01},
        {"step": 9, "key": "optimizer.lr", "old": 0.01, "new": 0.0001},
    ]
    (changed / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["compare", str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "two rows"
    with (tmp_path / "t.csv").open() as file:
        found = {row["runs"]: row["optimizer.lr"] for row in csv.DictReader(file)}
    assert found == {"a": "0.0001", "b": "0.003, 0.01 from step 5, 0.0001 from step 9"}


def test_run_that_diverged_comes_behind_the_others(tmp_path, capsys):
    gone = [*trained(1.0, validation=1.0), {"step": 21, "loss": None}, {"step": 21, "eval/loss": None}]
    make(tmp_path / "a", [*gone, *({"step": step, "loss": None} for step in range(22, 41))], lr=1.0)
    make(tmp_path / "b", trained(3.0, validation=4.0))
    make(tmp_path / "c", trained(3.0), lr=2.0)
    assert main(["compare", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines[1:4]] == [
        ["b", "4.0000", "3.5000"],
        ["a", "nan", "nan"],
        ["c", "-", "3.5000"],
    ]


def test_row_says_how_many_of_its_runs_were_evaluated(tmp_path, capsys):
    make(tmp_path / "a", trained(1.0, validation=2.0), seed=1)
    make(tmp_path / "b", trained(1.0), seed=2)
    assert main(["compare", str(tmp_path)]) == 0
    assert "a: the validation loss is that of 1 of 2 runs" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["@@DATA@@", "@@STYLE@@", os.fsdecode(b"\xff\xfe")])
def test_name_of_a_folder_does_not_spoil_the_page(tmp_path, name):
    run = make(tmp_path / "x" / "run", trained(2.0)).rename(tmp_path / "x" / name)
    assert main(["report", str(run)]) == 0
    assert len(facts_of((run / "report.html").read_text())["charts"]) > 1


def test_integers_that_no_float_holds_are_gaps(tmp_path):
    run = make(tmp_path / "a", [*trained(2.0), {"step": 21, "loss": 10**400}, {"step": 10**30, "loss": 1.0}])
    assert read_metrics(run / "metrics.jsonl")["loss"].values[-1] == math.inf
    assert facts_of(page([run], tmp_path))["runs"][0]["step"] == 21


def test_names_tell_runs_apart(tmp_path):
    paths = [tmp_path / "x" / "a", tmp_path / "y" / "a", tmp_path / "y" / "b"]
    assert names_of(paths) == ["x/a", "y/a", "y/b"]
    assert names_of(paths[1:]) == ["a", "b"]


def test_configuration_is_flat_and_places_do_not_count(tmp_path):
    one = config_of(make(tmp_path / "a"))
    two = config_of(make(tmp_path / "b", seed=1))
    assert one["data.sources.0.type"] == "files" and one["optimizer.lr"] == 1e-3
    assert differing([one, two]) == ["job.seed"]
    with pytest.raises(ConfigError):
        config_of(tmp_path)


def test_marks_of_a_run_without_any(tmp_path):
    assert marks_of(make(tmp_path / "a")) == []
