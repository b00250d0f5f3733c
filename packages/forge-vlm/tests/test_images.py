"""Pixels and places of images, against Pillow, the processors of transformers and their position ids."""

import io

import numpy as np
import pytest
from forge_model import DecoderConfig
from forge_model.attention.rope_config import MultiAxisRopeConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.images.config import ImagesConfig
from forge_vlm.images.marks import MarkedTokenizer, with_places
from forge_vlm.images.positions import position_offsets
from forge_vlm.images.processing import decoded, pictures_of, size_of

pytest.importorskip("PIL", reason="the extra `data` is not installed")

from PIL import Image


def file_of(pixels, kind="png", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def random(height, width, channels=3):
    return np.random.default_rng(height * width).integers(0, 255, (height, width, channels), dtype=np.uint8)


TURNED = [
    lambda x: x,
    lambda x: x[:, ::-1],
    lambda x: x[::-1, ::-1],
    lambda x: x[::-1],
    lambda x: x.swapaxes(0, 1),
    lambda x: np.rot90(x, -1),
    lambda x: np.rot90(x, 2).swapaxes(0, 1),
    np.rot90,
    lambda x: x,
    lambda x: x,
]
"""By orientation from 1 on, as EXIF 2.3 says; 9 and 10 mean nothing."""


@pytest.mark.parametrize("orientation", range(1, 11))
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff", "webp"])
def test_image_is_turned_as_its_camera_says_and_measured_so(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = random(8, 24)
    options = {"lossless": True} if kind == "webp" else {}
    raw = file_of(pixels, kind, exif=exif, **options)
    image, wanted = np.asarray(decoded(raw)), TURNED[orientation - 1](pixels)
    assert size_of(raw) == image.shape[:2] == wanted.shape[:2]
    assert kind == "jpeg" or np.array_equal(image, wanted)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_an_image_says_of_its_camera_in_no_known_form_is_damage_or_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x011A] = 72.0
    raw = bytearray(file_of(random(8, 24), "jpeg", exif=exif))
    for place in range(20, len(raw) - 2):
        for byte in (0, 1, 5, 255):
            changed = bytes([*raw[:place], byte, *raw[place + 1 :]])
            try:
                size, image = size_of(changed), decoded(changed)
            except ValueError:
                continue
            assert size == image.size[::-1], (place, byte)


def test_transparent_image_is_laid_on_white_and_grey_is_coloured():
    clear = random(4, 4, 4)
    clear[..., 3] = 0
    assert (np.asarray(decoded(file_of(clear))) == 255).all()
    grey = random(4, 4)[..., 0]
    assert (np.asarray(decoded(file_of(grey))) == grey[..., None]).all()


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_half_a_file_is_damaged_though_its_header_is_whole(kind):
    raw = file_of(random(64, 64), kind)
    with pytest.raises(ValueError, match=r"damaged|no image"):
        decoded(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match="no image"):
        size_of(b"no image at all")


SHAPES = [(48, 48), (31, 77), (90, 20), (7, 300), (224, 225)]


def processors():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    square = {"height": 32, "width": 32}
    return {
        "siglip": (SiglipImageProcessorPil(size=square, resample=3), ImagesConfig()),
        "siglip bilinear": (
            SiglipImageProcessorPil(size=square, resample=2),
            ImagesConfig(resample="bilinear"),
        ),
        "clip": (
            CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=square),
            ImagesConfig(fit="crop"),
        ),
        "dinov2": (
            CLIPImageProcessorPil(size={"shortest_edge": 40}, crop_size=square),
            ImagesConfig(fit="crop", shorter_side=40),
        ),
    }


