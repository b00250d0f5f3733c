"""Whole models against those of transformers: logits, generation, weights and keys in both directions."""

import json
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from forge_config import ConfigError, plain
from forge_model import ModelError
from forge_model.generation.generate import Sampling, generate
from forge_vlm import VisionLanguageConfig
from forge_vlm.fusion.config import JointConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig
from forge_vlm.hf.models import model_from_hf, whole_family
from forge_vlm.images.config import ImagesConfig
from forge_vlm.images.processing import patches_of
from msgspec.structs import replace
from torch.overrides import TorchFunctionMode

transformers = pytest.importorskip("transformers")

IMAGE = 49
TEXT = {"num_hidden_layers": 2, "vocab_size": 50, "max_position_embeddings": 96, "intermediate_size": 24}
TEXT |= {"attn_implementation": "eager"}
LLAMA = TEXT | {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA = TEXT | {"model_type": "gemma", "hidden_size": 16, "num_attention_heads": 3, "num_key_value_heads": 1}
GEMMA |= {"head_dim": 6}
A = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 3}
B = {"hidden_size": 15, "intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 5}
CLIP = {"model_type": "clip_vision_model", "image_size": 14, "patch_size": 4}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 14, "patch_size": 4}
MLLAMA = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "attention_heads": 3}
MLLAMA |= {"num_global_layers": 1, "intermediate_layers_indices": [1], "image_size": 12, "patch_size": 4}
IDEFICS3 = {"image_size": 16, "patch_size": 4}


def llava(vision, text, **more):
    return "Llava", {"vision_config": vision, "text_config": text, "image_token_index": IMAGE} | more


def paligemma(vision, text):
    keys = {"vision_config": vision, "text_config": text, "image_token_index": IMAGE}
    return "PaliGemma", keys | {"projection_dim": text["hidden_size"]}


def idefics3(vision, text, kind="Idefics3", **more):
    return kind, {"vision_config": vision, "text_config": text, "image_token_id": IMAGE} | more


def mllama(vision, layers, crossed, **text):
    tiles, width = vision["max_num_tiles"], vision["hidden_size"]
    shapes = [[a, b] for a in range(1, tiles + 1) for b in range(1, tiles + 1) if a * b <= tiles]
    beside = vision["intermediate_layers_indices"]
    vision |= {"supported_aspect_ratios": shapes, "vision_output_dim": width * (1 + len(beside))}
    text = LLAMA | {"model_type": "mllama_text_model", "pad_token_id": 0} | text
    text |= {"num_hidden_layers": layers, "cross_attention_layers": crossed}
    return "Mllama", {"vision_config": vision, "text_config": text, "image_token_index": 53}


