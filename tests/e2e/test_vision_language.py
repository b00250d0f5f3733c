"""A vision-language model in the real command: killed, resumed, on several ranks, asked about an image."""

import io
import signal

import pytest
from runs import losses, state

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


@pytest.mark.parametrize("fusion", [name for name in FUSIONS if name != "spans"])
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
    "cp2": ("--mesh.cp=2", "--context_parallel.method=ulysses"),
}
TOGETHER = {
    "joint": ("fsdp2", "tp2-sequence", "pp2", "cp2"),
    "spans": ("tp2-sequence", "cp2"),
    "cross-attention": ("fsdp2", "tp2", "pp2", "cp2"),
    "mixture-of-transformers": ("fsdp2", "tp2", "pp2"),
}


def runs_of(fusion, layout):
    """tests/distributed/test_fusions.py has these in float64, much quicker."""
    quick = fusion in ("joint", "spans") or layout == "pp2"
    return pytest.param(fusion, layout, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(
    ("fusion", "layout"), [runs_of(fusion, layout) for fusion, some in TOGETHER.items() for layout in some]
)
def test_ranks_train_as_one_process(forge, seeing, tmp_path, layout, fusion):
    forge("train", seeing(root="one", name="one.toml", steps=5, fusion=fusion))
    forge("train", seeing(steps=5, fusion=fusion), *LAYOUTS[layout], ranks=2)
    one, two = (losses(tmp_path / root / "tiny") for root in ("one", "runs"))
    assert two == pytest.approx(one, rel=0, abs=3e-5)


REFUSED = (
    ("spans", ("--mesh.cp=2",), 'method = "ulysses"'),
    ("cross-attention", ("--mesh.tp=2",), "tensor_parallel.sequence = false"),
    ("cross-attention", ("--mesh.tp=2", "--mesh.pp=2"), "tensor_parallel.sequence = false"),
    ("cross-attention", ("--mesh.pp=2", "--mesh.cp=2"), "mesh.cp = 1"),
    ("mixture-of-transformers", ("--mesh.tp=2",), "tensor_parallel.sequence = false"),
    ("mixture-of-transformers", ("--mesh.cp=2",), "mesh.cp = 1"),
)


@pytest.mark.parametrize(("fusion", "options", "said"), REFUSED)
def test_layouts_that_compute_something_else_are_refused_before_a_group_exists(
    forge, seeing, fusion, options, said
):
    refused = forge("train", seeing(fusion=fusion), *options, check=False)
    assert refused.returncode == 78 and said in refused.stderr


@pytest.mark.parametrize("fusion", [name for name in FUSIONS if name != "spans"])
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
    refused = forge("export", run, tmp_path / "hf", check=False)
    assert refused.returncode == 78 and "no form in Hugging Face" in refused.stderr
    assert "loss" in forge("eval", run).stdout
