"""Rows, tars and folders with images become the samples that a plain reading of them gives."""

import io
import json
import re
import tarfile

import numpy as np
import pytest

pytest.importorskip("forge_data", reason="the extra `data` is not installed")

from forge_data import DataConfig, DataError, build_loader
from forge_data.packing.build import build_packings
from forge_data.sources.config import FilesConfig
from forge_data.sources.documents import Task
from forge_data.tokenizer.tokenizer import Bytes
from forge_model import DecoderConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.images.config import ImagesConfig
from forge_vlm.images.processing import patches_of
from forge_vlm.samples.packing import SamplePacking
from forge_vlm.sources.columns import ImageTextConfig
from forge_vlm.sources.published import CocoKarpathyConfig, table_rows
from forge_vlm.sources.shapes import ShapesConfig
from forge_vlm.sources.tars import WebdatasetConfig
from PIL import Image

EOS = Bytes.eos_id


def picture(number, height=32, width=32):
    return np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def model(**options):
    decoder = DecoderConfig(vocab_size=257, dim=32, num_layers=1, max_tokens=256)
    return VisionLanguageConfig(decoder=decoder, encoder=ViTConfig(image_size=16), **options)


def packing(source, tmp_path, split="train", **options):
    config = DataConfig(
        max_tokens=255,
        sources=[source],
        cache_dir=str(tmp_path / "cache"),
        mask_documents=True,
        packing="pad",
    )
    return build_packings(config, split, items=model(**options).items())[0]


def samples_of(packed):
    """Of each row: its text with `#` for places, the part of it that is a target, the patches."""
    found = []
    for row in range(len(packed)):
        read = packed.read(np.array([row]))
        ignored = np.zeros(255, dtype=bool)
        ignored[read.ignored[1]] = True
        is_place = np.append(read.extra["image_index"][0] > 0, False)
        targets = np.append(False, ~ignored)
        text = "".join(
            "#" if place else "$" if token == EOS else chr(token)
            for token, place in zip(read.tokens[0], is_place, strict=True)
        )
        said = "".join(char if target else " " for char, target in zip(text, targets, strict=True))
        found.append((text.rstrip("$") + "$", said.strip(), read.ragged["patches"].values))
    return found


def lines(folder, rows, name="rows.jsonl"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def write_images(folder, count):
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(png(picture(number, 16, 16)))


FOUR = "#" * 4


def test_lines_of_json_beside_image_files_are_captions(tmp_path):
    write_images(tmp_path / "d", 3)
    path = lines(tmp_path / "d", [{"image": f"{n}.png", "text": f"image {n}"} for n in range(3)])
    found = samples_of(packing(ImageTextConfig(path=path, held_out=0), tmp_path))
    for number, (text, said, patches) in enumerate(found):
        assert text == f"{FOUR}image {number}$" and said == f"image {number}$"
        assert np.array_equal(patches, patches_of(picture(number, 16, 16), 8))


def test_too_few_samples_to_hold_some_out_say_what_to_set(tmp_path):
    write_images(tmp_path / "d", 1)
    path = lines(tmp_path / "d", [{"image": "0.png", "text": text} for text in ("one", "two", "three")])
    with pytest.raises(DataError, match=r"held_out = 0\.02 chooses none of 3 samples") as raised:
        packing(ImageTextConfig(path=path), tmp_path, split="validation")
    said = re.search(r"set held_out = ([\d.]+) to choose one", str(raised.value))
    assert said is not None
    chosen = packing(ImageTextConfig(path=path, held_out=float(said[1])), tmp_path, split="validation")
    assert len(samples_of(chosen)) == 1


def test_prompt_is_no_target_and_marks_say_where_images_stand(tmp_path):
    write_images(tmp_path / "d", 2)
    row = {"image": ["0.png", "1.png"], "q": "a<image>b<image>c", "a": "yes"}
    path = lines(tmp_path / "d", [row, {"image": None, "q": "text", "a": "alone"}])
    source = ImageTextConfig(path=path, prompt="q", completion="a", held_out=0)
    (text, said, patches), (plain, _, none) = samples_of(packing(source, tmp_path))
    assert text == f"a{FOUR}b{FOUR}cyes$" and said == "yes$" and len(patches) == 8
    assert plain == "textalone$" and len(none) == 0


@pytest.mark.parametrize("way", ["parts", "llava", "plain"])
def test_conversations_have_their_images_before_what_is_said_first(tmp_path, way):
    write_images(tmp_path / "d", 1)
    messages = {
        "parts": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "this"},
        ],
        "llava": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "this"}],
        "plain": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}],
    }[way]
    path = lines(tmp_path / "d", [{"image": "0.png", "messages": messages}])
    source = ImageTextConfig(path=path, messages="messages", template="{role}:{content};", held_out=0)
    ((text, said, _),) = samples_of(packing(source, tmp_path))
    assert text == f"user:{FOUR}what?;assistant:this;$" and said == "this;$"


