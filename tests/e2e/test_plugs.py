"""Parts of a user, as docs/plugs.md has them, in the real command."""

import signal
from pathlib import Path

import pytest
from runs import losses, state

NOTED = """
imports = ["my_lab_blocks", "my_lab_ffns", "my_lab_notes", "my_lab_noted"]

[job]
name = "tiny"
root = "{root}"

[model]
type = "noted"

[model.decoder]
vocab_size = 272
dim = 32
num_layers = 2
max_tokens = 32
attention = {{ num_heads = 2 }}
ffn = {{ type = "squared" }}
block = {{ type = "marked" }}

[data]
max_tokens = 32
cache_dir = "{cache}"

[[data.sources]]
type = "notes"

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
every_steps = 0

[checkpoint]
every_steps = 3
"""
MODULES = {
    "my_lab_blocks": "class Marked(",
    "my_lab_ffns": "class Squared(",
    "my_lab_notes": "class Notes(",
    "my_lab_noted": "class Noted(",
}


@pytest.fixture
def noted(tmp_path):
    """Writes the job and the modules of the docs beside it; returns the path of the job."""
    page = (Path(__file__).parents[2] / "docs" / "plugs.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    for name, has in MODULES.items():
        (tmp_path / f"{name}.py").write_text(next(block for block in blocks if has in block))

    def write(steps=8, name="noted.toml", root="runs", change=()):
        text = NOTED.format(root=tmp_path / root, cache=tmp_path / "cache", steps=steps)
        for old, new in change:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_plugs_train_and_go_on_after_a_kill(forge, noted, tmp_path):
    forge("train", noted(root="whole", name="whole.toml"), "--data.workers=1")
    whole = losses(tmp_path / "whole" / "tiny")
    assert len(whole) == 8 and whole[-1] < whole[0] - 1
    path = noted()
    assert forge.stop_at(path, 5, signal.SIGKILL, 1) == -signal.SIGKILL
    forge("train", path)
    assert state(tmp_path / "runs" / "tiny") == state(tmp_path / "whole" / "tiny")


LAYOUTS = {
    "fsdp2": (),
    "tp2": ("--mesh.tp=2", "--tensor_parallel.sequence=false"),
    "pp2": ("--mesh.pp=2",),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plugs_train_alike_on_two_ranks(forge, noted, tmp_path, layout):
    forge("train", noted(root="one", name="one.toml", steps=6))
    path = noted(steps=6)
    forge.stop_at(path, 4, signal.SIGTERM, 2, *LAYOUTS[layout])
    forge("train", path, *LAYOUTS[layout], ranks=2)
    one, two = (losses(tmp_path / root / "tiny") for root in ("one", "runs"))
    assert two == pytest.approx(one, rel=0, abs=3e-5)


def test_side_inputs_under_sequence_parallelism_are_refused_before_a_group_exists(forge, noted):
    refused = forge("train", noted(), "--mesh.tp=2", check=False)
    assert refused.returncode == 78
    assert "marks" in refused.stderr and "tensor_parallel.sequence = false" in refused.stderr


def test_plugs_are_refused_by_export_and_generate_with_a_reason(forge, noted, tmp_path):
    forge("train", noted(steps=3))
    run = tmp_path / "runs" / "tiny"
    refused = forge("export", run, tmp_path / "hf", check=False, cwd=tmp_path)
    assert refused.returncode == 78 and "a NotedConfig has no form in Hugging Face" in refused.stderr
    refused = forge("generate", run, "--prompt", "a", check=False, cwd=tmp_path)
    assert refused.returncode == 78 and "a Noted does not write text" in refused.stderr
    alone = noted(
        name="alone.toml",
        steps=3,
        root="alone",
        change=[
            ('type = "noted"\n\n[model.decoder]', 'type = "decoder"'),
            ('block = { type = "marked" }', ""),
            ('type = "notes"', 'type = "python-stdlib"\nheld_out = 0.0'),
        ],
    )
    forge("train", alone, "--data.validation_samples=4")
    refused = forge("export", tmp_path / "alone" / "tiny", tmp_path / "hf", check=False)
    assert refused.returncode == 78 and "a feed-forward other than swiglu" in refused.stderr


def test_weights_of_parts_come_from_several_places(forge, noted, tmp_path):
    from forge_ckpt.store import Store

    forge("train", noted(steps=3, root="first", name="first.toml"))
    donor = tmp_path / "first" / "tiny" / "checkpoints"
    text = noted(
        name="text.toml",
        steps=3,
        root="text",
        change=[('type = "noted"\n\n[model.decoder]', 'type = "decoder"')],
    )
    # a decoder alone takes no notes: its marks are all that it needs
    text.write_text(
        text.read_text().replace('"my_lab_notes"', '"my_lab_marks"').replace('"notes"', '"marks"')
    )
    (tmp_path / "my_lab_marks.py").write_text(
        (tmp_path / "my_lab_notes.py")
        .read_text()
        .replace('register("notes")', 'register("marks")')
        .replace('ragged = {"notes": np.empty((0, 4), np.float32)}', "ragged = {}")
        .replace(', "note_index": none, "note_counts": np.zeros((), np.int64)}', "}")
        .replace(', "note_index": index, "note_counts": counts}', "}")
        .replace(', ragged={"notes": Ragged(rows.astype(np.float32), counts)}', "")
    )
    forge("train", text)
    where = f'--train.init_from={{ decoder = "{tmp_path}/text/tiny@3" }}'
    again = noted(steps=3, root="again", name="again.toml")
    told = forge("train", again, where, "--optimizer.lr=1e-30").stdout
    assert "tower.weight" in told and "seed 0" in told
    newest = [Store(folder).tensors(step) for folder, step in (
        (tmp_path / "text" / "tiny" / "checkpoints", 3),
        (tmp_path / "again" / "tiny" / "checkpoints", 3),
        (donor, 3),
    )]  # fmt: skip
    ours = newest[1]["model.decoder.layers.1.attention.wq.weight"]
    assert (ours - newest[0]["model.layers.1.attention.wq.weight"]).abs().max() < 1e-6
    assert (ours - newest[2]["model.decoder.layers.1.attention.wq.weight"]).abs().max() > 1e-3
    refused = forge(
        "train", noted(root="other", name="other.toml"), where.replace("decoder =", "tower ="), check=False
    )
    assert (
        refused.returncode == 78
        and "names 'tower'; the parts of this NotedConfig are decoder" in refused.stderr
    )
    both = where.replace(" }", f', tower = "{tmp_path}/first/tiny@3" }}')
    told = forge("train", noted(steps=3, root="both", name="both.toml"), both, "--optimizer.lr=1e-30").stdout
    assert "seed 0" not in told
    made = Store(tmp_path / "both" / "tiny" / "checkpoints").tensors(3)
    for name, (tensors, key) in {
        "model.tower.weight": (newest[2], "model.tower.weight"),
        "model.decoder.norm.weight": (newest[0], "model.norm.weight"),
    }.items():
        assert (made[name] - tensors[key]).abs().max() < 1e-6
