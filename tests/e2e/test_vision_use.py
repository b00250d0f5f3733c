"""What one does with a vision-language run: asked, evaluated, recorded and shown by the real command."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forge_data.loading.loader import build_loader
from forge_trainer.run_dir.files import read_job
from seeing import FUSIONS, image

EACH = [
    pytest.param(name, marks=[] if name == "cross-attention" else [pytest.mark.slow])
    for name in FUSIONS
    if name != "spans"
]


@pytest.mark.slow
def test_first_commands_of_the_page_run(forge, tmp_path):
    root = Path(__file__).parents[2]
    page = (root / "docs" / "vision.md").read_text()
    block = page.split("```console\n")[1].partition("```")[0]
    train, ask = (shlex.split(line.removeprefix("$ uv run forge ")) for line in block.splitlines())
    (tmp_path / "configs").symlink_to(root / "configs")
    image("red", tmp_path)
    forge(*train, "--train.steps=3", "--schedule.warmup_steps=1", "--data.validation_samples=8", cwd=tmp_path)
    assert forge(*ask, cwd=tmp_path).stdout.startswith("colour?")


RECORD = """
[hooks.inside]
type = "record"
every_steps = 3
samples = 3
sites = ["decoder.layers.*:out"]
keep = ["image_index"]
"""


def test_activations_are_recorded_with_the_modality_of_each_row(forge, seeing, tmp_path):
    interp = pytest.importorskip("forge_interp")
    from forge_data import build_loader
    from forge_trainer.commands.evaluate import load_model
    from forge_trainer.run_dir.files import read_job
    from msgspec.structs import replace

    path = seeing(steps=3)
    path.write_text(path.read_text() + RECORD)
    forge("train", path)
    run = tmp_path / "runs" / "tiny"
    store = interp.ActivationStore.open(run / "activations" / "step-00000003")
    job = read_job(run)
    model, _ = load_model(job)
    data = replace(job.data, validation_samples=3)
    expected, places = [], []
    for (micro,) in build_loader(data, "validation", micro_batch=1, items=job.model.items()):
        inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
        with torch.no_grad(), interp.capture(model, ["decoder.layers.*"]) as acts:
            model(**inputs)
        ids, labels = micro.inputs["doc_ids"][0], micro.inputs["labels"][0]
        real = (ids < ids[-1]) | (labels[ids == ids[-1]] >= 0).any()  # padding is a document without targets
        expected.append(acts["decoder.layers.1"][0][real])
        places.append(micro.inputs["image_index"][0][real])
    assert store.rows < 3 * job.data.max_tokens
    torch.testing.assert_close(store["decoder.layers.1"], torch.cat(expected), rtol=0, atol=1e-5)
    assert store.kept("image_index").equal(torch.cat(places)) and (store.kept("image_index") > 0).any()
    with torch.no_grad(), interp.edit(model, {"decoder.layers.0": lambda value: value * 0}):
        changed = model(**inputs)
    assert not changed.equal(model(**inputs)), "edits reach the decoder of a composed model"


def test_what_a_step_of_a_run_with_images_read_is_shown(forge, seeing, tmp_path):
    path = seeing(steps=3)
    forge("train", path)
    run = tmp_path / "runs" / "tiny"
    said = forge("sample", run, "--step=2", "--limit=3").stdout
    assert said.count("-- step 2, sequence ") == 3 and "source 0" in said and "?" in said
    job = read_job(run)
    given = {"micro_batch": 8, "global_batch": 8, "steps": 3, "items": job.model.items()}
    third = next(itertools.islice(build_loader(job.data, "train", **given), 2, None))[0].inputs["labels"]
    shown = forge("sample", run, "--step=2").stdout.split("-- step 2, sequence ")[1:]
    targets = [int(re.search(r", (\d+) targets", one)[1]) for one in shown]
    assert targets == (third >= 0).sum(1).tolist()
    code = "import sys; from forge_data.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "sample", str(run / "config.toml"), "--step=2"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "`forge sample`" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("fusion", EACH)
def test_run_answers_about_an_image_and_says_what_it_cannot(forge, seeing, tmp_path, fusion):
    forge("train", seeing(steps=3, fusion=fusion))
    run, red = tmp_path / "runs" / "tiny", image("red", tmp_path)
    greedy = ("--temperature=0", "--max-new-tokens=8", "--prompt", "colour? ")
    answers = {
        forge("generate", run, "--image", file, *greedy).stdout
        for file in (red, image("blue", tmp_path), red)
    }
    assert all("colour?" in answer for answer in answers)
    two = ("--image", red, "--image", red, "--max-new-tokens=2", "--prompt", "<image>and<image>?")
    assert "and" in forge("generate", run, *two).stdout
    assert forge("generate", run, "--prompt", "text alone", "--max-new-tokens=2").stdout.startswith("text")
    for given, said in (
        (("--image", red, "--prompt", "<image><image>"), "1 images, and a text with 2 marks"),
        (("--image", tmp_path / "none.png", "--prompt", "a"), "cannot be read"),
        (("--image", tmp_path / "job.toml", "--prompt", "a"), "no image"),
        (("--image", red, "--prompt", "x" * 96), "leaves no room"),
    ):
        refused = forge("generate", run, *given, check=False)
        assert refused.returncode == 78 and said in refused.stderr, refused.stderr
    rows = [
        ("colour? ", [red]),
        ("no image at all", []),
        ("<image>is it<image>?", [image("blue", tmp_path), red]),
    ]
    lines = [json.dumps({"prompt": text, "images": [file.name for file in files]}) for text, files in rows]
    (tmp_path / "asked.jsonl").write_text("".join(f"{line}\n" for line in lines))
    batch = ("--prompts", tmp_path / "asked.jsonl", "--batch-size=3", "--temperature=0", "--max-new-tokens=8")
    told = [json.loads(line)["text"] for line in forge("generate", run, *batch).stdout.splitlines()]
    for (text, files), answer in zip(rows, told, strict=True):
        alone = [part for file in files for part in ("--image", file)]
        whole = forge("generate", run, *alone, *greedy[:2], "--prompt", text).stdout
        assert whole.rstrip("\n").endswith(answer), (whole, answer)
    assert "a folder of Forge's own" in forge("export", run, tmp_path / "own").stdout
    assert "answers" in forge("eval", run).stdout


@pytest.mark.slow
def test_controls_ask_right_images_as_an_evaluation_does_and_others_too(forge, seeing, tmp_path):
    forge("train", seeing(steps=200), "--eval.every_steps=200")
    run, script = tmp_path / "runs" / "tiny", Path(__file__).parents[2] / "benchmarks" / "vlm_controls.py"
    command = [sys.executable, script, run, "--samples=24"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=forge.environment)
    found = json.loads(told.stdout)
    answers = re.search(r" answers (\S+)", forge("eval", run).stdout)[1]
    assert found["samples"] == 24 and found["right"] == pytest.approx(float(answers), abs=1e-4)
    assert found["right"] > 0 and {found["blank"], found["shuffled"]} != {found["right"]}
