"""A vision-language model in the real command: killed, resumed, on several ranks, with an outside fusion."""

import json
import signal
from pathlib import Path

import pytest
from forge_ckpt.store import Store
from poison import POISON
from runs import losses, records, state
from seeing import ALL_LAYOUTS, FUSIONS, LAYOUTS, image

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


@pytest.mark.parametrize("layout", ["one", pytest.param("fsdp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fusion", ["moma", "moma-threshold"])
def test_run_with_images_that_goes_back_and_is_killed_ends_as_one_without_these_steps(
    forge, seeing, tmp_path, fusion, layout
):
    (tmp_path / "my_poison.py").write_text(POISON)
    options = ALL_LAYOUTS[layout][0], "--resilience.max_bad_steps=3", "--resilience.check_every_steps=1"
    path = seeing(steps=14, fusion=fusion)
    hook = (
        '\n[hooks.poison]\ntype = "poison"\nfirst = 8\nlast = 10\nheals = true\nmodule = "decoder.layers.0"\n'
    )
    path.write_text('imports = ["my_poison"]\n' + path.read_text() + hook)
    assert forge.stop_at(path, 12, signal.SIGKILL, *options) == -signal.SIGKILL
    forge("train", path, *options[1:], ranks=options[0])
    without = seeing(steps=14, fusion=fusion, name="without.toml", root="without")
    forge("train", without, "--data.skip=[{start_step=7,end_step=10}]", ranks=options[0])
    run, other = tmp_path / "runs" / "tiny", tmp_path / "without" / "tiny"
    mine, whole = state(run), state(other)
    assert mine | {"meta": None} == whole | {"meta": None}
    assert losses(run) == losses(other)
    assert (run / "incidents.jsonl").read_text().count('"rollback"') == 1


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


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_ranks_evaluate_a_run_of_one_process(forge, seeing, tmp_path, layout):
    run, one, many = tmp_path / "runs" / "tiny", tmp_path / "one.json", tmp_path / "many.json"
    forge("train", seeing(steps=3, fusion="cross-attention"))
    forge("eval", run, "--json", one)
    forge("eval", run, "--json", many, *LAYOUTS[layout], ranks=2)
    assert json.loads(many.read_text()) == pytest.approx(json.loads(one.read_text()), rel=1e-6)


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
    ["joint", *list(FUSIONS)[2:]],
)
@pytest.mark.slow
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
