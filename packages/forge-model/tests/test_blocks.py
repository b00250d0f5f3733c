"""Blocks, feed-forwards and norms from outside: side inputs, what modules say of themselves, exports."""

from typing import ClassVar

import pytest
import torch
from forge_config import Config, load
from forge_model import DecoderConfig, LossConfig, ModelError, Sampling, config_to_hf, generate, initialize
from forge_model.config import (
    BlockConfig,
    FfnConfig,
    GroupedQueryConfig,
    LayerOverride,
    ModelConfig,
    MTPConfig,
    NormConfig,
    RMSNormConfig,
    StandardBlockConfig,
    SwiGLUConfig,
    blocks,
)
from forge_model.declared import tensor_roles
from forge_model.decoder.block import Block
from forge_model.hf.families import FAMILIES
from forge_model.layers import Linear
from torch import nn

VOCAB = 31
TOKENS = torch.arange(24).view(2, 12) % VOCAB
MARKS = (torch.arange(24).view(2, 12) % 3 == 0).long()


class Chosen(nn.Module):
    """Two feed-forwards, of which the mark of a token chooses."""

    residual_writers = ("out_proj.0.weight", "out_proj.1.weight")
    tensor_roles: ClassVar = {
        "": "gather",
        "up.0": "colwise",
        "up.1": "colwise",
        "out_proj.0": "rowwise",
        "out_proj.1": "rowwise",
    }

    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.ModuleList(Linear(dim, hidden, bias=False) for _ in range(2))
        self.out_proj = nn.ModuleList(Linear(hidden, dim, bias=False) for _ in range(2))

    def forward(self, x, marks):
        made = [out(up(x).relu()) for up, out in zip(self.up, self.out_proj, strict=True)]
        return torch.where(marks[..., None] == 1, made[1], made[0])


class ChosenConfig(FfnConfig):
    needs: ClassVar = {"marks": "token"}

    def hidden(self, dim):
        return 2 * dim

    def build(self, dim):
        return Chosen(dim, self.hidden(dim))

    def forward_flops(self, dim):
        return 8 * dim * dim


class Plain(nn.Module):
    """What `Chosen` is where both are the same."""

    residual_writers = ("out_proj.weight",)

    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.out_proj = Linear(dim, hidden, bias=False), Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.out_proj(self.up(x).relu())


class PlainConfig(ChosenConfig):
    needs: ClassVar = {}

    def build(self, dim):
        return Plain(dim, self.hidden(dim))


class ScaledNormConfig(NormConfig):
    """A norm that needs something whole: a number a sequence."""

    needs: ClassVar = {"gain": "other"}

    def build(self, dim):
        return ScaledNorm(dim, eps=self.eps)


class ScaledNorm(nn.RMSNorm):
    def forward(self, x, gain):
        return super().forward(x) * gain[:, None, None]


@blocks.register("test-doubled")
class DoubledConfig(StandardBlockConfig):
    """The standard block, applied twice."""

    needs: ClassVar = {"marks": "token"}

    def build(self, layer, dim):
        return Doubled(layer, dim)

    def forward_flops(self, layer, dim, tokens, causal):
        return 2 * super().forward_flops(layer, dim, tokens, causal)


class Doubled(Block):
    def forward(self, x, context):
        once = super().forward(x, context)
        return torch.where(context.side["marks"][..., None] == 1, super().forward(once, context), once)


def config(**options):
    given = {"attention": GroupedQueryConfig(num_heads=4, num_kv_heads=2), "num_layers": 3} | options
    return DecoderConfig(vocab_size=VOCAB, dim=16, max_tokens=32, **given)


def built(seed=1, **options):
    model = config(**options).build()
    initialize(model, seed)
    return model.double()


