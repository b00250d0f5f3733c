"""Gated layers against those of Mllama in transformers, windows against loops over their definition."""

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from forge_model import DecoderConfig, ModelError, initialize
from forge_model.config import (
    FfnConfig,
    GroupedQueryConfig,
    LatentConfig,
    MoEConfig,
    RMSNormConfig,
    SwiGLUConfig,
)
from forge_model.decoder.mtp_config import MTPConfig
from forge_vlm import VisionLanguageConfig
from forge_vlm.encoders.config import ViTConfig
from forge_vlm.fusion.cross_attention_config import CrossAttentionConfig
from torch.overrides import TorchFunctionMode

ROOM = 12

PARTS = {
    "cross.attention_norm": "input_layernorm",
    "cross.attention.wq": "cross_attn.q_proj",
    "cross.attention.wk": "cross_attn.k_proj",
    "cross.attention.wv": "cross_attn.v_proj",
    "cross.attention.wo": "cross_attn.o_proj",
    "cross.attention.q_norm": "cross_attn.q_norm",
    "cross.attention.k_norm": "cross_attn.k_norm",
    "cross.ffn_norm": "post_attention_layernorm",
    "cross.ffn.w_gate": "mlp.gate_proj",
    "cross.ffn.w_up": "mlp.up_proj",
    "cross.ffn.w_down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.w_gate": "mlp.gate_proj",
    "ffn.w_up": "mlp.up_proj",
    "ffn.w_down": "mlp.down_proj",
}
GATES = {
    "cross.attention_gate.weight": "cross_attn_attn_gate",
    "cross.ffn_gate.weight": "cross_attn_mlp_gate",
}
CASES = {
    # (text layers, before which of them a gated layer stands, width, heads, kv heads, hidden width)
    "one": (2, [1], 24, 3, 1, 40),
    "first": (3, [0, 2], 32, 4, 2, 56),
    "every": (3, [0, 1, 2], 40, 5, 5, 24),
}


