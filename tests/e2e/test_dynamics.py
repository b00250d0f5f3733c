"""`forge dynamics`: the tables of a short run are what a loop over its checkpoints finds."""

import csv

import torch
from forge_interp import Moments, capture, head_scores, linear_cka
from forge_trainer.commands.evaluate import load_model
from forge_trainer.data.probe import probe_of
from forge_trainer.run_dir.files import read_job

STEPS = (0, 3, 6)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_are_what_a_loop_over_checkpoints_finds(forge, tiny, tmp_path):
    job, run, out = tiny(steps=6), tmp_path / "runs" / "tiny", tmp_path / "inside"
    forge("train", job, "--checkpoint.every_steps=3", "--checkpoint.keep=9", "--checkpoint.keep_initial=true")
    command = ["dynamics", run, out, "--samples", "4", "--period", "6"]
    said = forge(*command).stdout
    assert "cka/layers.1:out" in said and f"are in {out}" in said
    rows, scores, job = {}, {}, read_job(run)
    tokens = torch.stack([sample["tokens"] for sample in probe_of(job, 4)])
    for step in STEPS:
        model, _ = load_model(job, step=step)
        scores[step] = head_scores(model.eval(), job.model.vocab_size, 6)
        with torch.no_grad(), capture(model, "layers.*") as acts:
            model(tokens)
        rows[step] = {site: value.flatten(0, 1) for site, value in acts.items()}
    layers, heads = read(out / "layers.csv"), read(out / "heads.csv")
    assert [int(row["step"]) for row in layers] == [int(row["step"]) for row in heads] == list(STEPS)
    for of_layers, of_heads in zip(layers, heads, strict=True):
        step = int(of_layers.pop("step"))
        assert of_layers.keys() == rows[step].keys() and len(of_heads) == 1 + 2 * len(scores[step])
        for site, value in of_layers.items():
            pair = Moments.of({"now": rows[step][site], "end": rows[6][site]}, between=(["now"], ["end"]))
            assert abs(float(value) - linear_cka(pair).values[0, 0]) < 1e-5
        for head, pair in scores[step].items():
            assert abs(float(of_heads[f"induction/{head}"]) - pair[0]) < 1e-6
            assert abs(float(of_heads[f"previous/{head}"]) - pair[1]) < 1e-6
    assert float(layers[0]["layers.1:out"]) < 0.999
    assert all(b"<svg" in (out / f"{name}.svg").read_bytes() for name in ("layers", "heads"))

    written = {path: path.stat().st_mtime_ns for path in out.rglob("part-*")}
    forge(*command)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("part-*")} == written
    refused = forge("dynamics", run, tmp_path / "one", "--step", "3-5", check=False)
    assert refused.returncode == 78 and "1 checkpoints" in refused.stderr
    refused = forge("dynamics", run, tmp_path / "none", "--sites", "layer.*", check=False)
    assert refused.returncode == 78 and "layers" in refused.stderr
