"""A vision-language model in the real command: killed, resumed, on several ranks, asked about an image."""

import io
import json
import signal

import pytest
import torch
from forge_ckpt.store import Store
from runs import losses, records, state

JOB = """
[job]
name = "tiny"
root = "{root}"

[model]
type = "vision-language"
decoder = {{ vocab_size = 272, max_tokens = 96, dim = 32, num_layers = 2, attention = {{ num_heads = 2 }} }}
encoder = {{ image_size = 16, patch_size = 8, dim = 16, num_heads = 2 }}
fusion = {fusion}

[data]
max_tokens = 96
mask_documents = true
cache_dir = "{cache}"

[[data.sources]]
type = "shapes"
samples = 400
held_out = 24

[train]
steps = {steps}
global_batch = 8
micro_batch = 2
log_every_steps = 1

[optimizer]
type = "adamw"
lr = 1e-2
eps = 1e-5

[schedule]
type = "cosine"
warmup_steps = 2

[step]
answers = true

[eval]
every_steps = 4

[checkpoint]
every_steps = 3
"""


FUSIONS = {
    "joint": "{}",
    "spans": '{ attention = "image" }',
    "cross-attention": '{ type = "cross-attention", layers = ":", max_visual_tokens = 32, gate_init = 0.5 }',
    "mixture-of-transformers": '{ type = "mixture-of-transformers" }',
    "moma": '{ type = "moma", experts = { text = 2, image = 2 } }',
    "moma-threshold": '{ type = "moma", routing = "threshold" }',
}


@pytest.fixture
def seeing(tmp_path):
    def write(steps=8, name="job.toml", root="runs", fusion="joint"):
        path = tmp_path / name
        given = {"root": tmp_path / root, "cache": tmp_path / "cache", "fusion": FUSIONS[fusion]}
        path.write_text(JOB.format(steps=steps, **given))
        return path

    return write


def image(colour, folder):
    """The file of an image of one large square."""
    from forge_vlm.sources.shapes import Scene, rendered
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rendered(Scene(colour, "square", "large", (0,)), 16)).save(file, "png")
    (folder / f"{colour}.png").write_bytes(file.getvalue())
    return folder / f"{colour}.png"


EACH = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "moma-threshold" else [])
    for name in FUSIONS
    if name != "spans"
]


