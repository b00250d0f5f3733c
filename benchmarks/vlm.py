"""Vision-language models: a step of each fusion, the loader of images, what a frozen tower keeps, FLOPs.

Issue 26, done-when 6. A step is forward, chunked loss, backward and fused AdamW over rows of which half are
visual tokens (16 an image), with a tower of one narrow layer, so that the decoder is what is timed. `over
dense` is the time of a token beside that of the same decoder without images; `for its FLOPs` divides that by
the ratio of the FLOPs of the two, counted by `torch.utils.flop_counter`. Sides are timed in turns in one
process.

The loader reads JPEG files of 256 x 256 by the source `image-text` in one process, resizes them to 224 x 224
(bicubic) and cuts them into patches. `plain PIL` opens, resizes and makes an array, and nothing else;
`webdataset` (if it can be imported) decodes the same files from a tar and resizes them by PIL.

Memory is what autograd keeps for the backward pass, of a tower as large as CLIP-B, and the moments of AdamW.

Run: python benchmarks/vlm.py [--threads 2] [--rounds 7] [--quick]
"""

import argparse
import importlib
import io
import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forge_data import DataConfig, build_loader
from forge_data.sources.items import Size
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.encoders.families import CLIPConfig
from forge_vlm.fusion.config import FusionConfig, JointConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig
from forge_vlm.fusion.mixture_of_transformers_config import MixtureOfTransformersConfig
from forge_vlm.fusion.moma_config import MomaConfig
from forge_vlm.sources.columns import ImageTextConfig
from PIL import Image
from report import table, write
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

VOCAB, OF_IMAGE = 8192, 16
Step = Callable[[], Any]


