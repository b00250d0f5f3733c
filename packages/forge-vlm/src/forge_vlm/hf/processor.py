"""Conversion between `[model.images]` and the image processors of Hugging Face. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_model import ModelError
from forge_model.hf.families.family import Key
from forge_model.hf.keys import Keys, keyed
from msgspec.structs import replace

from forge_vlm.config import VisionLanguageConfig
from forge_vlm.images.config import ImagesConfig

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Interpolations by their numbers in Pillow."""

DEFAULT_RESAMPLE = {"mllama": 2}
"""The default interpolation of a processor; 3 for all others."""

PROCESSORS = {"llava": "Llava", "paligemma": "PaliGemma", "mllama": "Mllama"}
"""Models whose processors do the same as ours. That of Idefics3 resizes an image twice."""

TOKENS = {"paligemma": "<image>", "mllama": "<|image|>"}
"""The text that these processors expect for the token at image places; that of Llava is configurable."""

_HARMLESS = """
    auto_map data_format default_to_square device disable_grouping do_convert_rgb feature_extractor_type
    image_seq_length input_data_format processor_class return_row_col_info return_tensors video_sampling
"""  # do_convert_rgb: always; lengths: the model counts
_READ = """
    size:object crop_size:object image_mean:list image_std:list image_processor_type:str max_image_tiles:int
    do_center_crop:bool do_pad:bool
"""
KEYS = Keys(
    "image processor",
    keyed(_READ) | {"resample": Key(int, None, True, zero=True)},
    {"do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255},
    _HARMLESS.split(),
)


def processed(config: VisionLanguageConfig, folder: Path, kind: str) -> VisionLanguageConfig:
    """Return the model with `images` as in the processor of a folder; by default as CLIP or SigLIP have them.

    Raises:
        ModelError: the processor does something that ours cannot.
    """
    side, given = getattr(config.encoder, "image_size", None), _read(folder)
    resample = DEFAULT_RESAMPLE.get(kind, 3)
    if given is None:
        fit = "crop" if getattr(config.encoder, "has_class_token", False) else "stretch"
        fit = "corner" if kind == "mllama" else fit
        return replace(config, images=ImagesConfig(fit=fit, resample=RESAMPLE[resample]))  # type: ignore[arg-type]
    if kind not in PROCESSORS:
        raise ModelError(
            f"the image processor of {kind} resizes images twice, and may cut them in its own way; say in "
            "[model.images] how images are read"
        )
    full = KEYS.full(given)
    resample = resample if full["resample"] is None else full["resample"]
    if resample not in RESAMPLE:
        raise ModelError(f"resample = {resample}; expected one of {', '.join(map(str, RESAMPLE))}")
    size, options = _fit(full)
    if full["max_image_tiles"] != (tiles := getattr(config.encoder, "max_tiles", None)):
        raise ModelError(f"max_image_tiles = {full['max_image_tiles']}; the tower takes {tiles}")
    if side not in (None, size):
        raise ModelError(f"the image processor makes {size} pixels a side, and the tower takes {side}")
    colours = {"mean": full["image_mean"], "std": full["image_std"]}
    encoder = replace(config.encoder, **{key: tuple(one) for key, one in colours.items() if one is not None})
    images = ImagesConfig(resample=RESAMPLE[resample], **options)  # type: ignore[arg-type]
    return replace(config, encoder=encoder, images=images)


def _read(folder: Path) -> dict[str, Any] | None:
    """Return the keys of the image processor from either of its possible files."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        try:
            found = json.loads(path.read_text()) if path.exists() else None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
        if found is not None and name == "processor_config.json":
            found = found.get("image_processor")
        if found is not None:
            return found
    return None


def _fit(full: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the side of a picture and the keys of `[model.images]` that fit an image to it.

    Raises:
        ModelError: the sizes have an unknown form.
    """
    size, crop = full["size"] or {}, full["crop_size"] or {}
    size = {"shortest_edge": size} if isinstance(size, int) else size
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    short, high, wide = (size.get(name) for name in ("shortest_edge", "height", "width"))
    crops = full["do_center_crop"]
    if crops is None:
        crops = bool(short) or "CLIP" in (full["image_processor_type"] or "")
    if full["max_image_tiles"] and high:
        return high, {"fit": "corner"}
    if high and high == wide and not crops and not full["do_pad"]:
        return high, {"fit": "stretch"}
    if not short or not crops or full["do_pad"] or crop.get("height") != crop.get("width"):
        raise ModelError(
            f"size = {full['size']!r}, crop_size = {full['crop_size']!r}, do_center_crop = {crops}, do_pad = "
            f"{full['do_pad']} are of no form that can be read"
        )
    side = crop.get("height", short)
    return side, {"fit": "crop"} | ({"shorter_side": short} if short != side else {})


def no_processor(kind: str, token: str, first: str) -> str:
    """Return why an export has no processor; empty if it has one. See `processor_files`."""
    if kind not in PROCESSORS:
        return f"without a processor: that of {kind} resizes an image twice, and may cut it"
    if token and token == TOKENS.get(kind, token):
        needs = kind == "mllama" and not first
        return f"without a processor: that of {kind} needs a tokenizer with a bos_token" * needs
    called = f"{token!r}" if token else "no token"
    return (
        f"without a processor: that of {kind} needs the token {TOKENS.get(kind, 'of images')} in the "
        f"tokenizer, which has {called} of the id model.image_token_id"
    )


def processor_files(config: VisionLanguageConfig, kind: str, token: str, first: str) -> dict[str, str]:
    """Return the files of the processor by name; none if `no_processor` returns a reason.

    Args:
        config: configuration of the model.
        kind: its `model_type`.
        token: text of the token at image places in its tokenizer; empty if there is none.
        first: text of the token that begins a text; empty if there is none.

    Raises:
        ModelError: the processors of that model cannot do what `[model.images]` asks for.
    """
    images, encoder = config.images, config.encoder
    side = getattr(encoder, "image_size", encoder.side * encoder.patch_size)
    if no_processor(kind, token, first):
        return {}
    if images.before or images.after or images.tiles > 1 or config.video is not None:
        raise ModelError(
            f"images.before, images.after, images.tiles, model.video: the processor of {kind} has none of "
            "these"
        )
    fits = {"llava": ("crop", "stretch"), "mllama": ("corner",)}.get(kind, ("stretch",))
    if images.fit not in fits:
        raise ModelError(f'images.fit = "{images.fit}"; the processor of {kind} has {", ".join(fits)}')
    image = {"image_mean": list(encoder.mean), "image_std": list(encoder.std)}
    image |= dict.fromkeys(("do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True)
    resample = next(number for number, name in RESAMPLE.items() if name == images.resample)
    image |= {"resample": resample, "rescale_factor": 1 / 255} | _written(
        kind, images, side, getattr(encoder, "max_tiles", 1)
    )
    name = {"processor_class": f"{PROCESSORS[kind]}Processor"}
    outer: dict[str, Any] = {}
    if kind == "paligemma":
        image |= {"image_seq_length": config.image_tokens}
    if kind == "llava":
        has_class = getattr(encoder, "has_class_token", False)
        outer = {
            "image_token": token,
            "patch_size": encoder.patch_size,
            "num_additional_image_tokens": int(has_class),
            "vision_feature_select_strategy": "default" if has_class > encoder.extra else "full",
        }
    files = {"preprocessor_config.json": image | name, "processor_config.json": outer | name}
    return {file: json.dumps(keys, indent=2) + "\n" for file, keys in files.items()}


def _written(kind: str, images: ImagesConfig, side: int, tiles: int) -> dict[str, Any]:
    square = {"height": side, "width": side}
    if kind == "mllama":
        kept = {"image_processor_type": "MllamaImageProcessor", "do_pad": True, "size": square}
        return kept | {"max_image_tiles": tiles}
    if images.fit == "stretch":
        return {"image_processor_type": "SiglipImageProcessor", "size": square}
    short = {"shortest_edge": images.shorter_side or side}
    crop = {"do_center_crop": True, "crop_size": square, "size": short}
    return crop | {"image_processor_type": "CLIPImageProcessor"}
