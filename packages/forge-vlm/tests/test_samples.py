"""Samples laid into sequences, rendered shapes and prompts, against what their words say."""

import io
import pickle
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("forge_data", reason="the extra `data` is not installed")

from forge_data import DataConfig, DataError, build_loader
from forge_data.sources.items import Size
from forge_data.tokenizer.tokenizer import Bytes
from forge_model import DecoderConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.fusion.config import JointConfig
from forge_vlm.images.marks import PLACE
from forge_vlm.images.processing import patches_of
from forge_vlm.samples.packing import SamplePacking
from forge_vlm.samples.sequences import Sample
from forge_vlm.sources.shapes import Scene, Shapes, ShapesConfig, drawn, question, rendered

EOS = Bytes.eos_id


def model(**options):
    decoder = DecoderConfig(vocab_size=257, dim=32, num_layers=1, max_tokens=128)
    return VisionLanguageConfig(decoder=decoder, encoder=ViTConfig(), **options)


def reader(**options):
    return model(**options).items()


def data(**options):
    return DataConfig(max_tokens=127, sources=[ShapesConfig(samples=60, held_out=12)], **options)


def shapes(count=60, pairs=0.4):
    return Shapes(reader(), Bytes(), count, pairs, 32, 0)


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_every_sample_is_whole_and_stands_in_one_sequence(packing):
    config = data(mask_documents=True, packing=packing)
    samples = shapes()
    packed = SamplePacking(samples, reader(fusion=JointConfig(attention="image")), config, EOS)
    read = packed.read(np.arange(len(packed)))
    tokens, number, image = read.tokens, 0, 0
    ignored = np.zeros((len(packed), 127), dtype=bool)
    ignored[read.ignored] = True
    patches = read.ragged["patches"].values.reshape(-1, 16, 192)
    for row in range(len(packed)):
        at, places, images = 0, 0, 0
        while number < 60 and at + samples.lengths[number] <= 128 and (packing == "concat" or not at):
            sample = samples.sample(number)
            length = len(sample.tokens)
            for offset in range(length):
                token = at + offset
                is_place = sample.tokens[offset] == PLACE
                assert tokens[row, token] == (EOS if is_place else sample.tokens[offset])
                if token < 127:
                    new, span = read.extra["image_index"][row, token], read.extra["span_ids"][row, token]
                    places += is_place
                    assert new == (places if is_place else 0)
                    assert span == (1 + (places - 1) // 16 if is_place else 0)
                    assert read.extra["positions"][row, token] == offset
                if token and offset:
                    assert ignored[row, token - 1] == (not sample.targets[offset])
                elif token:
                    assert ignored[row, token - 1], "the first token of a sample follows nothing"
            for raw, _ in sample.items:
                assert np.array_equal(patches[image], patches_of(raw, 8))
                image, images = image + 1, images + 1
            at, number = at + length, number + 1
        assert ignored[row, max(at - 1, 0) :].all() and (tokens[row, at:] == EOS).all()
        assert read.extra["image_places"][row] == places == 16 * images
        assert read.ragged["grids"].counts[row] == images
    assert number == 60 and image == len(patches)


def test_best_fit_has_each_sample_once_and_less_padding():
    config = data(mask_documents=True, packing="bestfit")
    samples = shapes(300)
    packed = SamplePacking(samples, reader(), config, EOS)
    again = pickle.loads(pickle.dumps(packed))
    left = Counter(tuple(np.where(t == PLACE, EOS, t).tolist()) for t, *_ in map(samples.sample, range(300)))
    for row in range(len(packed)):
        read = again.read(np.array([row]))
        ids = read.extra["doc_ids"][0]
        for number in range(ids[-1] + 1):
            piece = tuple(read.tokens[0][np.append(ids, ids[-1]) == number].tolist())
            # the last cell is of the last sample, or padding
            piece = piece if left[piece] else piece[:-1]
            assert left[piece] or set(piece) <= {EOS}
            left[piece] -= left[piece] > 0
    assert not left.total()
    rows = len(SamplePacking(samples, reader(), data(mask_documents=True), EOS))
    assert -(-int(samples.lengths.sum()) // 128) <= len(packed) <= rows


@pytest.mark.parametrize("packing", ["concat", "bestfit", "pad"])
def test_places_of_images_count_as_tokens_and_padding_does_not(packing):
    config, samples = data(mask_documents=True, packing=packing), shapes(40)
    packed = SamplePacking(samples, reader(), config, EOS)
    some = np.arange(len(packed))[::-1]
    counts = packed.token_counts(some)
    room = 0
    for row, count in zip(some.tolist(), counts.tolist(), strict=True):
        ids = packed.read(np.array([row])).extra["doc_ids"][0]
        assert (ids[count:] == ids[count - 1] + 1).all() and (ids[:count] <= ids[count - 1]).all()
        room += len(ids) > count
    assert room > 0


def test_sequences_are_the_same_for_any_number_of_ranks_and_workers():
    config, items = data(mask_documents=True), reader()

    def rows(ranks, workers):
        found = []
        for rank in range(ranks):
            options = {"rank": rank, "world_size": ranks, "micro_batch": 2, "global_batch": 4}
            loader = build_loader(
                config.__class__(**{**_fields(config), "workers": workers}), "train", items=items, **options
            )
            stream = iter(loader)
            found.append([[m.inputs for m in next(stream)] for _ in range(3)])
            loader.close()
        return [[one for rank in found for one in rank[step]] for step in range(3)]

    whole, shared = rows(1, 0), rows(2, 1)
    for ours, theirs in zip(whole, shared, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def _fields(config):
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_grids_stay_on_the_host_and_the_packing_pickles_small():
    config = data(mask_documents=True)
    (micro,) = next(iter(build_loader(config, "validation", micro_batch=4, items=reader())))
    assert micro.host == {"grids"} and micro.inputs["grids"].shape[1] == 3
    packed = SamplePacking(shapes(), reader(), config, EOS)
    assert len(pickle.dumps(packed)) < 10_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packing": "crop"}, 'data.packing = "crop" for samples with images, which are never cut'),
        ({}, "several samples into a sequence, which must not see each other"),
    ],
)
def test_packings_that_would_mix_or_cut_samples_are_refused(options, said):
    with pytest.raises(DataError, match=re.escape(said)):
        SamplePacking(shapes(), reader(), data(**options), EOS)


def test_sample_that_does_not_fit_and_places_unlike_images_are_errors():
    long = data(mask_documents=True).__class__(**{**_fields(data(mask_documents=True)), "max_tokens": 20})
    with pytest.raises(DataError, match=r"sample \d+ has \d+ tokens.*room for 21 .*never cut"):
        SamplePacking(shapes(), reader(), long, EOS)
    size = Size(1, 32, 32)
    one = Sample(
        np.array([PLACE] * 15 + [5, EOS]), np.arange(17) > 14, [(rendered(scene(), 32), size)], "wrong"
    )
    alike = {"sample": lambda number: one, "sizes": lambda number: [size]}
    wrong = SimpleNamespace(digest="x", lengths=np.array([17]), **alike)
    with pytest.raises(DataError, match="wrong has 15 places for 1 images, which make 16 visual tokens"):
        SamplePacking(wrong, reader(), data(mask_documents=True), EOS)


def test_model_without_images_is_told_so():
    with pytest.raises(DataError, match="a source of images, and a model that takes none"):
        build_loader(data(mask_documents=True), "train", micro_batch=1, global_batch=1)


def scene(**changes):
    return Scene(**({"colour": "red", "kind": "square", "size": "large", "quarters": (0,)} | changes))


def test_answers_are_what_the_images_show():
    random = np.random.default_rng(0)
    for _ in range(300):
        one = drawn(random)
        image = rendered(one, 32).reshape(2, 16, 2, 16, 3).transpose(0, 2, 1, 3, 4).reshape(4, 256, 3)
        filled = [n for n in range(4) if (image[n] != 30).any()]
        assert tuple(filled) == one.quarters
        asked, answer = question([one], random)
        if asked == "how many?":
            assert answer == ("one", "two", "three", "four")[len(filled) - 1]
        if asked == "where?":
            assert answer == ("top left", "top right", "bottom left", "bottom right")[filled[0]]
    areas = {size: int((rendered(scene(size=size), 32) != 30).any(-1).sum()) for size in ("small", "large")}
    assert areas["small"] < areas["large"]
    kinds = {kind: rendered(scene(kind=kind), 32).tobytes() for kind in ("circle", "square", "triangle")}
    assert len(set(kinds.values())) == 3


def test_training_and_validation_have_other_samples():
    train, held = (Shapes(reader(), Bytes(), 40, 0.2, 32, seed) for seed in (1, 2))
    same = [np.array_equal(train.sample(n).tokens, held.sample(n).tokens) for n in range(40)]
    assert sum(same) < 20


def png(pixels):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def test_prompt_has_its_images_where_they_stand():
    config, image = model(), png(rendered(scene(), 32))
    first = config.prompt("colour? ", [image], Bytes())
    assert first.tokens == [EOS] * 16 + list(b"colour? ")
    assert first.inputs["image_index"].tolist() == [[*range(1, 17), *[0] * 8]]
    assert np.array_equal(first.inputs["patches"], patches_of(rendered(scene(), 32), 8))
    two = config.prompt("a<image>b<image>", [image, png(rendered(scene(colour="blue"), 32))], Bytes())
    assert two.tokens == [*b"a", *[EOS] * 16, *b"b", *[EOS] * 16]
    assert two.inputs["image_index"][0].tolist() == [0, *range(1, 17), 0, *range(17, 33)]
    assert two.inputs["grids"].tolist() == [[1, 4, 4]] * 2
    with pytest.raises(ValueError, match="given 1 images, and a text with 2 marks"):
        config.prompt("<image><image>", [image], Bytes())
    with pytest.raises(ValueError, match="no image"):
        config.prompt("", [b"text"], Bytes())
    with pytest.raises(ValueError, match="a DecoderConfig takes none"):
        config.decoder.prompt("", [image], Bytes())


def test_digest_names_the_model_and_the_tokenizer():
    config = data(mask_documents=True)
    digests = {
        SamplePacking(Shapes(items, Bytes(), 60, pairs, 32, 0), items, config, EOS).digest
        for items in (reader(), reader(fusion=JointConfig(attention="image")))
        for pairs in (0.2, 0.3)
    }
    assert len(digests) == 4


def test_prefix_is_what_stands_before_the_first_target_of_each_sample():
    items = reader(fusion=JointConfig(attention="prefix"))
    samples = shapes(12)
    packed = SamplePacking(samples, items, data(mask_documents=True), EOS)
    read = packed.read(np.arange(len(packed)))
    number = 0
    for row in range(len(packed)):
        spans, doc_ids = read.extra["span_ids"][row], read.extra["doc_ids"][row]
        for document in range(doc_ids.max() + 1):
            here = doc_ids == document
            if number == 12 or here.sum() == 0 or not (spans[here] > 0).any():
                assert not (spans[here] > 0).any()  # padding
                continue
            sample = samples.sample(number)
            first = int(np.flatnonzero(sample.targets & (sample.tokens != PLACE))[0])
            assert (spans[here] == np.where(np.arange(here.sum()) < first, 1 + document, 0)).all()
            number += 1
    assert number == 12
    prompt = model(fusion=JointConfig(attention="prefix")).prompt(
        "colour?", [png(np.zeros((32, 32, 3), np.uint8))], Bytes()
    )
    assert (prompt.inputs["span_ids"] == 1).all() and prompt.inputs["span_ids"].shape[1] == len(prompt.tokens)
    assert "span_ids" in prompt.by_token
    assert set(packed.extra) == set(read.extra)
