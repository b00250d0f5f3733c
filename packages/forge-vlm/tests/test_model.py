"""A joint decoder against its parts put together by hand, in float64."""

import pytest
import torch
from forge_model import DecoderConfig, ModelError, initialize
from forge_model.config import GroupedQueryConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.fusion.config import JointConfig

SIDE, TOKENS, PIXELS = 2, 4, 3 * 16


def config(**options):
    decoder = DecoderConfig(
        vocab_size=31,
        dim=16,
        num_layers=2,
        max_tokens=32,
        embedding_scale=3.0,
        attention=GroupedQueryConfig(num_heads=2),
    )
    encoder = ViTConfig(image_size=8, patch_size=4, dim=24, num_layers=2, num_heads=2)
    return VisionLanguageConfig(decoder=decoder, encoder=encoder, **options)


def built(**options):
    model = config(**options).build()
    initialize(model, 1)
    return model.double()


def inputs(images=(2, 0, 1)):
    """Rows with so many images each, the first at token 1, the second behind three tokens of text."""
    torch.manual_seed(0)
    index = torch.zeros(len(images), 14, dtype=torch.int64)
    for row, count in enumerate(images):
        for image in range(count):
            start = 1 + image * (TOKENS + 3)
            index[row, start : start + TOKENS] = 1 + image * TOKENS + torch.arange(TOKENS)
    total = sum(images)
    return {
        "tokens": torch.randint(31, index.shape),
        "patches": torch.randint(256, (total * TOKENS, PIXELS), dtype=torch.uint8),
        "grids": torch.tensor([[1, SIDE, SIDE]] * total).view(-1, 3),
        "image_index": index,
        "image_places": torch.tensor(images) * TOKENS,
    }


def by_hand(model, given):
    """The hidden states that the decoder is given, one place after the other."""
    x = model.decoder.embedded(given["tokens"]).clone()
    features = model.connector(model.encoder(given["patches"], given["grids"]), given["grids"])
    before = 0
    for row, index in enumerate(given["image_index"].tolist()):
        for token, place in enumerate(index):
            if place:
                x[row, token] = features[before + place - 1]
        before += int(given["image_places"][row])
    return x


@pytest.mark.parametrize("attention", ["causal", "image"])
def test_joint_decoder_is_the_decoder_of_embeddings_with_features_in_their_places(attention):
    model, given = built(fusion=JointConfig(attention=attention)), inputs()
    images = torch.where(given["image_index"] > 0, 1 + (given["image_index"] - 1) // TOKENS, 0)
    spans = {} if attention == "causal" else {"span_ids": images}
    expected = model.decoder(given["tokens"], hidden=by_hand(model, given), **spans)
    torch.testing.assert_close(model(**given, **spans), expected, rtol=0, atol=1e-12)


def test_visual_token_sees_its_image_both_ways_only_where_asked():
    given = inputs((1,))
    changed = given | {"patches": given["patches"].clone()}
    changed["patches"][-1] ^= 255
    images = (given["image_index"] > 0).long()
    for spans, first_changed in (({}, TOKENS), ({"span_ids": images}, 1)):
        model = built()
        model.encoder.layers.clear()  # a tower whose patches do not see each other
        apart = (model(**given, **spans) - model(**changed, **spans)).abs().amax(-1)[0] > 1e-9
        assert apart.tolist().index(True) == first_changed


def test_text_alone_is_what_the_decoder_makes_of_it():
    model, tokens = built(), inputs()["tokens"]
    assert torch.equal(model(tokens), model.decoder(tokens))
    none = {name: value[:0] for name, value in inputs().items() if name in ("patches", "grids")}
    zeros = {"image_index": torch.zeros_like(tokens), "image_places": torch.zeros(3, dtype=torch.int64)}
    assert torch.equal(model(tokens, **none, **zeros), model.decoder(tokens))


def test_row_does_not_depend_on_the_images_of_others():
    model, given = built(), inputs()
    alone = {
        "tokens": given["tokens"][2:],
        "patches": given["patches"][2 * TOKENS :],
        "grids": given["grids"][2:],
        "image_index": given["image_index"][2:],
        "image_places": given["image_places"][2:],
    }
    torch.testing.assert_close(model(**given)[2:], model(**alone), rtol=0, atol=1e-12)


def test_tower_that_no_index_names_gets_a_gradient_of_zeros():
    model, given = built(), inputs((0, 0))
    model(**given).sum().backward()
    found = [parameter.grad for parameter in model.encoder.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in found)
    model(**inputs((1, 0))).square().sum().backward()
    assert all(parameter.grad.any() for parameter in model.connector.parameters())


def test_cached_generation_equals_the_whole():
    model, given = built(), inputs((1,))
    expected = model(**given)
    cache = model.new_cache(14, None, torch.device("cpu"))
    prompt = given | {name: given[name][:, :9] for name in ("tokens", "image_index")}
    logits = [model.begin(prompt.pop("tokens"), cache, **prompt)]
    for token in given["tokens"][0, 9:]:
        logits.append(model.writer(token[None, None], cache=cache, last_logits=1)[:, -1])
    torch.testing.assert_close(torch.stack(logits, 1), expected[:, 8:], rtol=0, atol=1e-12)


def test_initial_values_do_not_depend_on_how_the_model_is_composed():
    model = built()
    alone = model.config.decoder.build()
    initialize(alone, 1)
    values = model.initial_values()
    assert (
        values["decoder.layers.0.attention.wo.weight"]
        == alone.initial_values()["layers.0.attention.wo.weight"]
    )
    assert values["encoder.layers.0.attention.wo.weight"].value == pytest.approx(0.02 / 2)
    assert values["encoder.layers.0.attention.wq.weight"].value == 0.02


def test_configurations_that_cannot_be_are_errors():
    with pytest.raises(ValueError, match="image_size = 9 is no multiple of patch_size = 4"):
        ViTConfig(image_size=9, patch_size=4)
    with pytest.raises(ValueError, match=r"64 visual tokens, and model\.decoder\.max_tokens = 32"):
        VisionLanguageConfig(decoder=config().decoder, encoder=ViTConfig(image_size=32, patch_size=4))
    with pytest.raises(ValueError, match=r"later ones, which context .*parallelism"):
        config(fusion=JointConfig(attention="image")).require_axes(1, 2, False, "gather")
    with pytest.raises(ModelError, match="given colours, which nothing"):
        built()(**inputs(), colours=torch.zeros(1))


def test_flops_are_those_of_the_tower_and_the_connector():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, given = built(), inputs((1, 1))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model.connector(model.encoder(given["patches"], given["grids"]), given["grids"])
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    assert sum(config().other_flops(shapes).values()) == counter.get_total_flops()


def test_parts_that_are_frozen_cost_less():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    given = inputs()
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    for frozen in (set(), {"encoder"}, {"encoder", "connector"}, {"encoder", "decoder"}):
        model = built()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(**given).sum().backward()
        told = config().step_flops(shapes, causal=False, frozen=frozen)
        assert told == pytest.approx(counter.get_total_flops(), rel=0.04), frozen
