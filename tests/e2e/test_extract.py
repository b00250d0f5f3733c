"""`forge extract`: twelve checkpoints by one command, equal to recordings and to captures by hand."""

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
