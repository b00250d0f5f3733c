"""Which weights of a vision-language model are trained when, and from what they start."""

import signal

import pytest
import torch
from forge_ckpt.store import Store
from runs import losses, state

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


@pytest.mark.parametrize(
    "fusion",
    [pytest.param(one, marks=[] if one in ("joint", "moma") else pytest.mark.slow) for one in ONLY_IMAGES],
)
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
