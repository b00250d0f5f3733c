"""Towers against those of transformers, with random weights and odd sizes, weights in both directions."""

import pytest
import torch
from forge_model import ModelError, initialize
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.encoders.families import CLIPConfig, Dinov2Config, Siglip2Config, SiglipConfig
from forge_vlm.hf.tower_tensors import TowerTensors
from forge_vlm.hf.towers import tower_from_hf, tower_to_hf
from forge_vlm.images.processing import patches_of
from msgspec.structs import replace
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

A = {"dim": 12, "num_layers": 3, "num_heads": 3, "ffn_dim": 20, "patch_size": 4}
B = {"dim": 15, "num_layers": 2, "num_heads": 5, "ffn_dim": 7, "patch_size": 3}
C = {"dim": 8, "num_layers": 4, "num_heads": 1, "ffn_dim": 33, "patch_size": 5}
DINO = [{**one, "ffn_dim": factor * one["dim"]} for one, factor in ((A, 4), (B, 2), (C, 3))]

TOWERS = {
    "clip-0": CLIPConfig(image_size=14, **A),
    "clip-1": CLIPConfig(image_size=9, layers=-2, class_token=True, activation="gelu", **B),
    "clip-2": CLIPConfig(image_size=20, layers=[0, -1, 2], eps=1e-3, **C),
    "siglip-0": SiglipConfig(image_size=14, **A),
    "siglip-1": SiglipConfig(image_size=9, layers=-2, **B),
    "siglip-2": SiglipConfig(image_size=20, layers=[1, -1], eps=1e-3, activation="gelu", **C),
    "dinov2-0": Dinov2Config(image_size=14, positions=3, **DINO[0]),
    "dinov2-1": Dinov2Config(image_size=9, positions=5, layers=-2, class_token=True, **DINO[1]),
    "dinov2-2": Dinov2Config(
        image_size=20, positions=3, layers=[0, -1], layer_scale=0.3, ffn_type="swiglu", qkv_bias=False,
        dim=8, num_layers=2, num_heads=2, ffn_dim=24, patch_size=5,
    ),
    "siglip2-0": Siglip2Config(positions=4, **A),
    "siglip2-1": Siglip2Config(positions=3, layers=-2, **B),
    "siglip2-2": Siglip2Config(positions=7, layers=[0, -2], eps=1e-3, **C),
}  # fmt: skip
CLASSES = {
    "clip": transformers.CLIPVisionModel,
    "siglip": transformers.SiglipVisionModel,
    "dinov2": transformers.Dinov2Model,
    "siglip2": transformers.Siglip2VisionModel,
}


