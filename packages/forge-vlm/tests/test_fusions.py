"""What holds for every fusion: caches, padding, text alone, costs, and that nothing sees what it must not."""

from collections import namedtuple
from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from forge_model import DecoderConfig, LossConfig, Sampling, generate, initialize
from forge_model.config import GroupedQueryConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.fusion.config import JointConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig
from forge_vlm.fusion.mixture_of_transformers_config import MixtureOfTransformersConfig
from forge_vlm.fusion.moma_config import ExpertsConfig, MomaConfig
from msgspec.structs import replace

Size = namedtuple("Size", "frames height width")  # as that of forge_data, which need not be installed
IMAGE, VOCAB, PIXELS = "image", 31, 3 * 16
FUSIONS = {
    "joint": JointConfig(),
    "cross-attention": CrossAttentionConfig(layers="0:2", max_visual_tokens=12, gate_init=0.5),
    "mixture-of-transformers": MixtureOfTransformersConfig(),
    "moma": MomaConfig(experts=ExpertsConfig(text=3, image=2)),
    "moma-threshold": MomaConfig(routing="threshold"),
}
fusions = pytest.mark.parametrize("fusion", FUSIONS.values(), ids=FUSIONS)
COUNTED = {name: fusion for name, fusion in FUSIONS.items() if name != "moma-threshold"}
"""Those whose cost does not depend on what routers have learnt."""


def config(fusion, **decoder):
    options = {
        "vocab_size": VOCAB,
        "dim": 16,
        "num_layers": 2,
        "max_tokens": 48,
        "attention": GroupedQueryConfig(num_heads=4, num_kv_heads=2),
    }
    encoder = ViTConfig(image_size=8, patch_size=4, dim=24, num_layers=1, num_heads=2)
    return VisionLanguageConfig(decoder=DecoderConfig(**options | decoder), encoder=encoder, fusion=fusion)


def built(fusion, seed=1, **decoder):
    model = config(fusion, **decoder).build()
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".aux.w_out" in name:  # it starts by choosing all
            parameter.data.normal_(generator=generator)
    return model.double()


def laid(model, rows, tokens=None, pad="right"):
    """Inputs of a batch. A row is a list of documents; these, of numbers of text tokens and of images."""
    reader = model.config.items()
    made = []
    for documents in rows:
        ids, places, doc_ids, images = [], [], [], 0
        for number, document in enumerate(documents):
            for part in document:
                run = model.config.fusion.places(4) if part == IMAGE else part
                images += part == IMAGE
                first = 1 + max(places, default=0)
                places += range(first, first + run) if part == IMAGE else [0] * run
                doc_ids += [number] * run
                ids += [0] * run if part == IMAGE else torch.randint(1, VOCAB, (run,)).tolist()
        made.append((ids, places, doc_ids, images))
    longest = tokens or max(len(ids) for ids, *_ in made)
    found, patches = {}, []
    for ids, places, doc_ids, images in made:
        short = longest - len(ids)
        if pad == "right":
            ids, places, doc_ids = ids + [0] * short, places + [0] * short, doc_ids + [-1] * short
        arrays = reader.sequence(np.array(places), [Size(1, 8, 8)] * images, np.array(doc_ids))
        arrays |= {"tokens": np.array(ids)} | ({"doc_ids": np.array(doc_ids)} if pad == "right" else {})
        for name, array in arrays.items():
            left = short if pad == "left" and array.shape[-1:] == (len(ids),) else 0
            padded = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(left, 0)]) if array.ndim else array
            found.setdefault(name, []).append(torch.from_numpy(padded))
        patches.append(torch.randint(256, (4 * images, PIXELS), dtype=torch.uint8))
    rows_of = {name: torch.stack(arrays) for name, arrays in found.items()}
    grids = torch.tensor([[1, 2, 2]] * sum(images for *_, images in made)).view(-1, 3)
    return rows_of | {"patches": torch.cat(patches), "grids": grids}


def only(given, row):
    """The inputs of one row of a batch whose other rows have no image."""
    alike = ("patches", "grids")
    return {name: one if name in alike else one[row : row + 1] for name, one in given.items()}