def test_interleaved_documents_have_images_where_texts_are_null(tmp_path):
    rows = {
        "images": [[None, {"bytes": png(picture(0, 16, 16)), "path": None}, None]],
        "texts": [["one", None, "two"]],
    }
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "obelics"
    folder.mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(folder / "train.parquet")
    source = ImageTextConfig(path=str(folder), images="images", texts="texts", held_out=0)
    ((text, said, patches),) = samples_of(packing(source, tmp_path))
    # the first token of a sample follows nothing, and so is none that is predicted
    assert text == f"one{FOUR}two$" and said == "ne    two$"
    assert np.array_equal(patches, patches_of(picture(0, 16, 16), 8))


@pytest.mark.parametrize("form", ["parquet", "disk"])
def test_columns_of_datasets_are_those_that_datasets_reads(tmp_path, form):
    datasets = pytest.importorskip("datasets")
    images = [Image.fromarray(picture(n, 20 + n, 30)) for n in range(5)]
    made = datasets.Dataset.from_dict({"image": images, "text": [f"number {n}" for n in range(5)]})
    made = made.cast_column("image", datasets.Image())
    folder = tmp_path / form
    if form == "disk":
        made.save_to_disk(folder)
    else:
        folder.mkdir()
        made.to_parquet(folder / "train.parquet")
    found = samples_of(packing(ImageTextConfig(path=str(folder), held_out=0), tmp_path))
    assert [said for _, said, _ in found] == [f"number {n}$" for n in range(5)]
    for row, (_, _, patches) in zip(made, found, strict=True):
        resized = np.asarray(row["image"].resize((16, 16), Image.Resampling.BICUBIC))
        assert np.array_equal(patches, patches_of(resized, 8))


def tar_of(path, samples):
    with tarfile.open(path, "w") as tar:
        for name, raw in samples:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


def test_members_of_a_tar_that_share_a_name_are_a_sample(tmp_path):
    webdataset = [
        ("a/0.png", png(picture(0, 16, 16))),
        ("a/0.txt", b"zero"),
        ("a/1.json", json.dumps({"text": "one"}).encode()),
        ("a/1.0.png", png(picture(1, 16, 16))),
        ("a/1.1.png", png(picture(2, 16, 16))),
        ("a/2.txt", b"alone"),
    ]
    tar_of(tmp_path / "shard-0.tar", webdataset)
    found = samples_of(packing(WebdatasetConfig(path=str(tmp_path / "*.tar"), held_out=0), tmp_path))
    assert [text for text, _, _ in found] == [f"{FOUR}zero$", f"{FOUR * 2}one$", "alone$"]
    expected = np.concatenate([patches_of(picture(n, 16, 16), 8) for n in (1, 2)])
    assert np.array_equal(found[1][2], expected)


def test_held_out_rows_and_training_rows_are_all_rows(tmp_path):
    write_images(tmp_path / "d", 1)
    path = lines(tmp_path / "d", [{"image": "0.png", "text": f"<image>t{n:03}"} for n in range(100)])
    source = ImageTextConfig(path=path, held_out=0.2)
    train, held = (
        {text for text, *_ in samples_of(packing(source, tmp_path, split))}
        for split in ("train", "validation")
    )
    assert not train & held and len(train | held) == 100 and 8 <= len(held) <= 35


