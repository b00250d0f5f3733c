"""Videos as frames: times, counts and merged visual tokens, against a plain reading."""

import io

import numpy as np
import pytest
import torch
from forge_model import DecoderConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.frames import frame_by_frame, merged
from forge_vlm.images.video import VideoConfig, frames_of, is_video, measured

av = pytest.importorskip("av", reason="the extra `video` is not installed")
pytest.importorskip("PIL", reason="the extra `data` is not installed")


def video(frames, rate=4, size=32):
    """A film whose frame k is grey of the value 8 k."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(frames):
            pixels = np.full((size, size, 3), 8 * number, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 15]), (4, [0, 5, 10, 15]), (16, range(16))]
)
def test_frames_stand_at_even_distances_with_the_first_and_the_last(count, expected):
    found = [frame.mean() / 8 for frame in frames_of(video(16), count)]
    assert np.abs(np.array(found) - np.array(list(expected))).max() < 0.4


def test_number_of_frames_follows_from_the_length_and_the_bounds():
    raw = video(16)
    assert is_video(raw) and not is_video(b"\x89PNG\r\n\x1a\n0000")
    for options, count in (
        ({}, 4),
        ({"frames_per_s": 0.5}, 2),
        ({"max_frames": 3}, 3),
        ({"min_frames": 6}, 6),
    ):
        assert measured(raw, VideoConfig(**options)) == (count, 32, 32)
    short = frames_of(video(2), 5)
    assert len(short) == 5
    with pytest.raises(ValueError, match="damaged video"):
        measured(raw[:200], VideoConfig())
    with pytest.raises(ValueError, match="above"):
        VideoConfig(min_frames=9)


def test_merged_frames_are_averages_of_those_that_follow_each_other():
    grids = torch.tensor([[3, 2, 2], [1, 1, 2], [4, 1, 2]])
    features = torch.randn(3 * 4 + 2 + 4 * 2, 5)
    one, other, last = features.split([12, 2, 8])
    expected = torch.cat(
        [(one[:4] + one[4:8]) / 2, one[8:], other, (last[:2] + last[2:4]) / 2, (last[4:6] + last[6:]) / 2]
    )
    found = merged(features, grids, lambda rows, columns: rows * columns, 2)
    torch.testing.assert_close(found, expected)
    assert frame_by_frame(grids).tolist() == [[1, 2, 2]] * 3 + [[1, 1, 2]] + [[1, 1, 2]] * 4


def model(**options):
    decoder = DecoderConfig(
        vocab_size=257, dim=32, num_layers=2, max_tokens=128, attention=GroupedQueryConfig(num_heads=2)
    )
    encoder = ViTConfig(image_size=16, dim=16, num_heads=2)
    return VisionLanguageConfig(decoder=decoder, encoder=encoder, **options)


def test_model_sees_a_video_as_the_average_of_its_frames():
    config = model(video=VideoConfig(merge=2))
    built = config.build()
    initialize(built, 0)
    prompt = config.prompt("what?", [video(16)], _Bytes())
    inputs = {name: torch.from_numpy(array) for name, array in prompt.inputs.items()}
    assert inputs["grids"].tolist() == [[4, 2, 2]] and int(inputs["image_places"]) == 8
    tokens = torch.tensor([prompt.tokens])
    features = built.visual_tokens(tokens.device, inputs["patches"], inputs["grids"])
    frames = built.connector(built.encoder(inputs["patches"], torch.tensor([[1, 2, 2]] * 4)), None)
    torch.testing.assert_close(features, frames.view(2, 2, 4, 32).mean(1).flatten(0, 1))
    assert inputs["image_index"].max() == 8 and torch.isfinite(built(tokens, **inputs)).all()


def test_video_that_the_model_does_not_read_or_has_no_room_for_is_refused():
    with pytest.raises(ValueError, match=r"set model\.video"):
        model().prompt("what?", [video(4)], _Bytes())
    with pytest.raises(ValueError, match=r"up to 256 visual tokens \(64 frames\)"):
        model(video=VideoConfig(max_frames=64))


class _Bytes:
    vocab_size, eos_id, bos_ids = 257, 256, ()

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8)


def test_rows_of_webvid_are_clips_with_captions_and_lost_ones_are_left_out(tmp_path, capsys):
    pytest.importorskip("forge_data")
    from forge_data import DataConfig
    from forge_data.packing.build import build_packings
    from forge_vlm.sources.published import WebVidConfig

    (tmp_path / "123").mkdir()
    for name in ("1234", "1235"):
        (tmp_path / "123" / f"{name}.mp4").write_bytes(video(16)[: None if name == "1234" else 300])
    rows = "".join(f'{name},"a caption, {name}"\n' for name in ("1234", "1235", "1236"))
    (tmp_path / "0000.csv").write_text(f"videoid,name\n{rows}")
    options = {"path": str(tmp_path / "*.csv"), "clip": "{videoid:.3}/{videoid}.mp4", "held_out": 0.0}
    source = WebVidConfig(**options, check="decode", damaged="skip")
    how = {"max_tokens": 127, "packing": "pad", "cache_dir": str(tmp_path / "cache")}
    items = model(video=VideoConfig()).items()
    (packed,) = build_packings(DataConfig(sources=[source], **how), "train", items=items).values()
    read = packed.read(np.array([0]))
    text = bytes(int(c) for c in read.tokens[0][16:-1] if c < 256).decode()
    assert len(packed) == 1 and text == "a caption, 1234"
    assert read.ragged["grids"].values.tolist() == [[4, 2, 2]]
    said = capsys.readouterr().err
    assert "2 samples with damaged images left out" in said and "1236.mp4" in said
    with pytest.raises(Exception, match="has no column 'page_dir'"):
        wrong = WebVidConfig(path=str(tmp_path / "*.csv"), held_out=0.0)
        build_packings(DataConfig(sources=[wrong], **how), "train", items=items)


@pytest.mark.parametrize("row", ["1,a caption, unquoted", "1"], ids=["more", "fewer"])
def test_rows_of_webvid_with_other_columns_than_the_head_are_named(tmp_path, row):
    pytest.importorskip("forge_data")
    from forge_data.error import DataError
    from forge_data.sources.documents import Task
    from forge_vlm.sources.published import table_rows

    (file := tmp_path / "0.csv").write_text(f"videoid,name\n0,fine\n{row}\n")
    with pytest.raises(DataError, match=r"0\.csv, row 1: other fields than columns"):
        list(table_rows(Task(file, "0.csv", 0, 1, 1), [], clip="{videoid}.mp4"))


def test_damage_of_any_kind_is_told_as_such():
    raw, random = video(8), np.random.default_rng(0)
    for _ in range(400):
        changed = bytearray(raw)
        for place in random.integers(12, len(raw), 4):
            changed[place] = random.integers(256)
        try:
            count, height, width = measured(bytes(changed), VideoConfig())
            assert len(frames_of(bytes(changed), count)) == count and height and width
        except ValueError:
            pass


@pytest.mark.parametrize("streaming", [False, True])
def test_where_clips_are_belongs_to_what_is_read(tmp_path, streaming):
    """Else samples that were made with another pattern would be taken from the cache."""
    pytest.importorskip("forge_data")
    from forge_data import DataConfig
    from forge_data.packing.build import build_packings, build_streams
    from forge_vlm.sources.published import WebVidConfig

    (tmp_path / "other").mkdir()
    for folder, frames in ((tmp_path, 16), (tmp_path / "other", 12)):
        (folder / "1.mp4").write_bytes(video(frames))
    (tmp_path / "0.csv").write_text("videoid,name\n1,a caption\n")
    items, found = model(video=VideoConfig()).items(), set()
    for clip in ("{videoid}.mp4", "other/{videoid}.mp4"):
        options = {"path": str(tmp_path / "0.csv"), "clip": clip, "held_out": 0.0, "streaming": streaming}
        data = DataConfig(
            sources=[WebVidConfig(**options)],
            max_tokens=127,
            mask_documents=True,
            cache_dir=str(tmp_path / "cache"),
        )
        made = (
            build_streams(data, 1, {}, items=items)
            if streaming
            else build_packings(data, "train", items=items)
        )
        found.add(made[0].digest)
    assert len(found) == 2