@fusions
def test_row_with_text_alone_is_what_it_is_without_images(fusion):
    torch.manual_seed(0)
    model = built(fusion).eval()
    given = laid(model, [[[3, IMAGE, 5]], [[9]]])
    alone = model(given["tokens"][1:], doc_ids=given["doc_ids"][1:])
    torch.testing.assert_close(model(**given)[1:], alone, rtol=0, atol=1e-12)


LEARNED = {
    "learned-place": CrossAttentionConfig(layers="1", max_visual_tokens=12, place="learned", gate_init=0.5)
}


@pytest.mark.parametrize("fusion", [*FUSIONS.values(), *LEARNED.values()], ids=[*FUSIONS, *LEARNED])
def test_what_the_plan_says_images_feed_is_what_text_alone_gives_no_gradient(fusion):
    torch.manual_seed(0)
    model = built(fusion).train()
    given = laid(model, [[[20]], [[12]]])
    loss_fn = LossConfig().build()
    model(**given, labels=given["tokens"].roll(-1, 1), loss_fn=loss_fn).total.backward()
    idle = {name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()}
    plan = model.parallel_plan()

    def is_inside(pattern, name):
        inner = name.split(".")[: 1 + pattern.count(".")]
        return fnmatch(".".join(inner), pattern)

    fed = {name for name, _ in model.named_parameters() if any(is_inside(p, name) for p in plan["fed_by"])}
    assert fed == idle
    assert all(arguments == ["patches", "grids"] for arguments in plan["fed_by"].values())


class Letters:
    """A tokenizer of which each letter is a token."""

    vocab_size, eos_id, bos_ids, control_tokens = VOCAB, 0, (), ()

    def encode(self, text):
        return np.array([1 + ord(one) % (VOCAB - 1) for one in text], dtype=np.int64)


@pytest.mark.parametrize(
    ("name", "positions"),
    [(name, "sequential") for name in FUSIONS] + [(name, "image") for name in FUSIONS if "cross" not in name],
)
def test_prompt_says_what_it_has_of_each_token_however_short_it_is(name, positions):
    fusion = FUSIONS[name]
    asking = replace(config(fusion), positions=positions)
    made = [asking.prompt("a" * tokens, [], Letters()) for tokens in (1, 2, 3, 4, 20)]
    changing = {name for name, array in made[0].inputs.items() if array.shape != made[-1].inputs[name].shape}
    assert changing and all(prompt.by_token == changing for prompt in made)


@fusions
def test_nothing_depends_on_the_future_on_other_samples_or_on_neighbours(fusion):
    torch.manual_seed(0)
    model = built(fusion).eval()
    given = laid(model, [[[2, IMAGE, 3, IMAGE, 3], [IMAGE, 6]], [[4, IMAGE, 2]]])
    first = model(**given)
    images = given["patches"].view(-1, 4, PIXELS)
    for image, row, document in ((1, 0, 0), (2, 0, 1), (3, 1, 0)):
        other = images.clone()
        other[image] ^= 255
        changed = (model(**given | {"patches": other.flatten(0, 1)}) - first).abs().amax(-1) > 1e-9
        where = torch.zeros_like(changed)
        where[row] = given["doc_ids"][row] == document
        assert changed.any() and not (changed & ~where).any()
        if image == 1:
            assert not changed[
                0, : given["doc_ids"][0].tolist().index(1) - 3 - model.config.fusion.places(4)
            ].any()
    last = given["tokens"].clone()
    last[1, given["doc_ids"][1].tolist().index(-1) - 1] += 1
    changed = (model(**given | {"tokens": last}) - first).abs().amax(-1) > 1e-9
    assert changed.sum() == 1


@fusions
def test_rows_padded_on_the_left_are_written_on_as_each_alone(fusion):
    torch.manual_seed(0)
    model = built(fusion).eval()
    rows = [[[2, IMAGE, 5]], [[3]], [[IMAGE, 1, IMAGE, 2]]]
    given = laid(model, rows, pad="left")
    tokens = given.pop("tokens")
    lengths = [sum(model.config.fusion.places(4) if p == IMAGE else p for p in row[0]) for row in rows]
    prompts = [ids[len(ids) - n :] for ids, n in zip(tokens.tolist(), lengths, strict=True)]
    together = generate(model, prompts, 6, Sampling(temperature=0), inputs=given)
    patches, start = given["patches"].split([4, 0, 8]), 0
    for row, (prompt, images) in enumerate(zip(prompts, (1, 0, 2), strict=True)):
        alone = {name: one[row : row + 1] for name, one in given.items() if name not in ("patches", "grids")}
        alone = {
            name: one[..., tokens.shape[1] - len(prompt) :] if one.shape[-1] == tokens.shape[1] else one
            for name, one in alone.items()
        }
        alone |= {"patches": patches[row], "grids": given["grids"][start : start + images]}
        start += images
        assert generate(model, [prompt], 6, Sampling(temperature=0), inputs=alone) == [together[row]]
        ids = list(prompt)
        if images:
            whole = laid(model, [rows[row]])
            for token in together[row]:  # without any cache, the image inputs of text behind the prompt
                more = _longer(model, alone, rows[row], len(ids) - len(prompt), whole)
                logits = model(torch.tensor([ids]), **more)
                assert int(logits[0, -1].argmax()) == token
                ids.append(token)


