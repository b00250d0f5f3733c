"""Every fusion of a vision-language model under layouts against one process, in float64.

Some ranks and micro-batches have no image. B rows of T tokens.
"""

from functools import cache

import numpy as np
import pytest
import torch
from forge_data.loading.loader import MicroBatch
from forge_data.sources.items import Size
from forge_model import DecoderConfig
from forge_model.config import GroupedQueryConfig
from forge_parallel import Mesh, ParallelConfig, TensorParallelConfig
from forge_parallel.config import (
    ActivationCheckpointingConfig,
    CompileConfig,
    ContextParallelConfig,
    PipelineConfig,
)
from forge_parallel.testing import run_ranks
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.fusion.config import JointConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig
from forge_vlm.fusion.mixture_of_transformers_config import MixtureOfTransformersConfig
from forge_vlm.fusion.moma_config import ExpertsConfig, MomaConfig
from parity import full, made, parameters

pytestmark = pytest.mark.dist

TOKENS, ROWS, MICRO, STEPS, PIXELS = 24, 8, 2, 3, 3 * 16
IMAGES = ([0, 0, 0, 0, 1, 2, 0, 1], [2, 1, 0, 0, 1, 1, 0, 0])
"""Of each row in even and in odd steps: the first of two data ranks has none in even ones, and there are
micro-batches without any."""
FUSIONS = {
    "joint": JointConfig(attention="image"),
    "cross-attention": CrossAttentionConfig(layers="1:3", max_visual_tokens=8, gate_init=0.5),
    "mixture-of-transformers": MixtureOfTransformersConfig(),
    "moma": MomaConfig(layers="1:", experts=ExpertsConfig(text=4, image=2)),
    "moma-threshold": MomaConfig(routing="threshold", normalize=True),
}
WHOLE = TensorParallelConfig(sequence=False)
LAYOUTS = {
    "fsdp2": (2, {}, ParallelConfig()),
    "hsdp2x2": (4, {"dp_replicate": 2}, ParallelConfig()),
    "tp2": (2, {"tp": 2}, ParallelConfig(tensor_parallel=WHOLE)),
    "tp4": (4, {"tp": 4}, ParallelConfig(tensor_parallel=WHOLE)),  # more ranks than key heads
    "pp2": (2, {"pp": 2}, ParallelConfig()),
    "pp2-tp2": (4, {"pp": 2, "tp": 2}, ParallelConfig(tensor_parallel=WHOLE)),
    "pp2-interleaved": (2, {"pp": 2}, ParallelConfig(pipeline=PipelineConfig(schedule="interleaved_1f1b"))),
    "cp2": (2, {"cp": 2}, ParallelConfig(context_parallel=ContextParallelConfig(method="ulysses"))),
    "ep2": (2, {"ep": 2}, ParallelConfig()),
    "fsdp2-ep2": (4, {"ep": 2}, ParallelConfig()),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}, ParallelConfig(tensor_parallel=WHOLE)),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}, ParallelConfig()),
    "fsdp2-compiled": (2, {}, ParallelConfig(compile=CompileConfig(enabled=True, backend="aot_eager"))),
    "fsdp2-checkpointed": (
        2,
        {},
        ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full")),
    ),
}
QUICK = ("fsdp2", "tp2", "pp2", "cp2", "ep2")


def model(fusion: str) -> VisionLanguageConfig:
    decoder = DecoderConfig(
        vocab_size=20,
        dim=16,
        num_layers=4,
        max_tokens=TOKENS,
        init_std=0.2,
        attention=GroupedQueryConfig(num_heads=4, num_kv_heads=2),
    )
    encoder = ViTConfig(image_size=8, patch_size=4, dim=16, num_layers=1, num_heads=2, init_std=0.2)
    return VisionLanguageConfig(decoder=decoder, encoder=encoder, fusion=FUSIONS[fusion])