def fusions(tokens: int) -> dict[str, FusionConfig]:
    """Those that are measured, for sequences of so many tokens."""
    return {
        "joint": JointConfig(),
        "cross-attention": CrossAttentionConfig(layers="1::4", max_visual_tokens=tokens // 2),
        "mixture-of-transformers": MixtureOfTransformersConfig(),
        "moma": MomaConfig(),
    }


def decoder_config(dim: int, layers: int, tokens: int) -> DecoderConfig:
    """The decoder of all sides."""
    attention = GroupedQueryConfig(num_heads=dim // 64)
    return DecoderConfig(vocab_size=VOCAB, max_tokens=tokens, dim=dim, num_layers=layers, attention=attention)


def batch(config: VisionLanguageConfig, rows: int, tokens: int) -> dict[str, Tensor]:
    """Rows in which images and as much text take turns, and then text where an image has one place."""
    places_of, images = config.fusion.places(OF_IMAGE), tokens // 2 // OF_IMAGE
    kinds = np.concatenate([np.tile(np.repeat([1, 0], [places_of, OF_IMAGE]), images), np.zeros(tokens, int)])
    kinds = kinds[:tokens]
    places = np.where(kinds > 0, kinds.cumsum(), 0)
    sizes = [Size(1, config.encoder.side * 8, config.encoder.side * 8)] * images
    arrays = config.items().sequence(places, sizes, np.zeros(tokens, int))
    given = {name: torch.from_numpy(np.stack([array] * rows)) for name, array in arrays.items()}
    side = config.encoder.side
    patches = torch.randint(256, (rows * images * side * side, 3 * 64), dtype=torch.uint8)
    grids = torch.tensor([[1, side, side]] * (rows * images))
    return given | {"patches": patches, "grids": grids}


def stepping(model: nn.Module, tokens: Tensor, inputs: dict[str, Tensor]) -> Step:
    """A training step with fused AdamW."""
    loss_fn, optimizer = LossConfig().build(), torch.optim.AdamW(model.parameters(), fused=True)
    labels = tokens.roll(-1, 1)

    def step() -> None:
        (model(tokens, labels=labels, loss_fn=loss_fn, **inputs).total / labels.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def flops_of(model: nn.Module, tokens: Tensor, inputs: dict[str, Tensor]) -> float:
    """What torch counts forward, over all pairs of tokens, and twice as much for the backward pass."""
    # with gradients: experts choose otherwise without
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, **inputs)
    return 3 * counter.get_total_flops()


def step_times(dim: int, layers: int, rows: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Medians, taken in turns, of the dense decoder and of each fusion around it."""
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (rows, tokens))
    dense = decoder_config(dim, layers, tokens)
    configs: dict[str, Any] = {"dense": dense}
    encoder = ViTConfig(image_size=32, patch_size=8, dim=64, num_layers=1)
    for name, fusion in fusions(tokens).items():
        configs[name] = VisionLanguageConfig(decoder=dense, encoder=encoder, fusion=fusion)
    steps, counted, told = {}, {}, {}
    for name, config in configs.items():
        model = config.build()
        initialize(model, seed=0)
        inputs = {} if name == "dense" else batch(config, rows, tokens)
        steps[name] = stepping(model, ids, inputs)
        counted[name] = flops_of(model, ids, inputs)
        shapes = {key: value.shape for key, value in ({"tokens": ids} | inputs).items()}
        told[name] = config.step_flops(shapes, causal=False)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    rows_of = []
    for name in steps:
        over = statistics.median(
            mine / dense for mine, dense in zip(times[name], times["dense"], strict=True)
        )
        rows_of.append(
            {
                "dim": dim,
                "model": name,
                "ms a step": round(1e3 * statistics.median(times[name]), 1),
                "over dense": round(over, 3),
                "for its FLOPs": round(over / (counted[name] / counted["dense"]), 3),
                "GFLOPs": round(counted[name] / 1e9, 2),
                "told / counted": round(told[name] / counted[name], 4),
            }
        )
    return rows_of


def images_in(folder: Path, count: int) -> list[Path]:
    """JPEG files with something to decode, and the table that names them."""
    rng, paths = np.random.default_rng(0), []
    for number in range(count):
        coarse = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        path = folder / f"{number:05}.jpg"
        Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
        paths.append(path)
    rows = (json.dumps({"image": path.name, "text": f"picture {path.stem}"}) + "\n" for path in paths)
    (folder / "rows.jsonl").write_text("".join(rows))
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for path in paths:
            tar.add(path, path.name)
            info = tarfile.TarInfo(f"{path.stem}.txt")
            info.size = len(text := f"picture {path.stem}".encode())
            tar.addfile(info, io.BytesIO(text))
    return paths


def resized(image: Any) -> np.ndarray:
    """[224, 224, 3] uint8."""
    return np.asarray(image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC))


def ours(folder: Path) -> Iterator[int]:
    """Images of each batch of the loader."""
    decoder = decoder_config(64, 1, 1024)
    encoder = ViTConfig(image_size=224, patch_size=16)
    items = VisionLanguageConfig(decoder=decoder, encoder=encoder).items()
    source = ImageTextConfig(path=str(folder / "rows.jsonl"))
    data = DataConfig(
        max_tokens=1023, sources=[source], mask_documents=True, packing="bestfit", cache_dir=str(folder / "c")
    )
    loader = build_loader(data, "train", micro_batch=4, global_batch=4, items=items)
    return (len(micro.inputs["grids"]) for (micro,) in loader)


def webdataset_reads(folder: Path) -> Iterator[int]:
    """The same by its library."""
    library = importlib.import_module("webdataset")
    for sample in library.WebDataset(str(folder / "shard.tar"), shardshuffle=False).decode("pil"):
        resized(sample["jpg"])
        yield 1


def images_a_second(count: int, rounds: int) -> list[dict[str, Any]]:
    """Of the loader, PIL and webdataset, each in one process; the best of the rounds, taken in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = images_in(folder, count)
        sides: dict[str, Callable[[], Iterator[int]]] = {
            "plain PIL": lambda: (len(resized(Image.open(path))) // 224 for path in paths),
            "loader": lambda: ours(folder),
        }
        try:
            importlib.import_module("webdataset")
            sides["webdataset"] = lambda: webdataset_reads(folder)
        except ImportError:
            print("webdataset cannot be imported, and is left out")
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, reads in sides.items():
                batches, seen, start = reads(), 0, time.perf_counter()
                while seen < count - 50:  # some rows are held out
                    seen += next(batches)
                rates[side].append(seen / (time.perf_counter() - start))
    return [
        {
            "reader": side,
            "images/s": round(max(found)),
            "of plain PIL": round(max(found) / max(rates["plain PIL"]), 2),
        }
        for side, found in rates.items()
    ]


def memory(is_frozen: bool, images: int) -> dict[str, Any]:
    """Bytes that autograd keeps of a forward pass, each storage once, and those of AdamW's moments."""
    encoder = CLIPConfig(dim=768, num_layers=12, num_heads=12, image_size=224, patch_size=16, ffn_dim=3072)
    config = VisionLanguageConfig(decoder=decoder_config(512, 2, 1024), encoder=encoder)
    model = config.build()
    initialize(model, seed=0)
    assert model.encoder is not None  # type: ignore[union-attr]
    model.encoder.requires_grad_(not is_frozen)  # type: ignore[union-attr]
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    side = encoder.side
    tokens = torch.randint(VOCAB, (images, 256))
    patches = torch.randint(256, (images * side * side, 3 * 256), dtype=torch.uint8)
    grids = torch.tensor([[1, side, side]] * images)
    index = torch.arange(1, 197).expand(images, -1)
    index = torch.cat([index, index.new_zeros(images, 60)], 1)
    counts = torch.full((images,), 196)
    given = {"patches": patches, "grids": grids, "image_index": index, "image_places": counts}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, labels=tokens, loss_fn=LossConfig().build(), **given)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "tower": "frozen" if is_frozen else "trained",
        "MB kept for backward": round(sum(kept.values()) / 1e6),
        "MB of moments": round(8 * trained / 1e6),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="little of everything; nothing is recorded")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [(256, 4, 8, 512), (512, 4, 4, 512), (1024, 2, 4, 512)]
    if options.quick:
        sizes, options.rounds = [(128, 2, 1, 64)], 1
    steps = [row for size in sizes for row in step_times(*size, options.rounds)]
    print(table(steps))
    images = images_a_second(60 if options.quick else 500, options.rounds)
    print("\n" + table(images))
    kept = [memory(frozen, 1 if options.quick else 4) for frozen in (False, True)]
    print("\n" + table(kept))
    if not options.quick:
        given = {"threads": options.threads, "rounds": options.rounds, "sizes": sizes}
        write("vlm", given | {"steps": steps, "images": images, "memory": kept})


if __name__ == "__main__":
    main()