def test_damage_is_an_error_or_counted_and_named(tmp_path, capsys):
    write_images(tmp_path / "d", 6)
    (tmp_path / "d" / "5.png").write_bytes(png(picture(5, 16, 16))[:-300])
    path = lines(tmp_path / "d", [{"image": f"{n}.png", "text": f"{n}"} for n in range(6)])
    decode = {"path": path, "held_out": 0, "check": "decode"}
    with pytest.raises(DataError, match=r"rows.jsonl:\d+: a damaged image"):
        packing(ImageTextConfig(**decode), tmp_path)
    found = samples_of(packing(ImageTextConfig(**decode, damaged="skip"), tmp_path))
    assert [said for _, said, _ in found] == [f"{n}$" for n in range(5)]
    assert re.search(r"1 samples with damaged images left out: rows.jsonl:\d+", capsys.readouterr().err)
    late = packing(ImageTextConfig(path=path, held_out=0), tmp_path)
    with pytest.raises(DataError, match=r"image 1 of the sample rows.jsonl:\d+: a damaged image"):
        late.read(np.array([5]))


def test_image_that_was_replaced_after_it_was_looked_at_is_found(tmp_path):
    write_images(tmp_path / "d", 1)
    path = lines(tmp_path / "d", [{"image": "0.png", "text": "a"}])
    packed = packing(ImageTextConfig(path=path, held_out=0), tmp_path)
    (tmp_path / "d" / "0.png").write_bytes(png(picture(9, 16, 16)))
    with pytest.raises(DataError, match="holds another image than when"):
        packed.read(np.array([0]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"image": "0.png", "text": "a<image>b<image>"}, "2 marks <image>, and it has 1 images"),
        ({"image": "none.png", "text": "a"}, "there is no image"),
        ({"image": 3, "text": "a"}, "an image is int"),
        ({"image": "0.png", "other": "a"}, "no row with a text under 'text'"),
        ({"image": "rows.jsonl", "text": "a"}, "no image"),
    ],
)
def test_rows_that_are_no_samples_are_named(tmp_path, row, said):
    write_images(tmp_path / "d", 1)
    path = lines(tmp_path / "d", [row])
    with pytest.raises(DataError, match=re.escape(said)) as raised:
        packing(ImageTextConfig(path=path, held_out=0), tmp_path)
    assert "rows.jsonl:0" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"damaged": "skip"}, 'set check = "decode"'),
        ({"texts": "texts", "text": "text"}, "expected one of them"),
    ],
)
def test_options_that_contradict_are_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ImageTextConfig(path="x", **options)


def test_samples_do_not_depend_on_the_processes_that_make_them(tmp_path):
    write_images(tmp_path / "d", 2)
    for name in ("a", "b", "c"):
        lines(tmp_path / "d", [{"image": "0.png", "text": f"{name}{n}"} for n in range(20)], f"{name}.jsonl")
    source = ImageTextConfig(path=str(tmp_path / "d" / "*.jsonl"), held_out=0)
    digests = set()
    for workers in (1, 3):
        config = DataConfig(
            max_tokens=255,
            sources=[source],
            cache_dir=str(tmp_path / f"cache{workers}"),
            mask_documents=True,
            tokenize_workers=workers,
        )
        digests.add(build_packings(config, "train", items=model().items())[0].digest)
    assert len(digests) == 1


def test_images_mix_with_text_and_shapes(tmp_path):
    write_images(tmp_path / "d", 1)
    (tmp_path / "d" / "text.txt").write_text("some text of a book. " * 200)
    path = lines(tmp_path / "d", [{"image": "0.png", "text": f"t{n}"} for n in range(30)])
    text = FilesConfig(paths=[str(tmp_path / "d" / "text.txt")], held_out=0)
    sources = [ImageTextConfig(path=path, held_out=0), text, ShapesConfig(samples=20)]
    config = DataConfig(
        max_tokens=255, sources=sources, cache_dir=str(tmp_path / "cache"), mask_documents=True
    )
    items = model(positions="image").items()
    loader = build_loader(config, "train", micro_batch=8, global_batch=8, items=items)
    (micro,) = next(iter(loader))
    loader.close()
    has_image = (micro.inputs["image_index"] > 0).any(1)
    assert has_image.any() and not has_image.all()
    assert len(micro.inputs["patches"]) == 4 * len(micro.inputs["grids"])