GEMMA2 = GEMMA | {
    "model_type": "gemma2",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "query_pre_attn_scalar": 5,
    "sliding_window": 7,
}
CASES = {
    "llava": llava(CLIP | A, LLAMA),
    "llava-layers": llava(
        CLIP | B | {"image_size": 9, "patch_size": 3, "hidden_act": "gelu"},
        LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
        vision_feature_layer=[0, -1],
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
    ),
    "llava-siglip": llava(
        SIGLIP | A,
        LLAMA | {"model_type": "mistral", "sliding_window": 9, "num_attention_heads": 2},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu_pytorch_tanh",
    ),
    "paligemma": paligemma(SIGLIP | A, GEMMA),
    "paligemma-wide": paligemma(SIGLIP | B | {"image_size": 9}, GEMMA | {"hidden_size": 36}),
    "paligemma2": paligemma(SIGLIP | A | {"image_size": 13, "patch_size": 3}, GEMMA2),
    "paligemma2-uncapped": paligemma(
        SIGLIP | A, GEMMA2 | {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    ),
    "llava-gemma2": llava(CLIP | A, GEMMA2 | {"final_logit_softcapping": 0.5}),
    "llava-gemma3": llava(
        CLIP | A,
        GEMMA2 | {"model_type": "gemma3_text", "final_logit_softcapping": 0.5, "rope_parameters": None},
    ),
    "idefics3": idefics3(IDEFICS3 | A, LLAMA),
    "idefics3-gemma2": idefics3(
        IDEFICS3 | A, GEMMA2 | {"final_logit_softcapping": 0.5, "attn_logit_softcapping": None}
    ),
    "idefics3-scale": idefics3(
        IDEFICS3 | B | {"image_size": 19, "patch_size": 3}, LLAMA, scale_factor=3, tie_word_embeddings=True
    ),
    "mllama": mllama(MLLAMA | {"max_num_tiles": 3}, 4, [1]),
    "mllama-first": mllama(
        MLLAMA
        | {
            "hidden_size": 15,
            "attention_heads": 5,
            "num_global_layers": 2,
            "max_num_tiles": 2,
            "intermediate_layers_indices": [1, 0, 2],
            "num_hidden_layers": 3,
        },
        5,
        [0, 3],
    ),
    "mllama-every": mllama(
        MLLAMA | {"max_num_tiles": 6, "image_size": 8},
        4,
        [0, 2],
        num_attention_heads=2,
        hidden_size=24,
        num_key_value_heads=1,
    ),
    "smolvlm": idefics3(IDEFICS3 | A | {"image_size": 34}, LLAMA, "SmolVLM", scale_factor=4),
}
DTYPES = {torch.float32: 1e-4, torch.float64: 1e-9}


class Widened(TorchFunctionMode):
    """Code of transformers that asks for float32 gets float64: see `Widened` of forge-model's test_hf.py."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def widened(dtype):
    return Widened() if dtype == torch.float64 else nullcontext()


def theirs_of(case, dtype=torch.float32):
    kind, keys = CASES[case]
    make = getattr(transformers, f"{kind}ForConditionalGeneration")
    config = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(keys)))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with widened(dtype):
        model = make(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model.to(dtype)


def tensors_in(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def config_of(folder):
    """What `model.from` makes of a folder."""
    return VisionLanguageConfig.expand({"from": str(folder)})


def ours_of(theirs, folder):
    theirs.save_pretrained(folder)
    config = model_from_hf(json.loads((folder / "config.json").read_text()))
    form = config.hugging_face()
    if isinstance(config.fusion, CrossAttentionConfig):
        room = 4 * config.fusion.max_visual_tokens
        config = replace(config, fusion=replace(config.fusion, max_visual_tokens=room))
    form.require(json.loads((folder / "config.json").read_text()), "here")
    model = config.build().to(next(theirs.parameters()).dtype)
    found = form.ours(tensors_in(folder))
    missing, extra = model.load_state_dict({name: found[name] for name in found}, strict=False)
    assert set(missing) <= {"decoder.head.weight"} and not extra
    return model.eval()


def batch_of_canvases(config, images):
    """As `batch`, for Mllama: images come first, of other canvases each."""
    torch.manual_seed(1)
    encoder, size = config.encoder, config.encoder.image_size
    shapes = [encoder.canvases[-1 - number % len(encoder.canvases)] for number in range(sum(images))]
    pixels = [
        torch.randint(256, (rows * size, columns * size, 3), dtype=torch.uint8) for rows, columns in shapes
    ]
    grids = torch.tensor([[1, rows * encoder.side, columns * encoder.side] for rows, columns in shapes]).view(
        -1, 3
    )
    counts = [config.picture_tokens(rows, columns) for _, rows, columns in grids.tolist()]
    rows, windows, used, sent = [], [], [], 0
    for number in images:
        row = [IMAGE + 4, *([] if number < 2 else [IMAGE + 4, 5, 6]), *([IMAGE + 4, 8] if number > 2 else [])]
        rows.append(row[: None if number else 0] + torch.randint(1, IMAGE, (3 + number,)).tolist())
        marks = np.array(rows[-1]) > IMAGE
        places = np.where(marks, marks.cumsum(), 0)
        of_row = counts[sent : (sent := sent + number)]
        assert places.max() == number
        arrays = config.fusion.arrays(places, places, np.zeros(len(places), np.int64), of_row)
        windows.append(arrays["image_window"])
        used.append(arrays["image_places"])
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    window = [np.pad(one, ((0, 0), (longest - one.shape[1], 0))) for one in windows]
    marks = tokens > IMAGE
    cut = [torch.tensor(patches_of(one.numpy(), encoder.patch_size)) for one in pixels]
    given = {
        "patches": torch.cat([torch.empty(0, 3 * encoder.patch_size**2, dtype=torch.uint8), *cut]),
        "grids": grids,
        "image_index": torch.where(marks, marks.cumsum(1), 0),
        "image_places": torch.tensor(np.array(used)),
        "image_window": torch.tensor(np.array(window)),
    }
    return [[one % IMAGE for one in row] for row in rows], tokens, mask, pixels, given


def their_canvases(config, tokens, mask, pixels, images, dtype):
    """What `MllamaProcessor` makes of them."""
    from transformers.models.mllama import processing_mllama as theirs

    encoder, size = config.encoder, config.encoder.image_size
    shape = len(images), max(images), encoder.max_tiles
    tiles, there = (
        torch.zeros(*shape, 3, size, size, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.int64),
    )
    numbers, left, counts = torch.zeros(shape[:2], dtype=torch.int64), list(pixels), []
    there[..., 0] = 1
    for row, number in enumerate(images):
        counts.append([])
        for place in range(number):
            image = (left.pop(0) / 255 - torch.tensor(encoder.mean)) / torch.tensor(encoder.std)
            high, wide = image.shape[0] // size, image.shape[1] // size
            cut = image.unflatten(0, (high, size)).unflatten(2, (wide, size)).permute(0, 2, 4, 1, 3)
            tiles[row, place, : high * wide] = cut.flatten(0, 1)
            there[row, place, : high * wide] = 1
            numbers[row, place] = 1 + encoder.canvases.index((high, wide))
            counts[-1].append(high * wide)
    sparse = [theirs.get_cross_attention_token_mask(row, IMAGE + 4) for row in tokens.tolist()]
    dense = theirs.convert_sparse_cross_attention_mask_to_dense(sparse, counts, shape[2], tokens.shape[1])
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "pixel_values": tiles.to(dtype),
        "aspect_ratio_ids": numbers,
        "aspect_ratio_mask": there,
        "cross_attention_mask": torch.tensor(dense).to(dtype),
    }


def batch(config, images):
    """Rows with so many images each, of different lengths, padded on the left: [B, T] and their inputs."""
    if isinstance(config.fusion, CrossAttentionConfig):
        return batch_of_canvases(config, images)
    torch.manual_seed(1)
    count, side, patch = config.image_tokens, config.encoder.image_size, config.encoder.patch_size
    rows, index = [], []
    for number in images:
        row, places = torch.randint(1, IMAGE, (2,)).tolist(), [0, 0]
        for image in range(number):
            row += [IMAGE] * count + torch.randint(1, IMAGE, (1 + image,)).tolist()
            places += [1 + image * count + one for one in range(count)] + [0] * (1 + image)
        rows.append(row)
        index.append(places)
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    places = torch.tensor([[0] * (longest - len(row)) + row for row in index])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    pixels = torch.randint(256, (sum(images), side, side, 3), dtype=torch.uint8)
    grid = config.encoder.side
    given = {
        "patches": torch.cat([torch.tensor(patches_of(one.numpy(), patch)) for one in pixels])
        if len(pixels)
        else torch.empty(0, 3 * patch * patch, dtype=torch.uint8),
        "grids": torch.tensor([[1, grid, grid]] * len(pixels)).view(-1, 3),
        "image_index": places,
        "image_places": torch.tensor(images) * count,
    }
    if config.fusion == JointConfig(attention="prefix"):
        given["span_ids"] = mask.clone()
    return rows, tokens, mask, pixels, given


def their_inputs(theirs, config, tokens, mask, pixels, images):
    dtype = next(theirs.parameters()).dtype
    if isinstance(config.fusion, CrossAttentionConfig):
        if sum(images):
            return their_canvases(config, tokens, mask, pixels, images, dtype)
        return {"input_ids": tokens, "attention_mask": mask}
    values = (pixels.float() / 255 - torch.tensor(config.encoder.mean)) / torch.tensor(config.encoder.std)
    values = values.to(dtype).permute(0, 3, 1, 2)
    given = {"input_ids": tokens, "attention_mask": mask}
    if "PaliGemma" in type(theirs).__name__:
        given["token_type_ids"] = torch.zeros_like(tokens)
    if not len(pixels):
        return given
    if "Llava" in type(theirs).__name__ or "PaliGemma" in type(theirs).__name__:
        return given | {"pixel_values": values}
    padded = torch.zeros(len(images), max(images), *values.shape[1:], dtype=dtype)
    for row, part in enumerate(values.split(list(images))):
        padded[row, : len(part)] = part
    return given | {"pixel_values": padded}


@pytest.mark.parametrize("images", [(0, 0), (1,), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, dtype, images, tmp_path):
    if "mllama" in case:
        images = tuple(number or min(1, sum(images)) for number in images)  # see below
    theirs = theirs_of(case, dtype)
    ours = ours_of(theirs, tmp_path / "theirs")
    _, tokens, mask, pixels, given = batch(ours.config, images)
    sent = their_inputs(theirs, ours.config, tokens, mask, pixels, images)
    with torch.no_grad(), widened(dtype):
        expected = theirs(**sent).logits
    padding = (mask == 0).sum(1)
    cache = ours.new_cache(tokens.shape[1], padding, torch.device("cpu"))
    with torch.no_grad():
        found = ours(tokens.where(tokens <= IMAGE, 0), cache=cache, **given)
    real = mask.bool()
    assert expected[real].std() > 0.01
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize("images", [(2, 0, 3, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_greedy_generation_is_that_of_transformers(case, images, tmp_path):
    theirs = theirs_of(case, torch.float64)
    ours = ours_of(theirs, tmp_path / "theirs")
    if "mllama" in case:
        images = tuple(number or min(1, sum(images)) for number in images)  # see below
    rows, tokens, mask, pixels, given = batch(ours.config, images)
    sent = their_inputs(theirs, ours.config, tokens, mask, pixels, images)
    with torch.no_grad(), Widened():
        expected = theirs.generate(
            **sent,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=None,
            use_cache="mllama-" not in case,  # theirs counts tokens by its first layer, a gated one here
        )[:, tokens.shape[1] :]
    written = generate(ours, rows, 12, Sampling(temperature=0), inputs=given)
    assert written == expected.tolist()


@pytest.mark.parametrize("case", CASES)
def test_export_is_loaded_by_transformers_and_computes_the_same(case, tmp_path):
    from safetensors.torch import save_file

    theirs = theirs_of(case, torch.float64)
    ours = ours_of(theirs, tmp_path / "theirs")
    form, folder = ours.config.hugging_face(), tmp_path / "back"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(form.config()))
    sent = form.theirs(dict(ours.named_parameters()))
    save_file({name: sent[name].detach().clone() for name in sent}, folder / "model.safetensors")
    make = transformers.AutoModelForImageTextToText
    with Widened():
        loaded, info = make.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    images = (1, 2)
    _, tokens, mask, pixels, _ = batch(ours.config, images)
    sent = their_inputs(theirs, ours.config, tokens, mask, pixels, images)
    with torch.no_grad(), Widened():
        expected, found = theirs(**sent).logits, loaded.eval()(**sent).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-9)


def test_unknown_keys_and_left_over_tensors_are_errors(tmp_path):
    theirs = theirs_of("llava")
    hf = json.loads(json.dumps(theirs.config.to_dict()))
    form = model_from_hf(hf).hugging_face()
    for changed, said in (
        ({"spectacles": 3}, "spectacles = 3 is not known"),
        ({"vision_config": hf["vision_config"] | {"monocle": 1}}, "monocle = 1 is not known"),
        ({"text_config": hf["text_config"] | {"ink": 1}}, "ink = 1 is not known"),
        ({"vision_feature_select_strategy": "odd"}, "vision_feature_select_strategy = 'odd'"),
        ({"model_type": "llava_next"}, "given model_type 'llava_next'; expected one of llava, paligemma"),
        ({"vision_config": {"model_type": "vit"}}, "a tower 'vit'; expected one of clip_vision_model"),
    ):
        with pytest.raises(ModelError, match=re.escape(said)):
            model_from_hf(hf | changed)
    with pytest.raises(ModelError, match=r"encoder.layers: \[2\], there \[3\]"):
        form.require(hf | {"vision_feature_layer": -1}, "here")
    theirs.save_pretrained(tmp_path)
    tensors = tensors_in(tmp_path)
    with pytest.raises(ModelError, match=r"with spare\.weight, which is of no part"):
        form.ours(tensors | {"spare.weight": torch.zeros(1)})
    short = {name: value for name, value in tensors.items() if "linear_2.bias" not in name}
    with pytest.raises(ModelError, match=r"missing \['linear_2.bias'\]"):
        form.ours(short)


def test_mllama_without_gated_layers_is_refused():
    hf = json.loads(json.dumps(theirs_of("mllama").config.to_dict()))
    hf["text_config"]["cross_attention_layers"] = []
    with pytest.raises(ModelError, match=r"cross_attention_layers = \[\]: nothing would look at images"):
        model_from_hf(hf)


def test_a_model_that_no_class_computes_says_why():
    config = model_from_hf(json.loads(json.dumps(theirs_of("llava").config.to_dict())))
    with pytest.raises(ModelError, match=r"llava: positions: 'image', there 'sequential'"):
        replace(config, positions="image").hugging_face().config()
    with pytest.raises(ModelError, match=r"model\.image_token_id"):
        replace(config, image_token_id=None).hugging_face().config()
    gemma = model_from_hf(json.loads(json.dumps(theirs_of("llava-gemma2").config.to_dict())))
    capped = replace(gemma, decoder=replace(gemma.decoder, logit_softcap=30.0))
    with pytest.raises(ModelError, match=r"llava: decoder\.logit_softcap: 30\.0, there 'absent'"):
        capped.hugging_face().config()
    with pytest.raises(ConfigError, match=r"image_token_id = 50; .*from 0 to 49"):
        replace(config, image_token_id=50).hugging_face().config()
    gated = model_from_hf(json.loads(json.dumps(theirs_of("mllama").config.to_dict())))
    assert gated.image_token_id is not None
    with pytest.raises(ModelError, match=r"a mllama has .* = None; .* from 50 to 57"):
        replace(gated, image_token_id=None).hugging_face().config()


def test_text_before_images_is_that_of_mllama_alone_and_never_depends_on_other_rows(tmp_path):
    """Theirs lets text that sees no image look at padding: at images of other rows, and at tiles not there.

    So a row without images in a batch with some, or text before an image of few tiles, is another one there.
    With a canvas full of tiles, alone, it is the same, and ours is the same in any batch.
    """
    theirs = theirs_of("mllama", torch.float64)
    ours = ours_of(theirs, tmp_path)
    _, tokens, mask, pixels, given = batch(ours.config, (1,))
    tokens, mask = torch.cat([torch.tensor([[7, 9]]), tokens], 1), torch.ones(1, 2 + tokens.shape[1]).long()
    assert ours.config.encoder.canvases[-1] == (3, 1)
    sent = their_inputs(theirs, ours.config, tokens, mask, pixels, (1,))
    with torch.no_grad(), Widened():
        expected = theirs(**sent).logits
    marks = tokens > IMAGE
    window = ours.config.fusion.arrays(
        *[marks[0].long().numpy()] * 2, np.zeros(tokens.shape[1], np.int64), [int(given["image_places"])]
    )
    given |= {"image_index": marks.long(), "image_window": torch.tensor(window["image_window"])[None]}
    ids = tokens.where(~marks, 0)
    with torch.no_grad():
        alone = ours(ids, **given)
        rows = {"image_index": given["image_index"], "image_window": given["image_window"]}
        rows = {name: torch.cat([one, torch.zeros_like(one)]) for name, one in rows.items()}
        places = torch.cat([given["image_places"], torch.zeros(1, dtype=torch.int64)])
        both = ours(ids.expand(2, -1), **given | rows | {"image_places": places})
        text = ours(ids)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(both, torch.cat([alone, text]), rtol=0, atol=1e-12)


PROCESSED = {
    "llava": {"images": ImagesConfig(fit="crop", shorter_side=17, resample="bilinear")},
    "llava-layers": {"images": ImagesConfig(fit="crop")},
    "llava-siglip": {},
    "paligemma": {"images": ImagesConfig(resample="lanczos")},
    "mllama": {"images": ImagesConfig(fit="corner", resample="bilinear")},
}


@pytest.mark.parametrize("case", PROCESSED)
def test_pixels_are_those_of_the_image_processor_that_is_exported(case, tmp_path):
    items = pytest.importorskip("forge_data.sources.items", reason="the extra `data` is not installed")
    from PIL import Image

    hf = json.loads(json.dumps(theirs_of(case).config.to_dict()))
    config = replace(model_from_hf(hf), **PROCESSED[case])
    form = config.hugging_face()
    for name, text in {
        **form.files(lambda token: "<|image|>" if case == "mllama" else "<image>"),
        "config.json": json.dumps(form.config()),
    }.items():
        (tmp_path / name).write_text(text)
    read = config_of(tmp_path)
    assert read["images"] == plain(config)["images"] and read["encoder"]["mean"] == list(config.encoder.mean)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    random, reader = np.random.default_rng(0), config.items()
    for height, width in ((14, 14), (40, 29), (9, 33)):
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        expected = processor(Image.fromarray(pixels), return_tensors="np", do_normalize=False)["pixel_values"]
        found = reader.read(pixels, items.Size(1, height, width))
        ((_, rows, columns),) = found["grids"].tolist()
        patch = config.encoder.patch_size
        image = found["patches"].reshape(rows, columns, patch, patch, 3).transpose(0, 2, 1, 3, 4)
        image = image.reshape(rows * patch, columns * patch, 3).transpose(2, 0, 1)
        if case == "mllama":
            size, tiles = config.encoder.image_size, expected[0, 0]
            cut = image.reshape(3, rows * patch // size, size, columns * patch // size, size)
            cut = cut.transpose(1, 3, 0, 2, 4).reshape(-1, 3, size, size)
            expected, image = tiles[: len(cut)], cut
        expected = expected.reshape(-1, *expected.shape[-3:])[..., : image.shape[-2], : image.shape[-1]]
        assert np.abs(expected * 255 - image).max() <= 1


def test_processors_that_do_something_else_are_refused(tmp_path):
    config = model_from_hf(json.loads(json.dumps(theirs_of("llava").config.to_dict())))
    config = replace(config, images=ImagesConfig(fit="crop"))
    form = config.hugging_face()
    for name, text in {
        **form.files(lambda token: "<image>"),
        "config.json": json.dumps(form.config()),
    }.items():
        (tmp_path / name).write_text(text)
    given = json.loads((tmp_path / "preprocessor_config.json").read_text())
    for changed, said in (
        ({"sparkle": 1}, "sparkle = 1 is not known"),
        ({"do_resize": False}, "do_resize = False, only True"),
        ({"do_pad": True}, "are of no form"),
        ({"resample": 9}, "resample = 9"),
        ({"crop_size": 15}, "makes 15 pixels a side, and the tower takes 14"),
        ({"size": {"height": 14, "width": 14}}, "are of no form"),
        (
            {"max_image_tiles": 4, "size": {"height": 14, "width": 14}},
            "max_image_tiles = 4; the tower takes None",
        ),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(given | changed))
        with pytest.raises(ModelError, match=re.escape(said)):
            config_of(tmp_path)
    assert "images" in VisionLanguageConfig.expand({"from": str(tmp_path), "images": {"fit": "pad"}})
    with pytest.raises(ModelError, match=r"images.fit = .pad."):
        replace(config, images=ImagesConfig(fit="pad")).hugging_face().files(str)
    other = model_from_hf(json.loads(json.dumps(theirs_of("idefics3").config.to_dict()))).hugging_face()
    assert other.files(str) == {}
    (tmp_path / "config.json").write_text(json.dumps(other.config()))
    with pytest.raises(ModelError, match="resizes images twice"):
        config_of(tmp_path)


@pytest.mark.parametrize("case", ["llava", "paligemma", "mllama"])
def test_both_ways_to_name_tensors_are_read(case, tmp_path):
    theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path)
    form = model_from_hf(json.loads((tmp_path / "config.json").read_text())).hugging_face()
    saved = tensors_in(tmp_path)
    first, second = whole_family(theirs.config.model_type).prefixes
    other = {}
    for name, value in saved.items():
        for a, b in ((first, second), (second, first)):
            if all(any(one.startswith(prefix) for one in saved) for prefix in a[:3]):
                for before, after in zip(a[:3], b[:3], strict=True):
                    if name.startswith(before):
                        other[after + name.removeprefix(before)] = value
                if name == f"{a[3]}lm_head.weight":
                    other[f"{b[3]}lm_head.weight"] = value
    assert other.keys() != saved.keys() and len(other) == len(saved)
    one, two = form.ours(saved), form.ours(other)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