@pytest.mark.parametrize("fusion", EACH)
def test_run_with_images_goes_on_after_a_kill(forge, seeing, tmp_path, fusion):
    forge("train", seeing(root="whole", name="whole.toml", fusion=fusion), "--data.workers=1")
    path = seeing(fusion=fusion)
    assert forge.stop_at(path, 5, signal.SIGKILL, 1) == -signal.SIGKILL
    forge("train", path)
    assert state(tmp_path / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")


LAYOUTS = {
    "fsdp2": (),
    "tp2": ("--mesh.tp=2", "--tensor_parallel.sequence=false"),
    "tp2-sequence": ("--mesh.tp=2",),
    "pp2": ("--mesh.pp=2",),
    "ep2": ("--mesh.ep=2",),
    "cp2": ("--mesh.cp=2", "--context_parallel.method=ulysses"),
}
TOGETHER = {
    "joint": ("fsdp2", "tp2-sequence", "pp2", "cp2"),
    "spans": ("tp2-sequence", "cp2"),
    "cross-attention": ("fsdp2", "tp2", "pp2", "cp2"),
    "mixture-of-transformers": ("fsdp2", "tp2", "pp2"),
    "moma": ("fsdp2", "tp2", "pp2", "ep2"),
}


def runs_of(fusion, layout):
    """tests/distributed/test_fusions.py has these in float64, much quicker."""
    quick = fusion in ("joint", "spans") or layout in ("pp2", "ep2")
    return pytest.param(fusion, layout, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(
    ("fusion", "layout"), [runs_of(fusion, layout) for fusion, some in TOGETHER.items() for layout in some]
)
def test_ranks_train_as_one_process(forge, seeing, tmp_path, layout, fusion):
    options = (*LAYOUTS[layout], *(["--step.answers=false"] if layout == "cp2" else []))
    forge("train", seeing(root="one", name="one.toml", steps=5, fusion=fusion))
    forge("train", seeing(steps=5, fusion=fusion), *options, ranks=2)
    one, two = (losses(tmp_path / root / "tiny") for root in ("one", "runs"))
    assert two == pytest.approx(one, rel=0, abs=3e-5)
    told = [records(tmp_path / root / "tiny")[-1].get("eval/accuracy") for root in ("one", "runs")]
    assert layout == "cp2" or told[0] == pytest.approx(told[1], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["moma", "moma-threshold"])
def test_run_goes_on_under_other_layouts(forge, seeing, tmp_path, fusion):
    forge("train", seeing(root="whole", name="whole.toml", steps=16, fusion=fusion))
    path = seeing(steps=16, fusion=fusion)
    for step, layout in ((3, "ep2"), (7, "pp2"), (10, "tp2")):
        forge.stop_at(path, step, signal.SIGTERM, 2, *LAYOUTS[layout])
    forge("train", path)
    whole, parts = (losses(tmp_path / root / "tiny") for root in ("whole", "runs"))
    assert parts == pytest.approx(whole, rel=0, abs=1e-4)


def test_answers_are_not_counted_where_documents_are_cut(forge, seeing):
    refused = forge("train", seeing(), "--mesh.cp=2", ranks=2, check=False)
    assert "step.answers = true counts documents" in refused.stderr


REFUSED = (
    ("spans", ("--mesh.cp=2",), 'method = "ulysses"'),
    ("cross-attention", ("--mesh.tp=2",), "tensor_parallel.sequence = false"),
    ("cross-attention", ("--mesh.tp=2", "--mesh.pp=2"), "tensor_parallel.sequence = false"),
    ("cross-attention", ("--mesh.pp=2", "--mesh.cp=2"), "mesh.cp = 1"),
    ("mixture-of-transformers", ("--mesh.tp=2",), "tensor_parallel.sequence = false"),
    ("mixture-of-transformers", ("--mesh.cp=2",), "mesh.cp = 1"),
    ("moma", ("--mesh.tp=2",), "tensor_parallel.sequence = false"),
    ("moma", ("--mesh.cp=2",), "mesh.cp = 1"),
    ("moma", ("--mesh.ep=4",), "does not divide the experts of every layer: layer 0 text has 2"),
)


@pytest.mark.parametrize(("fusion", "options", "said"), REFUSED)
def test_layouts_that_compute_something_else_are_refused_before_a_group_exists(
    forge, seeing, fusion, options, said
):
    refused = forge("train", seeing(fusion=fusion), *options, check=False)
    assert refused.returncode == 78 and said in refused.stderr


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
    refused = forge("export", run, tmp_path / "hf", check=False)
    assert refused.returncode == 78 and "no form in Hugging Face" in refused.stderr
    assert "answers" in forge("eval", run).stdout


STAGES = """
[[optimizer.groups]]
match = ["encoder"]
freeze_from = 0
[[optimizer.groups]]
match = ["decoder"]
stages = [{ frozen = true }, { from_step = 3, lr = 0.5, warmup_steps = 2 }]
"""


def weights(run, step):
    store = Store(run / "checkpoints")
    return {
        key.removeprefix("model."): value
        for key, value in store.tensors(step).items()
        if key.startswith("model.")
    }


LAYOUTS_OF_STAGES = {"one": (1, ()), "fsdp2": (2, ()), "pp2": (2, ("--mesh.pp=2",))}


@pytest.mark.parametrize("layout", LAYOUTS_OF_STAGES)
def test_what_a_stage_trains_moves_and_nothing_else_across_a_kill_at_the_boundary(
    forge, seeing, tmp_path, layout
):
    ranks, options = LAYOUTS_OF_STAGES[layout]
    paths = [seeing(steps=6, root=root, name=f"{root}.toml") for root in ("whole", "runs")]
    for path in paths:
        path.write_text(path.read_text() + STAGES)
    keep = ("--checkpoint.keep=5", "--checkpoint.every_steps=1", *options)
    forge("train", paths[0], *keep, ranks=ranks)
    run = tmp_path / "whole" / "tiny"
    first, boundary, last = (weights(run, step) for step in (2, 3, 6))
    for name, value in first.items():
        moved = not torch.equal(value, boundary[name]), not torch.equal(boundary[name], last[name])
        part = name.partition(".")[0]
        expected = {"encoder": (False, False), "connector": (True, True), "decoder": (False, True)}[part]
        assert moved == expected, name
    assert forge.stop_at(paths[1], 3, signal.SIGKILL, ranks, *keep)
    forge("train", paths[1], *keep, ranks=ranks)
    assert state(tmp_path / "runs" / "tiny") == state(run)


def test_pipeline_with_a_stage_that_is_frozen_for_ever_trains_as_one_process(forge, seeing, tmp_path):
    frozen = '--optimizer.groups=[{match=["decoder"],freeze_from=0}]'
    forge("train", seeing(root="one", name="one.toml", steps=4), frozen)
    forge("train", seeing(steps=4), frozen, "--mesh.pp=2", ranks=2)
    one, two = (losses(tmp_path / root / "tiny") for root in ("one", "runs"))
    assert two == pytest.approx(one, rel=0, abs=3e-5) and one[0] != one[-1]


def test_run_of_text_alone_leaves_the_tower_out_of_the_optimizer_and_says_so(forge, seeing, tmp_path):
    path = seeing(steps=3)
    (tmp_path / "book.txt").write_text("some text of a book. " * 400)
    source = f'type = "files"\npaths = ["{tmp_path}/book.txt"]\nheld_out = 0\n'
    text = path.read_text().replace('type = "shapes"\nsamples = 400\nheld_out = 24\n', source)
    path.write_text(text)
    said = forge("train", path).stdout
    assert "frozen     encoder, connector: no source has what they are given" in said
    states = Store(tmp_path / "runs" / "tiny" / "checkpoints").tensors(3)
    assert not [name for name in states if name.startswith("optimizer.") and ".encoder." in name]
    forge("train", path, "--mesh.pp=2", f"--job.root={tmp_path}/two", ranks=2)
    one, two = (losses(tmp_path / root / "tiny") for root in ("runs", "two"))
    assert two == pytest.approx(one, rel=0, abs=3e-5)