@pytest.mark.parametrize("name", ["siglip", "siglip bilinear", "clip", "dinov2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_those_of_the_processor_of_transformers(name, shape):
    pytest.importorskip("transformers")
    processor, config = processors()[name]
    image = Image.fromarray(random(*shape))
    (ours,) = pictures_of(image, config.cuts(*shape, (32, 32)), config.resample, (0, 0, 0))
    theirs = processor(images=image, do_normalize=False, return_tensors="np")["pixel_values"][0]
    assert np.abs(ours.transpose(2, 0, 1) / 255 - theirs).max() <= 1 / 255


def smooth(height, width):
    """Colours that change slowly, as in photographs."""
    rows, columns = np.arange(height)[:, None] / height, np.arange(width)[None] / width
    waves = [np.sin(3 * rows + 2 * columns), np.cos(5 * rows - columns), np.sin(4 * columns) + 0 * rows]
    return (np.stack(waves, -1) * 127 + 128).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("make", "names"), [(random, ["siglip bilinear"]), (smooth, ["siglip", "clip", "dinov2"])]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_those_of_the_processor_of_torchvision(make, names, shape):
    """Bicubic Pillow rounds and clamps between rows and columns, torchvision only at the end.

    On noise their own processors are up to 21/255 apart; where colours change slowly, both are ours.
    """
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    fast = {"siglip": transformers.SiglipImageProcessor, "clip": transformers.CLIPImageProcessor}
    for name in names:
        slow, config = processors()[name]
        keys = {
            key: value for key, value in slow.to_dict().items() if key in ("size", "crop_size", "resample")
        }
        processor = fast["siglip" if "siglip" in name else "clip"](**keys)
        image = Image.fromarray(make(*shape))
        (ours,) = pictures_of(image, config.cuts(*shape, (32, 32)), config.resample, (0, 0, 0))
        theirs = processor(images=image, do_normalize=False, return_tensors="np")["pixel_values"][0]
        assert np.abs(ours.transpose(2, 0, 1) / 255 - theirs).max() <= 1.001 / 255, name


def test_padded_image_stands_in_the_middle_of_the_mean_colour():
    config = ImagesConfig(fit="pad")
    (found,) = pictures_of(
        Image.fromarray(np.full((16, 32, 3), 200, np.uint8)),
        config.cuts(16, 32, (32, 32)),
        "bicubic",
        (1, 2, 3),
    )
    assert (found[8:24] == 200).all() and (found[:8] == (1, 2, 3)).all() and (found[24:] == (1, 2, 3)).all()


@pytest.mark.parametrize("shape", [(100, 100), (50, 100), (300, 100), (768, 1024), (448, 448), (2000, 90)])
@pytest.mark.parametrize("tiles", [2, 6, 12])
def test_tiles_are_chosen_as_by_internvl(shape, tiles):
    height, width = shape
    # `find_closest_aspect_ratio` of InternVL's preprocessing as a loop
    best, found = float("inf"), (1, 1)
    grids = {
        (i, j) for n in range(1, tiles + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= n
    }
    for columns, rows in sorted(grids, key=lambda one: one[0] * one[1]):
        difference = abs(width / height - columns / rows)
        if difference < best:
            best, found = difference, (rows, columns)
        elif difference == best and width * height > 0.5 * 32 * 32 * columns * rows:
            found = (rows, columns)
    cuts = ImagesConfig(tiles=tiles).cuts(height, width, (32, 32))
    assert len(cuts) == (1 if found == (1, 1) else found[0] * found[1] + 1)
    assert cuts[0].resized == (32 * found[0], 32 * found[1])


def test_positions_are_those_of_qwen2_vl():
    """`get_rope_index` of transformers, over two images and text around them."""
    transformers = pytest.importorskip("transformers")
    import torch
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    vision = {"spatial_merge_size": 2, "depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 2}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"intermediate_size": 16, "vocab_size": 50, "rope_parameters": {"rope_type": "default"}}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=40, vision_start_token_id=41, video_token_id=42
    )
    with torch.device("meta"):
        model = Qwen2VLModel(config)
    sizes = [(1, 2, 3), (3, 1, 2), (1, 4, 1)]
    ids, places, images = [1, 2], [0, 0], [0, 0]
    for number, (frames, rows, columns) in enumerate(sizes, 1):
        count = frames * rows * columns
        ids += [41, *[42 if frames > 1 else 40] * count, 3, 4, 5]
        places += [0, *range(max(places) + 1, max(places) + 1 + count), 0, 0, 0]
        images += [0, *[number] * count, 0, 0, 0]
    grid = torch.tensor([[frames, 2 * rows, 2 * columns] for frames, rows, columns in sizes])
    tokens = torch.tensor([ids])
    kinds = (tokens == 40).int() + 2 * (tokens == 42).int()
    theirs, _ = model.get_rope_index(
        tokens, mm_token_type_ids=kinds, image_grid_thw=grid[::2], video_grid_thw=grid[1:2]
    )
    given = np.array(places), np.array(images), [[one] for one in sizes], np.zeros(len(ids))
    found = position_offsets("grid", *given)["position_offsets"] + np.arange(len(ids))
    assert np.array_equal(found, theirs[:, 0].numpy())
    at = (position_offsets("image", *given)["position_offsets"] + np.arange(len(ids)))[0]
    assert at.tolist() == [0, 1, 2, *[3] * 6, 4, 5, 6, 7, *[8] * 6, 9, 10, 11, 12, *[13] * 4, 14, 15, 16]


def test_offsets_begin_anew_in_each_document():
    images = np.array([1, 1, 0, 0, 0, 2, 2, 0])
    places = np.array([1, 2, 0, 0, 0, 3, 4, 0])
    found = position_offsets("image", places, images, [[(1, 1, 2)]] * 2, np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    assert found["position_offsets"].tolist() == [[0, -1, -1, -1, 0, 0, -1, -1]]


def test_axes_of_positions_without_a_rotation_by_them_are_refused():
    decoder = {"vocab_size": 257, "dim": 64, "num_layers": 1, "max_tokens": 128}
    with pytest.raises(ValueError, match=r'set rope = \{ type = "mrope"'):
        VisionLanguageConfig(decoder=DecoderConfig(**decoder), positions="grid")
    made = DecoderConfig(**decoder, rope=MultiAxisRopeConfig(sections=(2, 1, 1)))
    assert VisionLanguageConfig(decoder=made, encoder=ViTConfig(), positions="grid").positions == "grid"


class _Metaspace:
    """A tokenizer that writes a space before each text, as that of Llama 2 does."""

    vocab_size, eos_id, control_tokens = 300, 2, ()

    def __init__(self, native=False):
        self.control_tokens = ("<image>",) if native else ()

    def encode(self, text):
        if text == "<image>":
            return np.array([299])
        parts = text.split("<image>") if self.control_tokens else [text]
        found = [0]
        for number, part in enumerate(parts):
            found += ([299] if number else []) + [ord(char) for char in part]
        return np.array(found)


def test_text_with_images_is_encoded_whole_by_a_tokenizer_that_has_the_mark():
    whole, parts = MarkedTokenizer(_Metaspace(native=True)), MarkedTokenizer(_Metaspace())
    a, b = ord("a"), ord("b")
    assert whole.encode("a<image>b").tolist() == [0, a, 300, b]
    assert parts.encode("a<image>b").tolist() == [0, a, 300, 0, b]
    tokens, of = with_places(np.array([a, 300, b]), 300, [["<", 2, ">"]], _Metaspace())
    assert tokens.tolist() == [a, 0, ord("<"), -1, -1, 0, ord(">"), b]
    assert of.tolist() == [0, *[1] * 6, 2]
