"""Splicing leaves the model's bits alone, edits act as written by hand, reports follow definitions."""

import math

import pytest
import torch
from forge_interp import InterpError, ablate, capture, edit, steer
from forge_interp.sae import SAEConfig, SparseAutoencoder, evaluate_sae, spliced
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, FEATURES = 13, 8, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_sae(d_out: int | None = None, activation: str = "relu", **options) -> SparseAutoencoder:
    config = SAEConfig(
        options.pop("d_in", WIDTH), FEATURES, activation, d_out, apply_b_dec_to_input=d_out is None, **options
    )
    sae = SparseAutoencoder(config, seed=1)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    return sae


@pytest.fixture
def tokens() -> Tensor:
    torch.manual_seed(2)
    return torch.randint(VOCAB, (3, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sae",
    [
        make_sae(),
        make_sae(activation="topk", k=4),
        make_sae(activation="gated"),
        make_sae(normalize_activations="layer_norm"),
    ],
    ids=["relu", "topk", "gated", "layer_norm"],
)
def test_with_the_error_the_model_computes_the_same_bits(tokens, sae, dtype):
    model = Model().to(dtype)
    plain = model(tokens)
    with spliced(model, "layers.0", sae) as first, spliced(model, "layers.1", sae):
        found = model(tokens)
    assert found.equal(plain)
    torch.testing.assert_close(first.error + sae(first.value), first.value.float(), rtol=1e-5, atol=1e-5)
    with spliced(model, "layers.1", sae, error=False):
        assert (model(tokens) - plain).abs().max() > 0.01


def test_without_the_error_the_site_is_the_reconstruction(tokens):
    model, sae = Model(), make_sae()
    with capture(model, "layers.1") as acts:
        model(tokens)
    with spliced(model, "layers.1", sae, error=False) as seen:
        found = model(tokens)
    made = sae(acts["layers.1"])
    assert found.equal(model.head(model.layers[2](made)))
    assert seen.features.equal(sae.encode(acts["layers.1"]))


def test_an_edited_feature_changes_the_site_by_its_decoder_row(tokens):
    model, sae = Model(), make_sae()
    with capture(model, "layers.1") as acts:
        model(tokens)
    value = acts["layers.1"]
    active = sae.encode(value)
    for change, by in (
        (ablate("zero", (..., 5)), -active[..., 5]),
        (steer(torch.tensor(2.0), 1.5, (..., 5)), torch.full(active.shape[:-1], 3.0)),
    ):
        with spliced(model, "layers.1", sae, features=change):
            found = model(tokens)
        wanted = value + by[..., None] * sae.W_dec[5]
        torch.testing.assert_close(found, model.head(model.layers[2](wanted)), rtol=1e-5, atol=1e-5)


def test_gradients_go_to_features_and_not_through_the_error(tokens):
    model, sae = Model().double(), make_sae().double()
    with capture(model, "layers.1", grad=True) as acts:
        model(tokens)[:, -1, 3].sum().backward()
    upstream = acts.gradients["layers.1"]
    with spliced(model, "layers.1", sae) as seen:
        loss = model(tokens)[:, -1, 3].sum()
        (found,) = torch.autograd.grad(loss, seen.features)
    torch.testing.assert_close(found, upstream @ sae.W_dec.T)


def test_a_transcoder_stands_in_for_an_mlp(tokens):
    model, sae = Model(), make_sae(16, skip=True)
    plain = model(tokens)
    sites = {"site": "layers.1.up:in", "target": "layers.1.up:out"}
    with spliced(model, sites["site"], sae, target=sites["target"]):
        assert model(tokens).equal(plain)
    with spliced(model, sites["site"], sae, target=sites["target"], error=False):
        found = model(tokens)
    with capture(model, "layers.1.up:in") as acts:
        model(tokens)
    with edit(model, {"layers.1.up": lambda old: sae(acts["layers.1.up:in"])}):
        assert model(tokens).equal(found)
    with (
        pytest.raises(InterpError, match="expected a site for a transcoder"),
        spliced(model, "layers.1", sae),
    ):
        pass


def test_evaluate_sae_is_what_the_definitions_say():
    model, sae = Model().double().eval(), make_sae().double()
    torch.manual_seed(3)
    batches = []
    for length in (5, 8):
        ids, mask = torch.randint(VOCAB, (2, length)), torch.ones(2, length, dtype=torch.long)
        mask[1, 3:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    report = evaluate_sae(model, batches, "layers.1", sae)

    rows, losses = [], {"plain": [], "spliced": [], "zero": []}
    for batch in batches:
        x = model.layers[1](model.layers[0](model.embed(batch["input_ids"])))
        rows += [
            row for row, keep in zip(x.flatten(0, 1), batch["attention_mask"].flatten(), strict=True) if keep
        ]
        for name, value in (("plain", x), ("spliced", sae(x)), ("zero", torch.zeros_like(x))):
            logs = model.head(model.layers[2](value)).log_softmax(-1)
            each = [
                -logs[b, t, batch["input_ids"][b, t + 1]]
                for b in range(2)
                for t in range(x.shape[1] - 1)
                if batch["attention_mask"][b, t + 1]
            ]
            losses[name].append(sum(each) / len(each))
    x = torch.stack(rows)
    acts, made = sae.encode(x), sae(x)
    plain, with_sae, zero = (sum(values).item() / 2 for values in losses.values())
    assert report.rows == len(x) == 5 + 3 + 8 + 3
    assert report.l0 == pytest.approx((acts > 0).double().sum(-1).mean().item())
    error = (x - made).square().sum().item()
    assert report.normalized_mse == pytest.approx(error / x.square().sum().item())
    assert report.explained_variance == pytest.approx(1 - error / (x - x.mean(0)).square().sum().item())
    assert report.dead == int((acts == 0).all(0).sum())
    torch.testing.assert_close(report.density, (acts > 0).double().mean(0))
    torch.testing.assert_close(report.largest, acts.amax(0).detach())
    found = (report.loss, report.loss_spliced, report.loss_zero)
    assert found == pytest.approx((plain, with_sae, zero))
    assert report.loss_recovered == pytest.approx((zero - with_sae) / (zero - plain))
    assert "loss_recovered" in repr(report) and math.isfinite(report.loss_recovered)


def test_what_cannot_be_is_refused(tokens):
    model, sae = Model(), make_sae()
    with pytest.raises(InterpError, match="names 3 sites; expected one"), spliced(model, "layers.*", sae):
        pass
    with pytest.raises(InterpError, match="d_in=8"), spliced(model, "layers.1.up", sae):
        model(tokens)
    with pytest.raises(InterpError, match="there are no batches"):
        evaluate_sae(model, [], "layers.1", sae)
    with pytest.raises(InterpError, match="give loss="):
        evaluate_sae(model, [(tokens,)], "layers.1", sae)


def test_heads_are_not_read_across_tokens_where_there_are_as_many():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).eval()
    sae = SparseAutoencoder(SAEConfig(16, 20, reshape_activations="hook_z"))
    refused = pytest.raises(InterpError, match="expected the input of the output projection")
    with refused, spliced(model, "model.layers.0.self_attn:attn.z", sae):
        model(torch.arange(8).view(2, 4))
    with spliced(model, "model.layers.0.self_attn.o_proj:in", sae) as seen:
        model(torch.arange(8).view(2, 4))
    assert seen.features.shape == (2, 4, 20)


def test_one_row_has_no_variance_to_explain():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 5))
    report = evaluate_sae(
        model, [torch.tensor([[3]])], "0", SparseAutoencoder(SAEConfig(8, 20)), loss=lambda o, _: o.sum()
    )
    assert math.isnan(report.explained_variance)
