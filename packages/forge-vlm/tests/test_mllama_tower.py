"""The tower of Llama 3.2 Vision, and how it is given images, against transformers."""

import io

import numpy as np
import pytest
import torch
from forge_model import DecoderConfig, ModelError, initialize
from forge_vlm import VisionLanguageConfig
from forge_vlm.connectors.config import MLPConnectorConfig, ResamplerConfig
from forge_vlm.encoders.families import CLIPConfig, MllamaTowerConfig
from forge_vlm.hf.tower_tensors import TowerTensors
from forge_vlm.hf.towers import tower_from_hf, tower_to_hf
from forge_vlm.images.config import ImagesConfig
from forge_vlm.images.processing import decoded, patches_of, pictures_of
from msgspec.structs import replace
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

SIZES = {"ffn_dim": 20, "patch_size": 4}
TOWERS = {
    "two": MllamaTowerConfig(
        image_size=12, dim=12, num_layers=2, num_heads=3, layers=[1, 2], global_layers=1, **SIZES
    ),
    "wide": MllamaTowerConfig(
        image_size=8, dim=15, num_layers=3, num_heads=5, layers=[2], global_layers=2, max_tiles=3,
        activation="quick_gelu", eps=1e-3, ffn_dim=7, patch_size=2,
    ),
    "many": MllamaTowerConfig(
        image_size=15, dim=8, num_layers=4, num_heads=1, layers=[1, 4, 3], global_layers=3, max_tiles=6,
        ffn_dim=33, patch_size=5,
    ),
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def theirs_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    model = transformers.MllamaVisionModel(transformers.MllamaVisionModel.config_class(**tower_to_hf(config)))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model.eval().to(dtype)


def their_tiles(config, images):
    """[n, 1, C, 3, S, S], ids, masks, as their processor arranges the tiles of canvases [H, W, 3]."""
    size, most = config.image_size, config.max_tiles
    tiles, ids = torch.zeros(len(images), 1, most, 3, size, size, dtype=torch.float64), []
    mask = torch.zeros(len(images), 1, most, dtype=torch.int64)
    for number, image in enumerate(images):
        high, wide = image.shape[0] // size, image.shape[1] // size
        values = (torch.tensor(image) / 255 - torch.tensor(config.mean)) / torch.tensor(config.std)
        for tile in range(high * wide):
            top, left = tile // wide * size, tile % wide * size
            tiles[number, 0, tile] = values[top : top + size, left : left + size].permute(2, 0, 1)
        ids.append([1 + config.canvases.index((high, wide))])
        mask[number, 0, : high * wide] = 1
    return tiles, torch.tensor(ids), mask


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", TOWERS)
def test_features_and_weights_are_those_of_transformers(name, dtype):
    config = TOWERS[name]
    theirs = theirs_of(config, dtype)
    ours, tensors = config.build().to(dtype), TowerTensors(config)
    ours.load_state_dict(dict(tensors.ours(theirs.state_dict())))
    back = tensors.theirs(dict(ours.named_parameters()))
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in theirs.state_dict().items())
    random = np.random.default_rng(0)
    size = config.image_size
    images = [random.integers(0, 256, (r * size, c * size, 3), np.uint8) for r, c in config.canvases]
    tiles, ids, mask = their_tiles(config, images)
    patch = config.patch_size
    grids = torch.tensor([[1, one.shape[0] // patch, one.shape[1] // patch] for one in images])
    with torch.no_grad():
        expected = theirs(tiles.to(dtype), ids, mask).last_hidden_state
        found = ours(torch.tensor(np.concatenate([patches_of(one, patch) for one in images])), grids)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected[mask.bool()].flatten(0, 1), rtol=0, atol=TOLERANCE[dtype])
    assert len(found) == sum(
        rows * columns + config.extras(rows, columns) for _, rows, columns in grids.tolist()
    )


@pytest.mark.parametrize("name", TOWERS)
def test_flops_are_those_that_are_counted(name):
    config = TOWERS[name]
    rows, columns = (sides * config.side for sides in config.canvases[-1])
    patches = torch.zeros(rows * columns, 3 * config.patch_size**2, dtype=torch.uint8)
    model = config.build()
    initialize(model, 0)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(patches, torch.tensor([[1, rows, columns]]))
    assert counted.get_total_flops() == pytest.approx(config.forward_flops(rows, columns), rel=0.01)


@pytest.mark.parametrize("name", TOWERS)
def test_config_goes_there_and_back(name):
    kind = transformers.MllamaVisionModel.config_class
    hf = kind(**tower_to_hf(TOWERS[name])).to_dict()
    assert replace(tower_from_hf(hf), positions=None) == TOWERS[name]
    with pytest.raises(ModelError, match="vision_output_dim = 3"):
        tower_from_hf(hf | {"vision_output_dim": 3})
    with pytest.raises(ModelError, match="supported_aspect_ratios"):
        tower_from_hf(hf | {"supported_aspect_ratios": [[1, 1]]})


@pytest.mark.parametrize("tiles", [1, 3, 4, 6])
def test_canvases_and_pixels_are_those_of_the_processor(tiles):
    from PIL import Image

    size, random = 28, np.random.default_rng(tiles)
    config = MllamaTowerConfig(image_size=size, max_tiles=tiles)
    images = ImagesConfig(fit="corner", resample="bilinear")
    processor = transformers.MllamaImageProcessorPil(
        size={"height": size, "width": size}, max_image_tiles=tiles, do_rescale=False, do_normalize=False
    )
    for _ in range(60):
        height, width = (int(one) for one in random.integers(3, 120, 2))
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(file, "png")
        image = decoded(file.getvalue())
        canvas = config.resized(height, width)
        (found,) = pictures_of(image, images.cuts(height, width, canvas, size), "bilinear", (1, 2, 3))
        expected = processor(images=[[image]], return_tensors="np")
        high, wide = canvas[0] // size, canvas[1] // size
        assert expected["aspect_ratio_ids"].item() == 1 + config.canvases.index((high, wide))
        cut = found.reshape(high, size, wide, size, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, size, size)
        assert np.abs(expected["pixel_values"][0, 0, : high * wide] - cut).max() <= 1


def test_connectors_make_as_many_tokens_of_a_canvas_as_they_say():
    decoder = DecoderConfig(vocab_size=20, dim=16, num_layers=1, max_tokens=200)
    config = VisionLanguageConfig(decoder=decoder, encoder=TOWERS["many"], connector=MLPConnectorConfig())
    model, side = config.build(), config.encoder.side
    initialize(model, 0)
    for rows, columns in config.encoder.canvases:
        grid = rows * side, columns * side
        patches = torch.zeros(grid[0] * grid[1], 75, dtype=torch.uint8)
        tokens = model.visual_tokens(torch.device("cpu"), patches, torch.tensor([[1, *grid]]))
        assert len(tokens) == config.picture_tokens(*grid) == rows * columns * (1 + side * side)
    with pytest.raises(ValueError, match="which has a class token for each tile"):
        replace(config, connector=ResamplerConfig())


def test_keys_of_a_tower_come_from_a_folder(tmp_path):
    tower = transformers.MllamaVisionModel.config_class(**tower_to_hf(TOWERS["wide"]))
    tower.save_pretrained(tmp_path)
    found = MllamaTowerConfig.expand({"type": "mllama", "from": str(tmp_path), "init_std": 0.5})
    assert "from" not in found and found["init_std"] == 0.5 and found["type"] == "mllama"
    assert {key: found[key] for key in ("dim", "max_tiles", "layers")} == {
        "dim": 15,
        "max_tiles": 3,
        "layers": [2],
    }
    with pytest.raises(ModelError, match=r"holds a MllamaTowerConfig; expected a CLIPConfig"):
        CLIPConfig.expand({"from": str(tmp_path)})
    with pytest.raises(ModelError, match="cannot be read"):
        CLIPConfig.expand({"from": str(tmp_path / "nowhere")})