def theirs_of(name, config, image_size=None):
    kind = CLASSES[name.split("-")[0]]
    table = tower_to_hf(config) | ({} if image_size is None else {"image_size": image_size})
    torch.manual_seed(0)
    model = kind(kind.config_class(**table)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def ours_of(config, theirs, folder):
    theirs.save_pretrained(folder)
    from safetensors.torch import load_file

    model = config.build().to(next(theirs.parameters()).dtype)
    model.load_state_dict(dict(TowerTensors(config).ours(load_file(folder / "model.safetensors"))))
    return model.eval()


def pixels(*sizes):
    torch.manual_seed(1)
    return [torch.randint(256, (*size, 3), dtype=torch.uint8) for size in sizes]


def inputs(config, images):
    patch = config.patch_size
    grids = torch.tensor([[1, image.shape[0] // patch, image.shape[1] // patch] for image in images])
    return torch.cat([torch.tensor(patches_of(image.numpy(), patch)) for image in images]), grids


def normalized(config, image, dtype):
    values = (image.float() / 255 - torch.tensor(config.mean)) / torch.tensor(config.std)
    return values.to(dtype)


def selected(config, out):
    """The features that LLaVA takes of the output of a tower."""
    if config.layers == -1:
        states = [out.last_hidden_state]
    else:
        states = [out.hidden_states[layer] for layer in config.chosen_layers]
    drop = int(config.has_class_token and not config.extra)
    return torch.cat([state[:, drop:] for state in states], -1)


TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", [name for name in TOWERS if "siglip2" not in name])
def test_features_are_those_of_transformers(name, dtype, tmp_path):
    config = TOWERS[name]
    theirs = theirs_of(name, config).to(dtype)
    ours = ours_of(config, theirs, tmp_path)
    images = pixels(*[(config.image_size, config.image_size)] * 3)
    batch = torch.stack([normalized(config, image, dtype).permute(2, 0, 1) for image in images])
    with torch.no_grad():
        expected = selected(config, theirs(batch, output_hidden_states=True))
        found = ours(*inputs(config, images))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", [name for name in TOWERS if "siglip2" in name])
def test_naflex_features_are_those_of_transformers_for_images_of_all_sizes(name, dtype, tmp_path):
    config = TOWERS[name]
    theirs = theirs_of(name, config).to(dtype)
    ours = ours_of(config, theirs, tmp_path)
    patch = config.patch_size
    shapes = [(3, 5), (7, 1), (config.positions, config.positions), (2, 2)]
    images = pixels(*[(rows * patch, columns * patch) for rows, columns in shapes])
    rows = [torch.tensor(patches_of(normalized(config, image, dtype).numpy(), patch)) for image in images]
    longest = max(map(len, rows))
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        out = theirs(padded, mask, torch.tensor(shapes), output_hidden_states=True)
        found = ours(*inputs(config, images))
    expected = selected(config, out)[mask.bool()]
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", TOWERS)
def test_image_does_not_see_others_of_other_sizes(name):
    config = TOWERS[name]
    model = config.build()
    initialize(model, 0)
    images = pixels((20, 15), (15, 40), (15, 15))
    with torch.no_grad():
        together = model.double()(*inputs(config, images))
        alone = torch.cat([model(*inputs(config, [image])) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", TOWERS)
def test_weights_go_there_and_back(name, tmp_path):
    config = TOWERS[name]
    theirs = theirs_of(name, config)
    ours, tensors = ours_of(config, theirs, tmp_path), TowerTensors(config)
    sent = dict(tensors.theirs(dict(ours.named_parameters())))
    back = tensors.ours(sent)
    for key, parameter in ours.named_parameters():
        assert torch.equal(back[key], parameter)
    from safetensors.torch import load_file, save_file

    kept = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(kept[key], value) for key, value in sent.items())
    (tmp_path / "back").mkdir()
    save_file({key: value.clone() for key, value in sent.items()}, tmp_path / "back/model.safetensors")
    theirs.config.save_pretrained(tmp_path / "back")
    loaded, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["unexpected_keys"]
    named = dict(loaded.named_parameters())
    head = ("head.", "mask_token")  # what features do not need
    for key, parameter in theirs.named_parameters():
        if not any(part in key for part in head):
            assert torch.equal(named[key], parameter), key


@pytest.mark.parametrize("name", TOWERS)
def test_config_goes_there_and_back(name):
    config = TOWERS[name]
    kind = CLASSES[name.split("-")[0]].config_class
    found = tower_from_hf(kind(**tower_to_hf(config)).to_dict())
    changes = {"layers": config.layers, "image_size": getattr(config, "image_size", None)}
    changes["positions"] = getattr(config, "positions", None)
    if name.startswith("siglip2"):
        changes = {"layers": config.layers, "max_patches": config.max_patches}
    if config.extra:
        changes["class_token"] = True
    assert replace(found, **changes) == config


def test_whole_models_have_the_tower_beside_their_text(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    for kind, text_sizes in ((transformers.CLIPModel, 6), (transformers.SiglipModel, 8)):
        text = sizes | {"vocab_size": 30, "hidden_size": text_sizes}
        vision = sizes | {"image_size": 10, "patch_size": 4}
        theirs = kind(kind.config_class(text_config=text, vision_config=vision))
        config = tower_from_hf(theirs.config.to_dict())
        ours = ours_of(config, theirs, tmp_path / kind.__name__)
        image = pixels((10, 10))
        with torch.no_grad():
            batch = normalized(config, image[0], torch.float32).permute(2, 0, 1)[None]
            expected = selected(config, theirs.vision_model(batch))
            torch.testing.assert_close(ours(*inputs(config, image)), expected[0], rtol=0, atol=1e-5)


def test_unknown_keys_and_left_over_tensors_are_errors():
    hf = tower_to_hf(TOWERS["clip-0"])
    with pytest.raises(ModelError, match=r"hidden_size = 'wide', expected int; spectacles = 3 is not known"):
        tower_from_hf(hf | {"spectacles": 3, "hidden_size": "wide"})
    with pytest.raises(ModelError, match=r"attention_dropout = 0.1, only 0 can be read"):
        tower_from_hf(hf | {"attention_dropout": 0.1})
    with pytest.raises(ModelError, match="given model_type 'bert'; expected one of clip_vision_model"):
        tower_from_hf({"model_type": "bert"})
    with pytest.raises(ModelError, match="no class of transformers computes the tower of a ViTConfig"):
        tower_to_hf(ViTConfig())
    tensors = TowerTensors(TOWERS["clip-0"])
    sent = dict(tensors.theirs(dict(TOWERS["clip-0"].build().named_parameters())))
    with pytest.raises(ModelError, match=r"missing nothing, left over \['encoder.gate'\]"):
        tensors.ours(sent | {"encoder.gate": torch.zeros(1)})
    sent.pop("post_layernorm.bias")
    with pytest.raises(ModelError, match=r"missing \['post_layernorm.bias'\]"):
        tensors.ours(sent)


@pytest.mark.parametrize("name", ["siglip2-0", "siglip2-1", "siglip2-2"])
def test_naflex_grid_is_that_of_the_processor(name):
    import random

    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    draw = random.Random(0)
    for _ in range(1000):
        config = replace(TOWERS[name], max_patches=draw.choice([16, 64, 100, 256]))
        size = draw.randint(1, 3000), draw.randint(1, 3000)
        expected = get_image_size_for_max_num_patches(*size, config.patch_size, config.max_patches)
        assert config.resized(*size) == expected
        rows, columns = config.grid(*size)
        assert rows * columns <= config.max_patches


@pytest.mark.parametrize("name", TOWERS)
def test_blocks_after_the_features_are_never_trained(name):
    config = TOWERS[name]
    model = config.build()
    initialize(model, 0)
    model(*inputs(config, pixels((20, 15), (15, 15)))).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key
    frozen = {
        key.split(".")[1]
        for key, one in model.named_parameters()
        if not one.requires_grad and "layers" in key
    }
    assert frozen == {str(number) for number in range(config.depth, config.num_layers)}


def test_frozen_tower_saves_nothing_for_a_backward_pass():
    config = TOWERS["siglip2-2"]
    model = config.build().requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda tensor: tensor):
        features = model(*inputs(config, pixels((20, 15), (15, 15))))
    assert features.grad_fn is None and not saved


@pytest.mark.parametrize("name", TOWERS)
def test_flops_are_those_counted(name):
    config = TOWERS[name]
    model = config.build().requires_grad_(False)
    images = pixels((20, 20), (20, 20))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs(config, images))
    side = 20 // config.patch_size
    assert counter.get_total_flops() == 2 * config.forward_flops(side, side)


def test_layers_that_are_not_there_are_an_error():
    with pytest.raises(ValueError, match=r"encoder.layers = -5 of num_layers = 3; .* from -4 to 3"):
        CLIPConfig(image_size=14, layers=-5, **A)
    with pytest.raises(ValueError, match=r"encoder.layers = \[\]"):
        CLIPConfig(image_size=14, layers=[], **A)
    with pytest.raises(ValueError, match=r"encoder.dim = 12 is no multiple of encoder.num_heads = 5"):
        CLIPConfig(image_size=14, **(A | {"num_heads": 5}))
    with pytest.raises(ValueError, match=r"encoder.image_size = 3 is less than patch_size = 4"):
        CLIPConfig(image_size=3, **A)


def test_post_norm_is_applied_to_the_layers_that_are_asked_for(tmp_path):
    config = replace(TOWERS["dinov2-0"], layers=[1, -1], post_norm=True)
    theirs = theirs_of("dinov2-0", config).double()
    images = pixels((14, 14))
    with torch.no_grad():
        batch = normalized(config, images[0], torch.float64).permute(2, 0, 1)[None]
        states = theirs(batch, output_hidden_states=True).hidden_states
        expected = torch.cat([theirs.layernorm(states[layer])[0, 1:] for layer in (1, -1)], -1)
        found = ours_of(config, theirs, tmp_path)(*inputs(config, images))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
