"""Streams of images: every sample once a pass, whole, the same for any number of ranks and after a stop."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("forge_data", reason="the extra `data` is not installed")

from forge_data import DataConfig, DataError, build_loader
from forge_model import DecoderConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig
from forge_vlm.sources.columns import ImageTextConfig
from PIL import Image

ROWS, FILES = 6, 8


def png(number):
    pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def folder_of(path, damaged=()):
    """Files of rows; row k of all says `k=<k>;` as often as k % 3 + 1, and has as many images."""
    path.mkdir()
    for number in range(FILES):
        rows = []
        for k in range(number * ROWS, (number + 1) * ROWS):
            names = [f"{k}-{nth}.png" for nth in range(k % 3 + 1)]
            for nth, name in enumerate(names):
                (path / name).write_bytes(png(100 * k + nth)[: 60 if k in damaged else None])
            rows.append(json.dumps({"image": names, "text": f"k={k};" * len(names)}) + "\n")
        (path / f"{number}.jsonl").write_text("".join(rows))
    return str(path / "*.jsonl")


def items(fusion=None):
    decoder = DecoderConfig(vocab_size=257, dim=32, num_layers=1, max_tokens=96)
    options = {} if fusion is None else {"fusion": fusion}
    return VisionLanguageConfig(decoder=decoder, encoder=ViTConfig(image_size=16), **options).items()


def loader(path, tmp_path, fusion=None, data=None, **options):
    source = ImageTextConfig(path=path, streaming=True, **(data or {}))
    config = DataConfig(
        max_tokens=95, sources=[source], mask_documents=True, cache_dir=str(tmp_path / "cache")
    )
    how = {"micro_batch": 2, "global_batch": 4, "items": items(fusion)} | options
    return build_loader(config, "train", **how)


def samples_of(micro):
    """Of each sequence, the numbers of its rows; text and images must belong together."""
    found, image = [], 0
    for row, tokens in enumerate(micro.inputs["tokens"]):
        ids, of = [], micro.inputs["doc_ids"][row]
        places, index = micro.inputs["image_places"][row], micro.inputs["image_index"][row]
        images = int(places) // 4  # 2 x 2 patches
        for document in range(int(of.max()) + 1):
            text = "".join(chr(c) for c in tokens[(of == document) & (index == 0)].tolist() if c < 256)
            if not text:
                continue
            k = int(text[2 : text.index(";")])
            assert text == f"k={k};" * (k % 3 + 1), "whole"
            for nth in range(k % 3 + 1):
                pixels = micro.inputs["patches"][4 * image : 4 * image + 4].numpy()
                made = items().read(png(100 * k + nth), items().measure(png(100 * k + nth)))
                assert (pixels == made["patches"]).all(), "its own images, in their order"
                image, images = image + 1, images - 1
            ids.append(k)
        assert images == 0
        found.append(ids)
    return found


def steps(batches, count):
    """The numbers of the rows of each sequence, a step after the other."""
    taken = iter(batches)
    return [[one for micro in next(taken) for one in samples_of(micro)] for _ in range(count)]


def test_every_sample_is_read_once_a_pass_whole_and_in_another_order(tmp_path):
    path = folder_of(tmp_path / "rows")
    read = steps(loader(path, tmp_path), 40)
    lanes = [[k for step in read for row in step[half] for k in row] for half in (slice(2), slice(2, 4))]
    assert sorted(set(lanes[0]) | set(lanes[1])) == list(range(ROWS * FILES))
    for lane in lanes:  # eight parts are dealt to two lanes
        passes = [lane[at : at + 4 * ROWS] for at in range(0, len(lane) - 4 * ROWS, 4 * ROWS)]
        assert len(passes) >= 2 and all(sorted(one) == sorted(set(lane)) for one in passes)
        assert passes[0] != passes[1] != sorted(passes[1])


@pytest.mark.parametrize("fusion", [None, CrossAttentionConfig(layers=":", max_visual_tokens=20)])
def test_ranks_and_stops_change_nothing(tmp_path, fusion):
    path = folder_of(tmp_path / "rows")
    whole = loader(path, tmp_path, fusion)
    taken, states = iter(whole), []
    alone = []
    for _ in range(9):
        alone.append([(m.inputs["tokens"], m.inputs["patches"]) for m in next(taken)])
        states.append(whole.state())
    later = iter(loader(path, tmp_path, fusion, first_sample=5 * 4, state=states[4]))
    for step in range(5, 9):
        for micro, (tokens, patches) in zip(next(later), alone[step], strict=True):
            assert (micro.inputs["tokens"] == tokens).all() and (micro.inputs["patches"] == patches).all()
    ranks = [iter(loader(path, tmp_path, fusion, rank=rank, world_size=2)) for rank in (0, 1)]
    for step in range(6):
        for rank, batches in enumerate(ranks):
            (micro,) = next(batches)
            assert (micro.inputs["tokens"] == alone[step][rank][0]).all()
            assert (micro.inputs["patches"] == alone[step][rank][1]).all()


def test_damaged_images_are_an_error_or_left_out_and_named(tmp_path, capsys):
    path = folder_of(tmp_path / "rows", damaged=(7, 20))
    with pytest.raises(DataError, match=r"\d\.jsonl"):
        steps(loader(path, tmp_path), 40)
    skipping = {"check": "decode", "damaged": "skip"}
    read = [k for step in steps(loader(path, tmp_path, data=skipping), 40) for row in step for k in row]
    assert set(read) == set(range(ROWS * FILES)) - {7, 20}
    said = capsys.readouterr().err
    assert "1.jsonl" in said and "3.jsonl" in said and "left out" in said


def test_column_without_images_is_named_long_before_the_end_of_a_large_file(tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    for number in range(FILES):
        lines = (json.dumps({"text": f"text {number} {k}"}) + "\n" for k in range(2000))
        (tmp_path / "rows" / f"{number}.jsonl").write_text("".join(lines))
    batches = iter(loader(str(tmp_path / "rows" / "*.jsonl"), tmp_path))
    for _ in range(20):
        next(batches)
    assert capsys.readouterr().err.count("none of the first 64 samples has an image") == 1


@pytest.mark.parametrize("column", ["image", "picture"])
def test_column_without_images_is_named_once(tmp_path, capsys, column):
    path = folder_of(tmp_path / "rows")
    batches = iter(loader(path, tmp_path, data={"images": column}))
    for _ in range(20):
        next(batches)
    assert capsys.readouterr().err.count("nothing is in the column 'picture'") == (column == "picture")


def test_what_cannot_be_streamed_is_refused(tmp_path):
    path = folder_of(tmp_path / "rows")
    with pytest.raises(DataError, match="mask_documents = true"):
        source = ImageTextConfig(path=path, streaming=True)
        config = DataConfig(max_tokens=95, sources=[source], cache_dir=str(tmp_path / "cache"))
        build_loader(config, "train", micro_batch=2, global_batch=4, items=items())
    with pytest.raises(DataError, match="a model that takes none"):
        loader(path, tmp_path, items=None)
    with pytest.raises(DataError, match="never cut"):
        steps(loader(path, tmp_path, CrossAttentionConfig(layers=":", max_visual_tokens=8)), 9)
    everything = folder_of(tmp_path / "bad", damaged=range(ROWS * FILES))
    with pytest.raises(DataError, match="makes a sample"):
        steps(loader(everything, tmp_path, data={"check": "decode", "damaged": "skip"}), 1)


def test_file_that_cannot_be_read_now_is_no_damage(tmp_path, monkeypatch):
    """One rank may read it, and another not: they would go on with different samples."""
    path, real = folder_of(tmp_path / "rows"), Path.open

    def flaky(self, *arguments, **options):
        if self.name == "5-0.png":
            raise OSError(5, "Input/output error")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", flaky)
    with pytest.raises(DataError, match=r"5-0\.png cannot be read: \[Errno 5\]"):
        steps(loader(path, tmp_path, data={"check": "decode", "damaged": "skip"}), 40)
