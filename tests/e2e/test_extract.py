"""`forge extract`: twelve checkpoints by one command, equal to recordings and to captures by hand."""

import pytest
import torch
from forge_interp import ActivationStore, capture
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job

SITES = ["layers.*:out", "layers.0.attention:attn.z"]


def test_series_is_what_the_hook_recorded_and_what_a_capture_sees(forge, tiny, tmp_path):
    job, run, out = tiny(steps=12), tmp_path / "runs" / "tiny", tmp_path / "acts"
    hook = "{ seen = { type = 'record', every_steps = 1, samples = 4, sites = ['layers.*:out'] } }"
    forge("train", job, "--checkpoint.every_steps=1", "--checkpoint.keep=20", f"--hooks={hook}")
    command = ["extract", run, out, "--step", "all", "--samples", "4", "--sites", *SITES]
    said = forge(*command).stdout
    stores = {int(path.name[-8:]): ActivationStore.open(path) for path in sorted(out.iterdir())}
    assert list(stores) == list(range(1, 13)) and said.count(": 128 rows of ") == 12
    for step, store in stores.items():
        recorded = ActivationStore.open(run / "activations" / f"step-{step:08d}")
        assert recorded.token_id.equal(store.token_id)
        for site in recorded.sites:
            assert recorded[site].equal(store[site]), (step, site)
    model, _ = load_model(read_job(run), step=5)
    tokens = stores[5].token_id.view(4, -1)
    with torch.no_grad(), capture(model, SITES) as seen:
        model(tokens)
    z = seen["layers.0.attention:attn.z"].transpose(1, 2).flatten(0, 1)
    assert torch.allclose(stores[5]["layers.0.attention:attn.z"].reshape(z.shape), z, atol=1e-6)
    assert torch.allclose(stores[5]["layers.1:out"], seen["layers.1:out"].flatten(0, 1), atol=1e-6)
    assert not stores[12]["layers.1:out"].equal(stores[1]["layers.1:out"])

    written = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("part-*"))}
    forge(*command)
    assert {path: path.stat().st_mtime_ns for path in sorted(out.rglob("part-*"))} == written

    for wrong, needle in (
        (["--sites", "layer.*"], "layers"),
        (["--sites", *SITES, "--samples", "3"], "other"),
        (["--sites", *SITES, "--step", "40"], "no such checkpoint"),
    ):
        refused = forge("extract", run, out / "step-00000005", "--step", "5", *wrong, check=False)
        assert refused.returncode == 78 and needle in refused.stderr, refused.stderr
    assert {path: path.stat().st_mtime_ns for path in sorted(out.rglob("part-*"))} == written


def test_published_model_is_extracted_from_text(forge, tiny, tmp_path):
    job, run, text = tiny(steps=4), tmp_path / "runs" / "tiny", tmp_path / "own.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    forge("train", job)
    own, means = tmp_path / "own", tmp_path / "means"
    forge("extract", run, own, "--sites", "layers.*:out", "--text", text, "--samples", "3")
    forge(
        "extract", run, means, "--sites", "layers.1:out", "--text", text, "--samples", "3", "--pool", "mean"
    )
    rows = ActivationStore.open(own)
    pooled = ActivationStore.open(means)["layers.1:out"]
    assert len(pooled) == int(rows.sample_id.max()) + 1
    assert torch.allclose(pooled[0], rows["layers.1:out"][rows.sample_id == 0].mean(0), atol=1e-5)
    assert bytes(rows.token_id[rows.sample_id == 0][:9].tolist()) == b"def f(x):"


def test_padding_has_no_rows_and_is_in_no_mean(forge, tiny, tmp_path):
    job, run, text = tiny(steps=1), tmp_path / "runs" / "tiny", tmp_path / "own.txt"
    text.write_text("shorter than a sequence")
    forge("train", job, "--schedule.warmup_steps=0")
    rows, means = tmp_path / "rows", tmp_path / "means"
    forge("extract", run, rows, "--sites", "layers.*:out", "--text", text)
    forge("extract", run, means, "--sites", "layers.*:out", "--text", text, "--pool", "mean")
    ids = [*text.read_bytes(), 256]
    store, pooled = ActivationStore.open(rows), ActivationStore.open(means)
    assert store.token_id.tolist() == ids and store.position.tolist() == list(range(len(ids)))
    model, _ = load_model(read_job(run))
    with torch.no_grad(), capture(model, "layers.*:out") as seen:
        model(torch.tensor([ids]))
    for site in store.sites:
        assert torch.allclose(store[site], seen[site][0], atol=1e-6)
        assert torch.allclose(pooled[site], seen[site].mean(1), atol=1e-6)


@pytest.mark.parametrize(
    "experts",
    [pytest.param("capacity_factor = 1.0", marks=pytest.mark.slow), "router = { type = 'expert_choice' }"],
)
def test_experts_that_padding_takes_places_of_are_extracted_as_the_run_computes_them(
    forge, tiny, tmp_path, experts
):
    job, run, text = tiny(steps=1), tmp_path / "runs" / "tiny", tmp_path / "own.txt"
    text.write_text("shorter than a sequence")
    hook = "{ seen = { type = 'record', every_steps = 1, samples = 2 } }"
    experts = f"{{ type = 'moe', num_experts = 4, top_k = 2, dim = 16, {experts} }}"
    keys = ["--schedule.warmup_steps=0", "--data.packing=pad", f"--hooks={hook}", f"--model.ffn={experts}"]
    forge("train", job, *keys)
    forge("extract", run, tmp_path / "rows", "--sites", "layers.*:out", "--text", text)
    assert ActivationStore.open(tmp_path / "rows").rows == 24


def test_folder_of_other_things_and_a_length_that_is_not_used_are_refused(forge, tiny, tmp_path):
    job, run = tiny(steps=1), tmp_path / "runs" / "tiny"
    forge("train", job, "--schedule.warmup_steps=0")
    before = sorted(run.iterdir())
    for out, more, needle in (
        (run, [], "holds PROGRESS, checkpoints"),
        (run, ["--step", "all"], "holds PROGRESS, checkpoints"),
        (tmp_path / "new", ["--max-tokens", "8"], "data.max_tokens"),
    ):
        refused = forge("extract", run, out, "--sites", "layers.0:out", *more, check=False)
        assert refused.returncode == 78 and needle in refused.stderr, refused.stderr
    assert sorted(run.iterdir()) == before and not (tmp_path / "new").exists()