def _longer(model, given, row, count, whole):
    """The inputs of a prompt with so many more tokens of text."""
    longer = laid(model, [[[*row[0], count]]] if count else [row])
    kept = {name: given[name] for name in ("patches", "grids")}
    return {n: v for n, v in longer.items() if n not in ("tokens", "doc_ids")} | kept


@fusions
def test_compiled_decoding_writes_the_same(fusion, monkeypatch):
    from forge_model.generation import compiled

    monkeypatch.setattr(compiled, "_compiled", lambda: compiled._logits)  # the static cache, not the compiler
    torch.manual_seed(0)
    model = built(fusion).eval()
    given = laid(model, [[[2, IMAGE, 5]]])
    prompt = given.pop("tokens").tolist()
    del given["doc_ids"]
    plain = generate(model, prompt, 5, Sampling(temperature=0), inputs=given)
    assert generate(model, prompt, 5, Sampling(temperature=0), inputs=given, compiled=True) == plain


@fusions
def test_all_parameters_get_a_gradient_whatever_the_batch_holds(fusion):
    torch.manual_seed(0)
    model = built(fusion)
    for rows, has_image in (([[[2, IMAGE, 4]], [[6]]], True), ([[[8]], [[3]]], False)):
        model.zero_grad()
        model(**laid(model, rows)).square().sum().backward()
        found = {name: one.grad for name, one in model.named_parameters()}
        assert not [name for name, gradient in found.items() if gradient is None]
        tower = [gradient for name, gradient in found.items() if name.startswith(("encoder", "connector"))]
        assert has_image == any(gradient.any() for gradient in tower)
        assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("fusion", COUNTED.values(), ids=COUNTED)
def test_flops_are_those_that_torch_counts(fusion):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model = built(fusion, dim=64, attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2))
    given = laid(model, [[[9, IMAGE, 20, IMAGE, 3]], [[IMAGE, 36]]], tokens=40)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**given)
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    assert model.config.step_flops(shapes, causal=False) / 3 == pytest.approx(
        counter.get_total_flops(), rel=0.01
    )


@fusions
def test_random_tokens_cannot_be_learnt(fusion, steps=20):
    """A model that saw what it predicts would be far below ln V long before."""
    losses = trained_on_noise(fusion, steps)
    assert min(losses) >= 0.97 * np.log(VOCAB) and losses[-1] < 1.1 * np.log(VOCAB)


@pytest.mark.slow
@fusions
def test_random_tokens_stay_at_their_entropy_for_300_steps(fusion):
    losses = trained_on_noise(fusion, 300)
    assert np.mean(losses[-50:]) >= 0.98 * np.log(VOCAB)
    cheated = trained_on_noise(fusion, 300, shifted=False)
    assert cheated[-1] < 0.5 * np.log(VOCAB), "labels that are the inputs are learnt: the test can fail"


def trained_on_noise(fusion, steps, shifted=True):
    """The losses of fresh rows of random tokens with random images, each step."""
    torch.manual_seed(0)
    model, loss_fn = built(fusion).float(), LossConfig().build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        given = laid(model, [[[3, IMAGE, 12], [IMAGE, 14]], [[4, IMAGE, 22]]] * 8, tokens=42)
        text = (given["image_index"] == 0) & (given["doc_ids"] >= 0)
        tokens = given["tokens"]
        labels = torch.where(text, tokens, -100)
        if shifted:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
        terms = model(**given, labels=labels, loss_fn=loss_fn)
        loss = terms.total / (labels >= 0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