def test_tiles_have_places_for_each_of_them(tmp_path):
    write_images(tmp_path / "d", 1)
    (tmp_path / "d" / "wide.png").write_bytes(png(picture(1, 40, 80)))
    path = lines(tmp_path / "d", [{"image": "wide.png", "text": "a"}])
    packed = packing(
        ImageTextConfig(path=path, held_out=0), tmp_path, images=ImagesConfig(tiles=4, before="<", after=">")
    )
    assert isinstance(packed, SamplePacking)
    ((text, said, patches),) = samples_of(packed)
    assert text == f"<{FOUR * 3}>a$" and said == "a$"
    whole = Image.fromarray(picture(1, 40, 80))
    wide = np.asarray(whole.resize((32, 16), Image.Resampling.BICUBIC))
    small = np.asarray(whole.resize((16, 16), Image.Resampling.BICUBIC))
    expected = [patches_of(one, 8) for one in (wide[:, :16], wide[:, 16:], small)]
    assert np.array_equal(patches, np.concatenate(expected))


def test_source_without_any_target_is_an_error(tmp_path):
    write_images(tmp_path / "d", 1)
    path = lines(tmp_path / "d", [{"image": "0.png", "messages": [{"role": "user", "content": "what?"}]}])
    with pytest.raises(DataError, match="none of 1 samples has a target"):
        packing(ImageTextConfig(path=path, messages="messages", held_out=0), tmp_path)


def test_karpathys_splits_of_coco_have_a_sample_for_each_caption(tmp_path):
    images = []
    for number, split in enumerate(["train", "val", "restval", "test", "train"]):
        (tmp_path / "val2014").mkdir(exist_ok=True)
        (tmp_path / "val2014" / f"{number}.png").write_bytes(png(picture(number)))
        said = [{"raw": f"caption {number} {nth}"} for nth in range(2)]
        images.append({"filepath": "val2014", "filename": f"{number}.png", "split": split, "sentences": said})
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    source = CocoKarpathyConfig(path=str(tmp_path / "dataset_coco.json"), held_out=0.0)
    train = samples_of(packing(source, tmp_path))
    assert sorted(text.strip("#$") for text, *_ in train) == [
        f"caption {number} {nth}" for number in (0, 2, 4) for nth in range(2)
    ]
    held = samples_of(packing(source, tmp_path, "validation"))
    assert [text.strip("#$") for text, *_ in held] == ["caption 1 0", "caption 1 1"]
    expected = model().items().read(png(picture(1)), model().items().measure(png(picture(1))))["patches"]
    assert (held[0][2] == expected).all()
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(DataError, match="not of the form of dataset_coco"):
        packing(CocoKarpathyConfig(path=str(tmp_path / "other.json")), tmp_path)


@pytest.mark.parametrize(
    ("text", "clip", "said"),
    [
        ("videoid,name\n1,a\n2,a dog, and a cat\n", "{videoid}.mp4", r"row 1: other fields"),
        ("videoid,name\n1\n", "{videoid}.mp4", r"row 0: other fields"),
        ("videoid,name\n1,a\n", "{}.mp4", r"clip = '\{\}\.mp4' is no pattern"),
        ("videoid,name\n1,a\n", "{videoid.x}.mp4", r"is no pattern"),
    ],
)
def test_row_of_a_table_that_is_not_as_its_columns_is_an_error(text, clip, said, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        list(table_rows(Task(file, "t.csv", 0, len(text), len(text)), [], clip))


def test_table_may_begin_with_the_mark_of_utf_8(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("videoid,name\n1,a\n", encoding="utf-8-sig")
    assert [name for name, _ in table_rows(Task(file, "t.csv", 0, 9, 9), [], "{videoid}.mp4")] == ["t.csv:0"]


def test_a_source_without_any_image_says_so_and_names_the_column(tmp_path, capsys):
    path = lines(tmp_path / "a", [{"img": "a.png", "text": "a"}, {"text": "b"}])
    packing(ImageTextConfig(path=path, held_out=0.0), tmp_path)
    assert "none of these samples has an image: nothing is in the column 'image'" in capsys.readouterr().err
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.png").write_bytes(png(picture(0)))
    path = lines(tmp_path / "b", [{"image": "a.png", "text": "a"}, {"text": "b"}])
    packing(ImageTextConfig(path=path, held_out=0.0), tmp_path)
    assert "none of" not in capsys.readouterr().err
