"""A vision-language model in the real command: killed, resumed, on several ranks, asked about an image."""

import io
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forge_ckpt.store import Store
from forge_data.loading.loader import build_loader
from forge_trainer.run_dir import read_job
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


def test_streamed_images_go_on_after_a_kill(forge, seeing, tmp_path):
    for number in range(8):
        rows = [{"image": f"{colour}.png", "text": f"{colour} {number}"} for colour in ("red", "blue")]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for colour in ("red", "blue"):
        image(colour, tmp_path)
    source = f'type = "image-text"\npath = "{tmp_path}/*.jsonl"\nstreaming = true'
    for name, root in (("whole.toml", "whole"), ("job.toml", "runs")):
        path = seeing(root=root, name=name)
        text = path.read_text().replace('type = "shapes"\nsamples = 400\nheld_out = 24', source)
        path.write_text(text.replace("[eval]\nevery_steps = 4", "[eval]\nevery_steps = 0"))
    forge("train", tmp_path / "whole.toml", "--data.workers=1")
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


ALIKE = {
    "compile": ("--compile.enabled=true", "--compile.backend=aot_eager"),
    "recomputed": ("--activation_checkpointing.mode=full",),
    "selective": ("--activation_checkpointing.mode=selective",),
}
"""What changes speed and memory alone; a block that is no single graph is an error (`compile.fullgraph`)."""
EIGHT_BITS = ("--fp8.recipe=rowwise", "--fp8.emulate=true", "--fp8.min_size=16")


@pytest.mark.parametrize(
    "fusion",
    ["joint", *(pytest.param(name, marks=pytest.mark.slow) for name in list(FUSIONS)[2:])],
)
def test_compiled_and_recomputed_blocks_train_alike_and_8_bits_nearly(forge, seeing, tmp_path, fusion):
    found = {}
    for name, options in {"plain": (), **ALIKE, "fp8": EIGHT_BITS}.items():
        forge("train", seeing(steps=4, root=name, name=f"{name}.toml", fusion=fusion), *options)
        found[name] = losses(tmp_path / name / "tiny")
    for name in ALIKE:
        assert found[name] == pytest.approx(found["plain"], rel=0, abs=1e-5)
    assert found["fp8"] != found["plain"]
    assert found["fp8"] == pytest.approx(found["plain"], rel=0, abs=0.05)


@pytest.fixture
def fifth(seeing, tmp_path):
    """Writes the job with the fusion of docs/plugs.md, and that beside it."""
    page = (Path(__file__).parents[2] / "docs" / "plugs.md").read_text()
    code = next(part for part in page.split("```python\n")[1:] if "class MeanConfig(" in part)
    (tmp_path / "my_lab_fusions.py").write_text(code.partition("```")[0])

    def write(**given):
        path = seeing(**given)
        text = path.read_text().replace("fusion = {}", 'fusion = { type = "mean", visual_tokens = 4 }')
        path.write_text(f'imports = ["my_lab_fusions"]\n{text}')
        return path

    return write


def test_fusion_from_outside_learns_and_goes_on_after_a_kill(forge, fifth, tmp_path):
    forge("train", fifth(root="whole", name="whole.toml", steps=12), "--data.workers=1")
    whole = losses(tmp_path / "whole" / "tiny")
    assert whole[-1] < whole[0] - 1
    assert Store(tmp_path / "whole" / "tiny" / "checkpoints").tensors(12)["model.fusion.scale"] != 1
    path = fifth(steps=12)
    assert forge.stop_at(path, 5, signal.SIGKILL, 1) == -signal.SIGKILL
    forge("train", path)
    assert state(tmp_path / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")
    files = [image(colour, tmp_path) for colour in ("red", "blue")]
    asked = [f"--image={file}" for file in files[:1]]
    assert forge("generate", tmp_path / "runs" / "tiny", *asked, "--prompt=colour? ", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp2", marks=pytest.mark.slow),
        "tp2-sequence",
        "pp2",
        pytest.param("cp2", marks=pytest.mark.slow),
    ],
)
def test_fusion_from_outside_trains_alike_on_two_ranks(forge, fifth, tmp_path, layout):
    answers = ["--step.answers=false"] if layout == "cp2" else []
    forge("train", fifth(root="one", name="one.toml", steps=5))
    forge("train", fifth(steps=5), *LAYOUTS[layout], *answers, ranks=2)
    one, two = (losses(tmp_path / root / "tiny") for root in ("one", "runs"))
    assert two == pytest.approx(one, rel=0, abs=3e-5)