def batch(config: VisionLanguageConfig, step: int, mesh: Mesh) -> list[MicroBatch]:
    """This rank's micro-batches. A row has two samples: text, then the images of the row and text."""
    reader, random = config.items(), np.random.default_rng(step)
    run = config.fusion.places(4)
    tokens, labels = random.integers(20, size=(2, ROWS, TOKENS))
    pixels = random.integers(256, size=(ROWS, 2, 4, PIXELS), dtype=np.uint8)
    micro_batches = []
    for rows in np.arange(ROWS).reshape(mesh.batch.size, -1, MICRO)[mesh.batch.rank]:
        found: dict[str, list] = {}
        patches, grids = [np.empty((0, PIXELS), np.uint8)], [np.empty((0, 3), np.int64)]
        for row in rows:
            count = IMAGES[step % 2][row]
            places, doc_ids = np.zeros(TOKENS, np.int64), np.repeat([0, 1, -1], [5, TOKENS - 8, 3])
            for image in range(count):
                start = 5 + row % 2 + image * (run + 1)
                places[start : start + run] = 1 + image * run + np.arange(run)
            ends = (doc_ids < 0) | (np.append(places[1:], 0) > 0)  # the last place of an image predicts text
            target = np.where(ends, -100, labels[row])
            arrays = reader.sequence(places, [Size(1, 8, 8)] * count, doc_ids)
            for name, array in (
                arrays | {"tokens": tokens[row], "labels": target, "doc_ids": doc_ids}
            ).items():
                found.setdefault(name, []).append(array)
            patches += list(pixels[row, :count])
            grids += [np.array([[1, 2, 2]])] * count
        joined = {name: np.stack(arrays) for name, arrays in found.items()}
        joined |= {"patches": np.concatenate(patches), "grids": np.concatenate(grids)}
        inputs = {name: torch.from_numpy(array) for name, array in joined.items()}
        targets = {"targets": (inputs["labels"] >= 0).sum()}
        micro_batches.append(MicroBatch(inputs, targets, host=reader.host))
    return micro_batches


def trained(sizes: dict, fusion: str, parallel: ParallelConfig) -> dict:
    config = model(fusion)
    parts, _, step, mesh = made(sizes, config, "float64", parallel)  # type: ignore[arg-type]
    before = full(parameters(parts))
    outs = [step.train(batch(config, index, mesh), index) for index in range(STEPS)]
    return {
        "loss": [out.loss.item() for out in outs],
        "norm": [out.grad_norm.item() for out in outs],
        "validation": step.evaluate([batch(config, STEPS, mesh)])["loss"],
        "before": before,
        "after": full(parameters(parts)),
        "buffers": {name: buffer.clone() for part in parts for name, buffer in part.named_buffers()},
    }


@cache
def single(fusion: str) -> dict:
    return run_ranks(trained, 1, {}, fusion, ParallelConfig())[0]


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_fusion_trains_as_in_one_process(layout, fusion):
    world_size, sizes, config = LAYOUTS[layout]
    try:
        model(fusion).require_axes(sizes.get("tp", 1), sizes.get("cp", 1), False, "ulysses")
    except ValueError as error:
        assert layout == "cp2" and "mesh.cp = 1" in str(error)
        pytest.skip(str(error))
    if "ep" in sizes and not model(fusion).expert_counts():
        pytest.skip("no experts to share")
    one = single(fusion)
    assert all(not torch.equal(value, one["before"][name]) for name, value in one["after"].items())
    for many in run_ranks(trained, world_size, sizes, fusion, config, timeout_s=120):
        for key in ("loss", "norm", "validation"):
            assert many[key] == pytest.approx(one[key], rel=1e-9), key
        assert many["after"].keys() == one["after"].keys()
        for key, value in one["after"].items():
            assert torch.equal(many["before"][key], one["before"][key]), key
            assert (many["after"][key] - value).abs().max() <= 1e-9 * value.abs().max() + 1e-12, key
        for key, value in many["buffers"].items():
            torch.testing.assert_close(value, one["buffers"][key], rtol=1e-9, atol=0)