def test_feed_forward_chooses_by_its_side_input():
    chosen, plain = built(ffn=ChosenConfig()), built(ffn=PlainConfig())
    own = dict(chosen.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            halves = [own[name]] if name in own else [
                own[name.replace("up.", f"up.{n}.").replace("out_proj.", f"out_proj.{n}.")] for n in range(2)
            ]  # fmt: skip
            for half in halves:
                half.copy_(parameter)
    expected = plain(TOKENS)
    torch.testing.assert_close(chosen(TOKENS, marks=MARKS), expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        own["layers.1.ffn.up.1.weight"] += 1
    changed = (chosen(TOKENS, marks=MARKS) - expected).abs().amax(-1) > 1e-9
    assert changed[MARKS == 1].all()
    first = MARKS[0].tolist().index(1)
    assert not changed[0, :first].any(), "a token before the first mark sees no other weights"
    assert torch.equal(chosen(TOKENS, marks=MARKS * 0), expected)


@pytest.mark.parametrize("options", [{"ffn": ChosenConfig()}, {"block": DoubledConfig()}])
def test_side_input_that_is_missing_or_unknown_is_an_error_that_names_it(options):
    model = built(**options)
    with pytest.raises(ModelError, match="needs marks beside its tokens"):
        model(TOKENS)
    with pytest.raises(ModelError, match=r"given mark, which nothing in this model needs.* need marks"):
        model(TOKENS, marks=MARKS, mark=MARKS)
    with pytest.raises(ModelError, match=r"given marks, which nothing.* need none"):
        built()(TOKENS, marks=MARKS)


def test_block_of_one_layer_is_another_one(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(
        f"[model]\nvocab_size = {VOCAB}\ndim = 16\nnum_layers = 3\nmax_tokens = 32\n"
        'attention = {num_heads = 4, num_kv_heads = 2}\n[[model.overrides]]\nlayers = "1"\n'
        'block = {type = "test-doubled"}\n'
    )

    class Whole(Config):
        model: ModelConfig

    read = load(Whole, path).value.model
    assert isinstance(read, DecoderConfig)
    assert [type(read.layer(n).block).__name__ for n in range(3)] == [
        "StandardBlockConfig",
        "DoubledConfig",
        "StandardBlockConfig",
    ]
    model, plain = read.build(), config().build()
    initialize(model, 1)
    initialize(plain, 1)
    assert torch.equal(model(TOKENS, marks=MARKS * 0), plain(TOKENS))
    assert not torch.allclose(model(TOKENS, marks=MARKS), plain(TOKENS))
    once, twice = config().layer_flops(8), read.layer_flops(8)
    assert twice == [once[0], 2 * once[1], once[2]]


def test_norm_is_given_what_it_needs_also_the_last_one():
    model, plain = built(norm=ScaledNormConfig()), built(norm=RMSNormConfig())
    model.load_state_dict(plain.state_dict())
    ones = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(model(TOKENS, gain=ones), plain(TOKENS), rtol=0, atol=1e-12)
    doubled = model(TOKENS, gain=ones * 2, last_logits=3)
    assert doubled.shape[1] == 3 and not torch.allclose(doubled, plain(TOKENS)[:, -3:])


def test_side_inputs_of_two_kinds_are_refused():
    class Other(RMSNormConfig):
        needs: ClassVar = {"marks": "other"}

    with pytest.raises(ValueError, match='marks is needed as "token" and as "other"'):
        config(ffn=ChosenConfig(), norm=Other())
    with pytest.raises(ValueError, match="need marks, which nobody makes for tokens further on"):
        config(ffn=ChosenConfig(), mtp=MTPConfig(num_modules=1))


def test_side_inputs_are_refused_where_sequence_parallelism_would_cut_them_apart():
    with pytest.raises(ValueError, match=r"layer 0: marks.*tensor_parallel\.sequence = false"):
        config(ffn=ChosenConfig()).require_axes(2, 1, True, "gather")
    config(ffn=ChosenConfig()).require_axes(2, 1, False, "gather")
    assert "marks" in built(ffn=ChosenConfig()).parallel_plan()["sequence_inputs"]
    assert "gain" not in built(norm=ScaledNormConfig()).parallel_plan()["sequence_inputs"]


def test_generation_goes_on_with_the_side_inputs_of_the_cache():
    model = built(ffn=ChosenConfig())
    prompt = TOKENS[:1, :5]
    cache = model.new_cache(16, None, torch.device("cpu"))
    cache.side["marks"] = torch.ones(1, 1, dtype=torch.int64)
    logits = [model.begin(prompt, cache, marks=MARKS[:1, :5])]
    for token in (3, 4):
        logits.append(model.writer(torch.tensor([[token]]), cache=cache, last_logits=1)[:, -1])
    whole = torch.cat([prompt, torch.tensor([[3, 4]])], 1)
    marks = torch.cat([MARKS[:1, :5], torch.ones(1, 2, dtype=torch.int64)], 1)
    torch.testing.assert_close(torch.stack(logits, 1), model(whole, marks=marks)[:, 4:], rtol=0, atol=1e-12)


def test_prompt_is_not_given_the_side_inputs_of_later_tokens():
    model = built(ffn=ChosenConfig())
    cache = model.new_cache(16, None, torch.device("cpu"))
    cache.side["marks"] = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ModelError, match="needs marks beside its tokens"):
        model.begin(TOKENS[:1, :5], cache)
    model.begin(TOKENS[:1, :5], cache, marks=MARKS[:1, :5])
    cache.side["colour"] = cache.side["marks"]
    with pytest.raises(ModelError, match="given colour, which nothing"):
        model(TOKENS[:1, :1], cache=cache)


def test_speculative_generation_refuses_other_inputs():
    model = built(mtp=MTPConfig(num_modules=1))
    with pytest.raises(ModelError, match="given span_ids with speculative"):
        generate(model, [[1, 2]], 2, Sampling(temperature=0), speculative=True, inputs={"span_ids": MARKS})


def test_model_that_does_not_write_is_an_error():
    with pytest.raises(ModelError, match="a Linear does not write text"):
        generate(nn.Linear(2, 2), [[1]], 2)


def test_weights_that_write_into_the_residual_stream_start_smaller_whatever_they_are_called():
    model = built(ffn=PlainConfig(), num_layers=8)
    values = model.initial_values()
    assert values["layers.3.ffn.out_proj.weight"].value == pytest.approx(0.02 / 4)
    assert values["layers.3.ffn.up.weight"].value == 0.02
    assert values["layers.3.attention.wo.weight"].value == pytest.approx(0.02 / 4)
    chosen = built(ffn=ChosenConfig(), num_layers=8).initial_values()
    assert chosen["layers.0.ffn.out_proj.1.weight"].value == pytest.approx(0.02 / 4)


def test_part_that_does_not_say_what_it_writes_is_an_error():
    class Silent(PlainConfig):
        def build(self, dim):
            return SilentFfn(dim)

    class SilentFfn(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.w_down = Linear(dim, dim)

        def forward(self, x):
            return self.w_down(x)

    with pytest.raises(
        ModelError, match=r"nothing says whether layers\.0\.ffn\.w_down\.weight write.*residual_writers"
    ):
        config(ffn=Silent()).build().initial_values()
    SilentFfn.residual_writers = ()
    assert config(ffn=Silent()).build().initial_values()["layers.0.ffn.w_down.weight"].value == 0.02
    SilentFfn.residual_writers = ("w_out.weight",)
    with pytest.raises(ModelError, match=r"residual_writers of layers\.0\.ffn.*names 'w_out\.weight'"):
        config(ffn=Silent()).build().initial_values()


class Sub(Block):
    """A block with one writer more: what it says of itself does not hold for its feed-forward."""

    residual_writers: ClassVar = ("extra.weight",)

    def __init__(self, layer, dim):
        super().__init__(layer, dim)
        self.extra = Linear(dim, dim, bias=False)


class SubConfig(StandardBlockConfig):
    def build(self, layer, dim):
        return Sub(layer, dim)


class Halves(nn.Module):
    """Of two feed-forwards one says what it writes."""

    def __init__(self, dim):
        super().__init__()
        self.said, self.silent = Plain(dim, dim), nn.Sequential(Linear(dim, dim))

    def forward(self, x):
        return self.said(x) + self.silent(x)


class HalvesConfig(PlainConfig):
    def build(self, dim):
        return Halves(dim)


def test_what_one_module_says_holds_for_no_other():
    values = built(block=SubConfig(), num_layers=8).initial_values()
    for name in ("extra", "ffn.w_down", "attention.wo"):
        assert values[f"layers.0.{name}.weight"].value == pytest.approx(0.02 / 4)
    with pytest.raises(ModelError, match=r"whether layers\.0\.ffn\.silent\.0\.weight write"):
        config(ffn=HalvesConfig()).build().initial_values()


class MixerConfig(StandardBlockConfig):
    def build(self, layer, dim):
        return Mixer(layer, dim)


class Mixer(nn.Module):
    """A block that calls its attention otherwise."""

    tensor_roles: ClassVar = {"norm": "norm"}

    def __init__(self, layer, dim):
        super().__init__()
        self.norm, self.mixer = layer.norm.build(dim), layer.attention.build(dim, layer.norm)

    def forward(self, x, context):
        return x + self.mixer(self.norm(x), context.rope, context.mask, context.cache)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": True}, {"sliding_window": 3}])
def test_block_gets_the_mask_of_its_attention_whatever_it_is_called(options):
    model = built(block=MixerConfig(), attention=GroupedQueryConfig(num_heads=4, **options))
    changed = TOKENS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCAB
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])
    assert model.parallel_plan()["attention"] == ["layers.*.mixer"]


def test_block_with_attentions_that_make_other_masks_is_an_error():
    class Two(MixerConfig):
        def build(self, layer, dim):
            block = Mixer(layer, dim)
            block.other = GroupedQueryConfig(num_heads=4, softcap=5.0).build(dim, layer.norm)
            return block

    with pytest.raises(ModelError, match="2 modules with different `attend`, and one mask"):
        built(block=Two())(TOKENS)


def test_plan_has_the_roles_that_modules_say():
    plan = built(ffn=ChosenConfig()).parallel_plan()["tensor"]
    assert plan["layers.*.ffn.out_proj.*"] == "rowwise" and plan["layers.*.ffn.up.*"] == "colwise"
    mixed = config(overrides=[LayerOverride(layers="1", ffn=ChosenConfig())]).build()
    roles = tensor_roles(mixed)
    assert roles["layers.0.ffn.w_down"] == "rowwise" and roles["layers.1.ffn.out_proj.1"] == "rowwise"
    plan = mixed.parallel_plan()["tensor"]
    assert plan["layers.*.attention.wq"] == "colwise" and plan["layers.*.ffn.w_down"] == "rowwise"


def test_plan_names_modules_one_by_one_where_their_roles_differ():
    over = LayerOverride(
        layers="2", attention=GroupedQueryConfig(num_heads=4, qk_norm=True, qk_norm_over="projection")
    )
    attention = GroupedQueryConfig(num_heads=4, qk_norm=True)
    plan = config(attention=attention, overrides=[over]).build().parallel_plan()["tensor"]
    assert plan["layers.0.attention.q_norm"] == "head_norm"
    assert plan["layers.2.attention.q_norm"] == "cut_norm"
    assert "layers.*.attention.q_norm" not in plan


class ResidualScaled(DecoderConfig):
    """A decoder from outside, with one key more."""

    residual_scale: float = 1.0


class WindowedAttention(GroupedQueryConfig):
    """Attention from outside, with one key more."""

    decay: float = 0.5


class NamedFfn(SwiGLUConfig):
    """A feed-forward from outside that computes something else with the same keys."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_export_refuses_a_subclass_with_one_more_key_and_names_it(family, tmp_path):
    from msgspec.structs import asdict

    name = next(iter(family.presets))
    path = tmp_path / "model.toml"
    path.write_text(f'[model]\npreset = "{name}"\n')

    class Whole(Config):
        model: ModelConfig

    model = load(Whole, path).value.model
    assert config_to_hf(model)["model_type"] == family.model_type, "the family itself can hold it"
    more = ResidualScaled(**asdict(model))
    with pytest.raises(ModelError, match=r"residual_scale: 1\.0, there 'absent'"):
        config_to_hf(more)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"attention": WindowedAttention(num_heads=4)}, r"attention\.decay: 0\.5"),
        ({"ffn": NamedFfn()}, "ffn.type: 'NamedFfn'"),
        ({"block": DoubledConfig()}, "block.type: 'test-doubled'"),
        ({"norm": ScaledNormConfig()}, "a norm other than rmsnorm|norm.type"),
        (
            {"overrides": [LayerOverride(layers="1", block=DoubledConfig())]},
            r"block\.type: 'test-doubled', there 'standard' \(layers 1\)",
        ),
    ],
)
def test_export_refuses_parts_from_outside(options, key):
    with pytest.raises(ModelError, match=key):
        config_to_hf(config(**options))


def test_hidden_stands_in_for_the_embedding():
    model = built(embedding_scale=4.0)
    expected = model(TOKENS)
    x = model.embedded(TOKENS)
    assert torch.equal(model(TOKENS, hidden=x), expected)
    assert torch.equal(x, model.embed(TOKENS) * 4)
    assert not torch.allclose(model(TOKENS, hidden=x + 1), expected)
    ahead = built(mtp=MTPConfig(num_modules=2))
    loss = {"labels": TOKENS.roll(-1, 1), "loss_fn": LossConfig().build()}
    told = ahead(TOKENS, **loss).total
    torch.testing.assert_close(ahead(TOKENS, hidden=ahead.embedded(TOKENS), **loss).total, told)


def test_blocks_is_an_interface():
    with pytest.raises(NotImplementedError):
        BlockConfig().build(config().layer(0), 16)


class TableFfn(Plain):
    """A feed-forward with a table of whole numbers."""

    initial: ClassVar = {"table": torch.arange(16) % 3}

    def __init__(self, dim, hidden):
        super().__init__(dim, hidden)
        self.register_buffer("table", torch.empty(dim, dtype=torch.int64))


class TableConfig(PlainConfig):
    def build(self, dim):
        return TableFfn(dim, self.hidden(dim))


def test_buffer_starts_as_its_module_says_and_none_is_left_as_it_was(monkeypatch):
    model = config(ffn=TableConfig()).build()
    initialize(model, 0)
    assert model.layers["1"].ffn.table.tolist() == [n % 3 for n in range(16)]
    monkeypatch.setattr(TableFfn, "initial", {"table": torch.arange(3)})
    with pytest.raises(ModelError, match=r"layers\.0\.ffn\.table is \[16\], its initial value \[3\]"):
        initialize(model, 0)
    monkeypatch.setattr(TableFfn, "initial", {})
    with pytest.raises(ModelError, match=r"layers\.0\.ffn\.table, layers\.1.*no initial value"):
        initialize(model, 0)


@pytest.mark.parametrize(
    ("said", "needle"),
    [
        ({"residual_writers": ("out_proj",)}, r"names 'out_proj', a Linear; expected a parameter"),
        ({"initial": {"scale": torch.ones(1)}}, r"initial of layers\.0\.ffn.*names 'scale', which it does"),
        ({"roles": {"gain": "nrm"}}, r"layers\.0\.ffn\.gain has the role 'nrm'; expected one of embedding"),
        ({"holds_experts": True}, r"layers\.0\.ffn.*says holds_experts and has no num_experts, experts"),
    ],
)
def test_wrong_declarations_are_errors_that_name_them(said, needle, monkeypatch):
    for name, value in said.items():
        monkeypatch.setattr(Plain, name, value, raising=False)
    with pytest.raises(ModelError, match=needle):
        model = config(ffn=PlainConfig()).build()
        for layer in model.layers.values():
            layer.ffn.gain = nn.Parameter(torch.ones(3))
            layer.ffn.roles = {"gain": "norm"} | getattr(Plain, "roles", {})
        model.initial_values()
        model.parallel_plan()


def test_roles_of_numbered_modules_are_not_those_of_others_beside_them():
    class Pair(Plain):
        tensor_roles: ClassVar = {"": "gather", "p.0": "colwise", "p.1": "colwise", "p.main": "rowwise"}
        residual_writers: ClassVar = ("p.main.weight",)

        def __init__(self, dim, hidden):
            nn.Module.__init__(self)
            self.p = nn.ModuleDict(
                {"0": Linear(dim, hidden), "1": Linear(dim, hidden), "main": Linear(hidden, dim)}
            )

    class PairConfig(PlainConfig):
        def build(self, dim):
            return Pair(dim, self.hidden(dim))

    plan = config(ffn=PairConfig()).build().parallel_plan()["tensor"]
    assert plan["layers.*.ffn.p.main"] == "rowwise"
    assert plan["layers.2.ffn.p.0"] == "colwise" and "layers.*.ffn.p.*" not in plan