SEEN = """
task: seen
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "<image>{{{{question}}}}"
doc_to_image: ["image"]
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["#"], max_gen_toks: 6}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.slow
def test_tasks_of_the_harness_with_images_are_asked_as_generate_is(forge, seeing, tmp_path):
    pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    forge("train", seeing(steps=12))
    run, files = tmp_path / "runs" / "tiny", [image(colour, tmp_path) for colour in ("red", "blue", "green")]
    rows = [{"prompt": "<image>colour? ", "images": [str(file)]} for file in files] * 2
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", tmp_path / "asked.jsonl", "--max-new-tokens", 6, "--temperature", 0)
    written = [json.loads(line)["text"] for line in forge("generate", run, *options).stdout.splitlines()]
    assert len(written) == 6
    (tmp_path / "tasks").mkdir()
    answers = [text if number < 4 else "no such answer" for number, text in enumerate(written)]
    columns = {"question": ["colour? "] * 6, "answer": answers, "image": [str(file) for file in files * 2]}
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "tasks" / "seen.yaml").write_text(SEEN.format(data=tmp_path / "rows.parquet"))
    out = tmp_path / "results.json"
    flags = ("--tasks-from", tmp_path / "tasks", "--json", out, "--batch-size", 4)
    forge("eval", run, "--tasks", "seen", *flags)
    assert json.loads(out.read_text())["seen"]["exact_match,none"] == pytest.approx(4 / 6)
    choice = SEEN.format(data=tmp_path / "rows.parquet").replace("generate_until", "multiple_choice")
    choice = (
        choice.replace("task: seen", 'task: chosen\ndoc_to_choice: ["a", "b"]')
        .replace(
            'generation_kwargs: {until: ["#"], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]', ""
        )
        .replace('doc_to_target: "{{answer}}"', "doc_to_target: 0")
    )
    (tmp_path / "tasks" / "chosen.yaml").write_text(choice)
    refused = forge("eval", run, "--tasks", "chosen", *flags, check=False)
    assert refused.returncode == 78 and "expected one that has the model write" in refused.stderr


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
    from forge_trainer.run_dir import read_job
    from forge_trainer.trained import load_model
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
        expected.append(acts["decoder.layers.1"][0])
        places.append(micro.inputs["image_index"][0])
    torch.testing.assert_close(store["decoder.layers.1"], torch.cat(expected), rtol=0, atol=1e-5)
    assert store.kept("image_index").equal(torch.cat(places)) and (store.kept("image_index") > 0).any()
    with torch.no_grad(), interp.edit(model, {"decoder.layers.0": lambda value: value * 0}):
        changed = model(**inputs)
    assert not changed.equal(model(**inputs)), "edits reach the decoder of a composed model"


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


UNFIT = {
    "layers": ('--model.fusion={type="cross-attention",layers=""}', "model.fusion.layers"),
    "tokens": (
        "--data.max_tokens=4",
        "an image takes 4 tokens of a sequence; set data.max_tokens to at least 5",
    ),
    "image-token": ("--model.image_token_id=999", "model.image_token_id = 999; expected an id from 0 to 271"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_configurations_that_no_image_fits_are_refused_before_anything_is_built(forge, seeing, case):
    flag, said = UNFIT[case]
    for command in ("plan", "train"):
        refused = forge(command, seeing(), flag, check=False)
        assert refused.returncode == 78 and said in refused.stderr + refused.stdout
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


DENSE = """
[model]
vocab_size = 272
max_tokens = 96
dim = 32
num_layers = 2
attention = { num_heads = 2 }
"""


@pytest.mark.parametrize("options", [(), ("--mesh.ep=2",)], ids=["one", "ep2"])
def test_experts_start_as_copies_of_the_feed_forward_of_a_text_run(forge, seeing, tmp_path, options):
    (tmp_path / "book.txt").write_text("some text of a book. " * 400)
    text = seeing(steps=3, root="text", name="text.toml")
    job, _, rest = text.read_text().partition("[model]")
    data, source, rest = rest[rest.index("[data]") :].partition("[[data.sources]]")
    files = f'{source}\ntype = "files"\npaths = ["{tmp_path}/book.txt"]\nheld_out = 0\n'
    text.write_text(job + DENSE + data + files + rest[rest.index("[train]") :])
    forge("train", text, "--eval.every_steps=0")
    dense = weights(tmp_path / "text" / "tiny", 3)
    origin = f'--train.init_from={{decoder="{tmp_path}/text/tiny@3"}}'
    still = ("--optimizer.lr=1e-30", "--optimizer.weight_decay=0", "--schedule.type=none")
    said = forge("train", seeing(steps=1, fusion="moma"), origin, *still, *options, ranks=1 + len(options))
    ours = weights(tmp_path / "runs" / "tiny", 1)
    for layer in (0, 1):
        for modality in ("text", "image"):
            for kind in ("w_gate", "w_up", "w_down"):
                experts = ours[f"decoder.layers.{layer}.ffn.{modality}.experts.{kind}"]
                assert len(experts) == 2
                assert all(torch.equal(one, dense[f"layers.{layer}.ffn.{kind}.weight"]) for one in experts)
    assert torch.equal(ours["decoder.layers.0.attention.wq.weight"], dense["layers.0.attention.wq.weight"])
    assert "decoder.layers.*.ffn.text.router.weight (2)" in said.stdout


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


ONLY_IMAGES = {
    "joint": "encoder, connector",
    "cross-attention": "encoder, connector, decoder.layers.*.cross",
    "mixture-of-transformers": "encoder, connector, decoder.layers.*.attention_norm.image, ",
    "moma": "encoder, connector, decoder.layers.*.ffn.image",
}


@pytest.mark.parametrize("fusion", ONLY_IMAGES)
def test_run_of_text_alone_leaves_what_images_reach_out_of_the_optimizer_and_says_so(
    forge, seeing, tmp_path, fusion
):
    path = seeing(steps=3, fusion=fusion)
    (tmp_path / "book.txt").write_text("some text of a book. " * 400)
    source = f'type = "files"\npaths = ["{tmp_path}/book.txt"]\nheld_out = 0\n'
    text = path.read_text().replace('type = "shapes"\nsamples = 400\nheld_out = 24\n', source)
    path.write_text(text)
    decay = ("--optimizer.weight_decay=0.5", "--checkpoint.every_steps=1", "--checkpoint.keep=5")
    said = forge("train", path, *decay).stdout
    frozen = next(line for line in said.splitlines() if line.startswith("  frozen "))
    assert frozen.startswith(f"  frozen     {ONLY_IMAGES[fusion]}")
    assert frozen.endswith(": no source has what they are given")
    run = tmp_path / "runs" / "tiny"
    states = [name for name in Store(run / "checkpoints").tensors(3) if name.startswith("optimizer.")]
    for layout, options in {"fsdp2": (), "pp2": ("--mesh.pp=2",)}.items():
        forge("train", path, *decay, *options, f"--job.root={tmp_path}/{layout}", ranks=2)
        assert losses(tmp_path / layout / "tiny") == pytest.approx(losses(run), rel=0, abs=3e-5)
    for root in ("runs", "fsdp2", "pp2"):
        first, last = (weights(tmp_path / root / "tiny", step) for step in (1, 3))
        for name, value in first.items():
            is_of_images = not name.startswith("decoder") or ".cross." in name or ".image." in name
            assert torch.equal(value, last[name]) == is_of_images, name
            assert any(name in state for state in states) != is_of_images, name
    mixed = path.read_text().replace("[train]", '[[data.sources]]\ntype = "shapes"\nsamples = 50\n\n[train]')
    path.write_text(mixed.replace('type = "files"', 'weight = 9\ntype = "files"', 1))
    assert "  frozen " not in forge("train", path, f"--job.root={tmp_path}/mixed").stdout


ALL_LAYOUTS = {
    "one": (1, ()),
    "fsdp2": (2, ()),
    "tp2": (2, LAYOUTS["tp2"]),
    "pp2": (2, LAYOUTS["pp2"]),
}
EVERY_PAIR = ["one", "fsdp2", "tp2", "pp2", "one", "tp2", "fsdp2", "pp2", "tp2", "one", "pp2", "fsdp2", "one"]
"""Each of them goes on from a checkpoint of each other one."""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fusion", [name for name in FUSIONS if name != "spans"])
def test_checkpoints_of_any_layout_go_on_under_any_other(forge, seeing, tmp_path, fusion):
    constant = '--schedule={ type = "constant" }'
    last = len(EVERY_PAIR)
    forge("train", seeing(steps=last, root="whole", name="whole.toml", fusion=fusion), constant)
    for number, layout in enumerate(EVERY_PAIR):
        ranks, options = ALL_LAYOUTS[layout]
        path = seeing(steps=number + 1, fusion=fusion)
        forge("train", path, constant, "--change", *options, ranks=ranks)
    assert len(losses(tmp_path / "runs" / "tiny")) == last
    assert losses(tmp_path / "runs" / "tiny") == pytest.approx(
        losses(tmp_path / "whole" / "tiny"), rel=0, abs=3e-5
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["one", "fsdp2", "pp2"])
@pytest.mark.parametrize("fusion", [name for name in FUSIONS if name != "spans"])
def test_run_killed_ten_times_ends_bit_identical(forge, seeing, tmp_path, fusion, layout):
    ranks, options = ALL_LAYOUTS[layout]
    steps, run = 60, tmp_path / "runs" / "tiny"
    forge("train", seeing(steps=steps, root="whole", name="whole.toml", fusion=fusion), *options, ranks=ranks)
    path, ends = seeing(steps=steps, fusion=fusion), []
    for number in range(10):
        ends.append(forge.stop_at(path, reached(run) + 1 + number % 3, signal.SIGKILL, ranks, *options))
    assert ends == [-signal.SIGKILL] * 10
    forge("train", path, *options, ranks=ranks)
    assert state(run) == state(tmp_path / "whole" / "tiny")
    assert losses(run) == losses(tmp_path / "whole" / "tiny")


def reached(run):
    """The last step that a run has logged; a kill leaves half a line."""
    path = run / "metrics.jsonl"
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return max((json.loads(line)["step"] for line in whole), default=0)