def theirs(case):
    """A text model of Mllama with random weights, and for each of our names, its name of the same weight."""
    transformers = pytest.importorskip("transformers")
    layers, crossed, dim, heads, kv_heads, hidden = CASES[case]
    order = [kind for index in range(layers) for kind in (["cross"] * (index in crossed) + ["text"])]
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        vocab_size=43,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=len(order),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        cross_attention_layers=[place for place, kind in enumerate(order) if kind == "cross"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=32,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.MllamaForCausalLM(config)
    torch.manual_seed(len(order))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    texts = [place for place, kind in enumerate(order) if kind == "text"]
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    names["head.weight"] = "lm_head.weight"
    for index, place in enumerate(texts):
        for ours, other in PARTS.items():
            if not ours.startswith("cross."):
                names[f"layers.{index}.{ours}.weight"] = f"model.layers.{place}.{other}.weight"
            elif index in crossed:
                names[f"layers.{index}.{ours}.weight"] = f"model.layers.{place - 1}.{other}.weight"
        for ours, other in GATES.items() if index in crossed else ():
            names[f"layers.{index}.{ours}"] = f"model.layers.{place - 1}.{other}"
    return model.eval(), names


class Widened(TorchFunctionMode):
    """Code of theirs that asks for float32, whatever the model, gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*args, **kwargs)


def ours(case, sees="all"):
    layers, crossed, dim, heads, kv_heads, hidden = CASES[case]
    text = DecoderConfig(
        vocab_size=43,
        dim=dim,
        num_layers=layers,
        max_tokens=32,
        attention=GroupedQueryConfig(num_heads=heads, num_kv_heads=kv_heads),
        ffn=SwiGLUConfig(dim=hidden),
        norm=RMSNormConfig(eps=1e-5),
    )
    listed = ",".join(map(str, crossed))
    fusion = CrossAttentionConfig(layers=listed, max_visual_tokens=ROOM, blind="mllama", sees=sees)
    return fusion.decoder(text).build().eval(), fusion


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("case", CASES)
def test_gated_layers_equal_those_of_mllama_with_weights_of_either(case, dtype, tolerance):
    reference, names = theirs(case)
    model, fusion = ours(case, "latest")
    tensors, own = reference.state_dict(), dict(model.named_parameters())
    assert names.keys() == own.keys()
    assert set(names.values()) == set(tensors), (
        "every weight of theirs has a place here, and the other way round"
    )
    model.load_state_dict({name: tensors[other][: len(own[name])] for name, other in names.items()})
    reference, model = reference.to(dtype), model.to(dtype)
    tokens = torch.randint(1, 43, (2, 14))
    marks = torch.zeros(2, 14, dtype=torch.int64)
    marks[0, [2, 3, 9]] = torch.tensor([1, 2, 3])  # two images side by side, and one by itself; text before
    marks[1, 0] = 1
    counts = [[4, 4, 4], [4]]
    features = torch.randn(2, ROOM, model.config.dim, dtype=dtype)
    window = torch.stack(
        [
            torch.from_numpy(fusion.arrays(row, row, np.zeros(14, np.int64), count)["image_window"])
            for row, count in zip(marks.numpy(), counts, strict=True)
        ]
    )
    features[1, 4:] = 0
    theirs_mask = torch.zeros(2, 14, 3, 1)
    for text, image in ((slice(2, 3), 0), (slice(3, 9), 0), (slice(3, 9), 1), (slice(9, 14), 2)):
        theirs_mask[0, text, image] = 1
    theirs_mask[1, :, 0] = 1
    assert (window[0, 0, :2] == ROOM).all() and (window[0, 1, :2] == 0).all(), "text before the first image"

    def logits(hf):
        from transformers.models.mllama.modeling_mllama import _prepare_cross_attention_mask

        mask, rows = _prepare_cross_attention_mask(theirs_mask.to(dtype), 4, dtype)
        with Widened() if dtype == torch.float64 else nullcontext():
            return hf(
                input_ids=tokens,
                cross_attention_states=features,
                cross_attention_mask=mask,
                full_text_row_masked_out_mask=rows,
                use_cache=False,
            ).logits

    with torch.no_grad():
        expected = logits(reference)
        found = model(tokens, image_features=features, image_window=window)
        assert (found - expected).abs().max() <= tolerance * max(1, expected.abs().max())
        initialize(model, 5)  # and back: weights of ours in their model
        for gate in (
            one for name, one in model.named_parameters() if "_gate.weight" in name and "cross" in name
        ):
            gate.fill_(0.7)
        back = {names[name]: value for name, value in model.state_dict().items()}
        padded = torch.cat([back["model.embed_tokens.weight"], torch.zeros(8, model.config.dim, dtype=dtype)])
        reference.load_state_dict(back | {"model.embed_tokens.weight": padded})
        found = model(tokens, image_features=features, image_window=window)
        assert (found - logits(reference)).abs().max() <= tolerance


def seen(images, doc_ids, counts, sees, token):
    """The visual tokens that a token sees, and all of its sample, by the definition."""
    alike = [t for t in range(len(images)) if doc_ids[t] == doc_ids[token] and doc_ids[t] >= 0]
    marks = [t for t in alike if images[t]]
    before = [t for t in marks if t <= token]
    if sees == "latest" and before:
        run = [before[-1]]
        while run[0] - 1 in before:
            run.insert(0, run[0] - 1)
        before = run
    visual = {
        image: range(sum(counts[: image - 1]), sum(counts[:image])) for image in range(1, len(counts) + 1)
    }
    return [v for t in before for v in visual[images[t]]], [v for t in marks for v in visual[images[t]]]


@pytest.mark.parametrize("sees", ["all", "latest"])
def test_windows_are_what_they_say(sees):
    random = np.random.default_rng(0)
    fusion = CrossAttentionConfig(sees=sees)
    for _ in range(60):
        doc_ids = np.sort(random.integers(0, 4, 20))
        doc_ids[random.integers(12, 21) :] = -1
        is_image = (random.random(20) < 0.3) & (doc_ids >= 0)
        images = np.where(is_image, is_image.cumsum(), 0)
        counts = random.integers(1, 5, is_image.sum()).tolist()
        made = fusion.arrays(images, images, doc_ids, counts)
        assert made["image_places"] == sum(counts)
        for token, (first, end) in enumerate(made["image_window"].T):
            expected, sample = seen(images, doc_ids, counts, sees, token)
            assert list(range(first, end)) == expected
            if not expected:
                assert list(range(end, first)) == sample


@pytest.mark.parametrize("kind", ["concat", "bestfit"])
def test_sequences_have_room_for_their_visual_tokens(kind):
    pytest.importorskip("forge_data", reason="the extra `data` is not installed")
    from forge_data import DataConfig, DataError
    from forge_data.tokenizer.tokenizer import Bytes
    from forge_vlm.samples.packing import SamplePacking
    from forge_vlm.sources.shapes import Shapes, ShapesConfig

    data = DataConfig(max_tokens=127, mask_documents=True, packing=kind, sources=[ShapesConfig(samples=60)])

    def packed(room):
        decoder = DecoderConfig(vocab_size=257, dim=32, num_layers=1, max_tokens=128)
        fusion = CrossAttentionConfig(layers="0", max_visual_tokens=room)
        items = VisionLanguageConfig(decoder=decoder, fusion=fusion).items()
        return SamplePacking(Shapes(items, Bytes(), 60, 0.4, 32, 0), items, data, Bytes.eos_id)

    packing = packed(48)
    read = packing.read(np.arange(len(packing)))
    assert (
        read.extra["image_places"].max() == {"concat": 48, "bestfit": 32}[kind]
        and (read.ragged["grids"].counts <= 3).all()
    )
    marks = read.extra["image_index"] > 0
    assert marks.sum() == read.ragged["grids"].counts.sum(), "an image takes one token"
    first, end = read.extra["image_window"].transpose(1, 0, 2)
    assert ((end - first)[marks] % 16 == 0).all() and (end - first)[marks].min() == 16
    targets = np.ones_like(marks)
    targets[read.ignored] = False
    assert (end > first)[targets].all() and packed(128).read(np.arange(1)).extra["image_places"] > 48
    with pytest.raises(
        DataError, match=r"sample \d+ has 32 visual tokens, and model.fusion.max_visual_tokens = 20"
    ):
        packed(20)


def test_more_images_than_there_is_room_for_are_an_error():
    marks = np.arange(1, 5)
    with pytest.raises(
        ValueError, match=r"4 images have 16 visual tokens, and model.fusion.max_visual_tokens = 12"
    ):
        CrossAttentionConfig(max_visual_tokens=ROOM).arrays(marks, marks, np.zeros(4, np.int64), [4] * 4)


def config(fusion=None, **decoder):
    options = {"vocab_size": 31, "dim": 16, "num_layers": 3, "max_tokens": 32}
    options["attention"] = GroupedQueryConfig(num_heads=2)
    encoder = ViTConfig(image_size=8, patch_size=4, dim=24, num_heads=2)
    fusion = fusion or CrossAttentionConfig(layers="1", max_visual_tokens=ROOM)
    return VisionLanguageConfig(decoder=DecoderConfig(**options | decoder), encoder=encoder, fusion=fusion)


def test_gates_of_zero_leave_a_text_decoder_what_it_was_and_its_names():
    model, text = config().build(), config().decoder.build()
    initialize(model, 1)
    initialize(text, 2)
    names = {name for name, _ in text.named_parameters()}
    own = {name for name, _ in model.decoder.named_parameters()}
    assert names < own and all(name.startswith("layers.1.cross.") for name in own - names)
    model.decoder.load_state_dict(text.state_dict(), strict=False)
    tokens = torch.randint(31, (2, 9))
    features, window = torch.randn(2, ROOM, 16), torch.tensor([0, 4]).view(1, 2, 1).expand(2, 2, 9)
    assert torch.equal(model(tokens), text(tokens))
    assert torch.equal(model.decoder(tokens, image_features=features, image_window=window), text(tokens))


def test_keys_of_images_are_made_once():
    model = config().build()
    initialize(model, 1)
    made = []
    model.decoder.layers["1"].cross.attention.wk.register_forward_hook(lambda *_: made.append(1))
    cache = model.new_cache(8, None, torch.device("cpu"))
    model.begin(torch.randint(31, (2, 5)), cache)
    for _ in range(3):
        model.writer(torch.randint(31, (2, 1)), cache=cache)
    assert len(made) == 1


class NeedyConfig(FfnConfig):
    needs = {"image_window": "token"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"fusion": CrossAttentionConfig(max_visual_tokens=3)},
            "4 visual tokens, and model.fusion.max_visual_tokens",
        ),
        ({"mtp": MTPConfig(num_modules=1)}, "mtp.num_modules = 1, whose modules see no images"),
        ({"ffn": MoEConfig()}, "dense feed-forwards, which fusion.ffn may give"),
        ({"ffn": NeedyConfig()}, "dense feed-forwards, which fusion.ffn may give"),
        ({"attention": LatentConfig(num_heads=2, kv_rank=8)}, "no heads to be inherited"),
        ({"fusion": CrossAttentionConfig(layers="7")}, "names no layer"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        config(**options).fused_decoder()


def test_axes_that_would_cut_its_inputs_are_refused():
    with pytest.raises(ValueError, match=r"image_window.*sequence = false"):
        config().require_axes(2, 1, True, "gather")
    config().require_axes(2, 2, False, "gather")
    model = config().build()
    with pytest.raises(ModelError, match="image_features with 5 rows for each sequence; expected 12"):
        model.decoder(
            torch.zeros(1, 3, dtype=torch.int64),
            image_features=torch.zeros(1, 5, 16),
            image_window=torch.zeros(1, 2, 3, dtype=torch.int64),
        )
