"""Groups of experts by modality against loops over tokens, in float64, and what their routers learn."""

import re
from math import ceil

import pytest
import torch
from forge_model import DecoderConfig, initialize
from forge_model.config import GroupedQueryConfig, LayerOverride, MLPConfig, MoEConfig, SwiGLUConfig
from forge_model.decoder.mtp_config import MTPConfig
from forge_model.ffn.config import GeGLUConfig
from forge_model.ffn.dense import ACTIVATIONS
from forge_vlm import VisionLanguageConfig
from forge_vlm.fusion.moma import STEP
from forge_vlm.fusion.moma_config import ExpertsConfig, MomaConfig

DIM = 16
MODALITY = torch.tensor(
    [[0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2], [0] * 12, [1] * 11 + [2]]
)
"""Interleaved; a row with padding; a row of text; a row without."""
SHAPES = {
    "plain": {},
    "normalized": {"normalize": True},
    "few-and-many-experts": {"experts": ExpertsConfig(text=5, image=2), "capacity_factor": 0.7},
    "several-experts-a-token": {"capacity_factor": 2.5},
    "all-experts": {"experts": ExpertsConfig(text=3, image=3), "capacity_factor": 3.0},
}
EXPERTS = {"plain": SwiGLUConfig(), "normalized": GeGLUConfig(dim=24, bias=True)}


def text(**options):
    defaults = {"vocab_size": 31, "dim": DIM, "num_layers": 2, "max_tokens": 48, "init_std": 0.3}
    return DecoderConfig(**defaults | {"attention": GroupedQueryConfig(num_heads=2)} | options)


def decoder(seed=1, ffn=None, **options):
    model = MomaConfig(**options).decoder(text(ffn=ffn or MLPConfig(dim=24))).build()
    initialize(model, seed)
    for name, parameter in model.named_parameters():
        if ".aux." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def layer(**options):
    return decoder(**options).layers["0"].ffn


def made_by(group, index, token):
    """What one expert makes of one token."""
    w = {name: value[index] for name, value in group.experts.named_parameters()}
    up = w["w_up"] @ token + w.get("b_up", 0)
    hidden = group.experts.activation(up)
    if "w_gate" in w:
        hidden = group.experts.activation(w["w_gate"] @ token + w.get("b_gate", 0)) * up
    return w["w_down"] @ hidden + w.get("b_down", 0)


def by_loop(ffn, x, choose):
    """The layer token by token; `choose` tells (group, scores of a sequence by token and expert) -> pairs."""
    out = torch.zeros_like(x)
    for row, kinds in enumerate(MODALITY.tolist()):
        for kind, group in enumerate((ffn.text, ffn.image)):
            scores = {
                (t, e): torch.sigmoid(group.router.weight[e] @ x[row, t])
                for t, k in enumerate(kinds)
                for e in range(group.num_experts)
                if k == kind
            }
            pairs = choose(group, scores, x[row])
            for t, e in pairs:
                weight = scores[t, e]
                if group.options.normalize:
                    weight = weight / sum(scores[one] for one in pairs if one[0] == t)
                out[row, t] += weight * made_by(group, e, x[row, t])
    return out


def chosen_by_experts(group, scores, x):
    """Each expert takes its share of the tokens, rounded up, by score."""
    count, pairs = len({t for t, _ in scores}), []
    each = ceil(round(count * group.options.capacity_factor / group.num_experts, 6))
    for e in range(group.num_experts):
        ranked = sorted(
            (one for one in scores if one[1] == e), key=lambda one: (-(scores[one].logit() // STEP), one)
        )
        pairs += ranked[:each]
    return pairs


def guessed(group, scores, x):
    """Those of which the auxiliary router says that they would be chosen with probability 0.5 or more."""
    aux = group.aux

    def probability(t, e):
        hidden = ACTIVATIONS["silu"](aux.w_in.weight @ x[t] + aux.w_in.bias)
        return torch.sigmoid(aux.w_out.weight[e] @ hidden + aux.w_out.bias[e])

    return [one for one in scores if probability(*one) >= 0.5]


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_choose_as_a_loop_over_tokens_says(shape):
    torch.manual_seed(0)
    ffn, x = layer(ffn=EXPERTS.get(shape), **SHAPES[shape]), torch.randn(4, 12, DIM, dtype=torch.float64)
    for trains, choose in ((True, chosen_by_experts), (False, guessed)):
        found = ffn.train(trains)(x, MODALITY)
        torch.testing.assert_close(found, by_loop(ffn, x, choose), rtol=0, atol=1e-12)
        assert not found[MODALITY == 2].any(), "padding is never served"
        assert found[MODALITY < 2].any()


@pytest.mark.parametrize("shape", ["plain", "normalized"])
def test_thresholds_choose_alike_in_training_and_after_it(shape):
    torch.manual_seed(0)
    ffn = layer(routing="threshold", **SHAPES[shape])
    x, cutoff = torch.randn(4, 12, DIM, dtype=torch.float64), torch.tensor([0.4, 0.5, 0.6, 0.3])

    def above(group, scores, x):
        return [one for one in scores if scores[one] >= cutoff[one[1]]]

    for group in (ffn.text, ffn.image):  # sums of 0.8 steps
        group.threshold.copy_(torch.cat([cutoff.double(), torch.ones(1).double()]) * 0.8)
    for trains in (True, False):
        torch.testing.assert_close(ffn.train(trains)(x, MODALITY), by_loop(ffn, x, above), rtol=0, atol=1e-12)


def test_what_a_sequence_trains_on_depends_on_no_other_and_on_no_padding():
    torch.manual_seed(0)
    model = decoder()
    tokens = torch.randint(31, (4, 12))
    together = model(tokens, modality=MODALITY)
    for row, kinds in enumerate(MODALITY):
        there = int((kinds < 2).sum())
        alone = model(tokens[row : row + 1, :there], modality=kinds[None, :there])
        torch.testing.assert_close(together[row : row + 1, :there], alone, rtol=0, atol=1e-12)
    later = tokens.clone()
    later[2, -1] += 1
    seen = (model(later, modality=MODALITY) - together)[2, :-1].abs().max()
    assert seen > 1e-3, "experts see what comes later"
    with torch.no_grad():  # as `generate` does, whatever the mode
        without = model(tokens, modality=MODALITY)
        unseen = model(later, modality=MODALITY)[2, :-1]  # sums of experts with another number of tokens
        torch.testing.assert_close(unseen, without[2, :-1], rtol=0, atol=1e-12)
        assert torch.equal(model.eval()(tokens, modality=MODALITY), without)


def test_equal_tokens_are_chosen_in_their_order():
    ffn = layer()
    x = torch.ones(1, 8, DIM, dtype=torch.float64) + torch.arange(8)[:, None] * 1e-14  # as sums are rounded
    served = ffn(x, torch.zeros(1, 8, dtype=torch.int64))[0].any(-1)
    assert served.tolist() == [True, True] + [False] * 6


def gradients(**options):
    model = decoder(**options)
    torch.manual_seed(3)
    model(torch.randint(31, (4, 12)), modality=MODALITY).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_loss_of_auxiliary_routers_flows_into_nothing_else():
    with_it, without = gradients(aux_weight=2.0), gradients(aux_weight=0.0)
    for name, gradient in with_it.items():
        assert torch.equal(gradient, without[name]) != (".aux." in name), name
        assert (".aux." in name) <= (not without[name].any())


def test_auxiliary_loss_is_the_cross_entropy_of_being_chosen_and_is_reported():
    torch.manual_seed(0)
    ffn, x = layer(), torch.randn(4, 12, DIM, dtype=torch.float64, requires_grad=True)
    ffn.text.step_tokens = 96  # of two such micro-batches
    ffn(x, MODALITY).sum().backward()
    losses, right, gradient = [], [], torch.zeros(4, dtype=torch.float64)
    for row, kinds in enumerate(MODALITY):
        mine = [t for t in range(12) if kinds[t] == 0]
        scores = {
            (t, e): torch.sigmoid(ffn.text.router.weight[e] @ x[row, t]) for t in mine for e in range(4)
        }
        pairs = chosen_by_experts(ffn.text, scores, None)
        logits = ffn.text.aux(x[row : row + 1])[0]
        for t, e in scores:
            probability, target = logits[t, e].sigmoid(), float((t, e) in pairs)
            losses.append(-(probability if target else 1 - probability).log())
            right.append((probability >= 0.5) == bool(target))
            gradient[e] += (probability - target).detach() / 4 / 96
    torch.testing.assert_close(ffn.text.aux.w_out.bias.grad, gradient, rtol=0, atol=1e-12)
    counted = ffn.text.tally.take()
    told = ffn.text.load(counted)
    assert told["aux_loss"].item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-12)
    assert told["aux_right"].item() == pytest.approx(torch.stack(right).double().mean().item(), abs=1e-12)
    assert told.keys() == {"experts_of_a_token", "unserved", "aux_loss", "aux_right"}
    assert counted[:4].tolist() == [2 + 2 + 3] * 4, "a quarter of 6, 6 and 12 tokens, rounded up"


def test_thresholds_are_running_means_of_the_lowest_scores_that_would_be_chosen():
    torch.manual_seed(0)
    ffn = layer(routing="threshold", threshold_decay=0.75)
    cutoffs = []
    for _ in range(3):
        x = torch.randn(4, 12, DIM, dtype=torch.float64, requires_grad=True)
        ffn(x, MODALITY).sum().backward()
        sums, scores = torch.zeros(4, dtype=torch.float64), ffn.image.router(x).detach().sigmoid()
        for row, kinds in enumerate(MODALITY):
            count = int((kinds == 1).sum())
            for e in range(4 if count else 0):
                of_images = scores[row, kinds == 1, e].sort(descending=True).values
                sums[e] += count * of_images[ceil(count / 4) - 1]
        cutoffs.append(sums / (MODALITY == 1).sum())
        ffn.image.load(ffn.image.tally.take())
    expected = sum(w * c for w, c in zip((0.5625, 0.75, 1), cutoffs, strict=True)) / (0.5625 + 0.75 + 1)
    torch.testing.assert_close(ffn.image._thresholds(scores), expected, rtol=0, atol=1e-12)
    before = ffn.image.threshold.clone()
    ffn.image.load(torch.zeros(ffn.image.tally.size, dtype=torch.float64))
    assert torch.equal(ffn.image.threshold, before), "a step without images teaches nothing"


def test_thresholds_bring_each_expert_its_share():
    torch.manual_seed(0)
    ffn, modality = layer(routing="threshold", threshold_decay=0.9), torch.zeros(8, 64, dtype=torch.int64)
    for _ in range(40):
        ffn(torch.randn(8, 64, DIM, dtype=torch.float64, requires_grad=True), modality).sum().backward()
        counted = ffn.text.tally.take()
        ffn.text.load(counted)
    share = counted[:4] / counted[4]
    assert (share - 0.25).abs().max() < 0.05, share


def test_noise_is_that_of_training_only():
    torch.manual_seed(0)
    ffn, x = layer(gumbel_noise=True), torch.randn(4, 12, DIM, dtype=torch.float64)
    assert not torch.equal(ffn(x, MODALITY), ffn(x, MODALITY))
    ffn.eval()
    assert torch.equal(ffn(x, MODALITY), ffn(x, MODALITY))
    noise = [ffn.text._logits(x, True) - ffn.text.router(x) for _ in range(400)]
    found = torch.stack(noise)  # of the difference of two Gumbel variables: logistic, variance pi^2 / 3
    assert found.mean().abs() < 0.05 and found.var().item() == pytest.approx(torch.pi**2 / 3, rel=0.05)


@pytest.mark.parametrize("ffn", [SwiGLUConfig(), MLPConfig(bias=True)], ids=["swiglu", "mlp"])
def test_experts_that_start_as_the_feed_forward_of_a_dense_decoder_compute_what_it_does(ffn):
    dense, fusion = text(ffn=ffn), MomaConfig(normalize=True, layers="1", experts=ExpertsConfig(image=2))
    theirs, ours = dense.build(), fusion.decoder(dense).build()
    initialize(theirs, 3)
    initialize(ours, 4)  # auxiliary routers choose all
    weights, mine = theirs.double().state_dict(), ours.double().state_dict()
    seeds = {name: fusion.seed_of(name) for name in mine}
    new = {name for name, seed in seeds.items() if seed is None}
    assert all(".router." in name or ".aux." in name for name in new) and len(new) == 2 * 5
    assert {*seeds.values()} - {None} == weights.keys()
    copies = {n: weights[seed].expand_as(mine[n]) for n, seed in seeds.items() if seed is not None}
    ours.load_state_dict(mine | copies)
    tokens = torch.randint(31, (4, 12))
    there = MODALITY < 2
    expected = theirs.eval()(tokens)[there]
    torch.testing.assert_close(ours.eval()(tokens, modality=MODALITY)[there], expected, rtol=0, atol=1e-12)
    group, x = ours.train().layers["1"].ffn.text, torch.randn(4, 12, DIM, dtype=torch.float64)
    made, served = theirs.layers["1"].ffn(x), group(x, MODALITY == 0).any(-1)
    torch.testing.assert_close(group(x, MODALITY == 0)[served], made[served], rtol=0, atol=1e-12)
    assert 6 <= served.sum() < (MODALITY == 0).sum(), "some are passed by while experts choose"


def test_layers_that_are_not_named_stay_as_they_are():
    config = MomaConfig(layers="1").decoder(
        text(overrides=[LayerOverride(layers="1", ffn=MLPConfig(dim=40))])
    )
    assert isinstance(config.layer(0).ffn, SwiGLUConfig)
    assert config.layer(1).ffn.expert == MLPConfig(dim=40)
    assert config.expert_counts() == {"layer 1 text": 4, "layer 1 image": 4}


@pytest.mark.parametrize(
    ("fusion", "options", "said"),
    [
        ({}, {"mtp": MTPConfig(num_modules=1)}, "mtp.num_modules = 1"),
        ({}, {"ffn": MoEConfig()}, "layer 0 has a MoEConfig; an expert is a feed-forward of type"),
        ({"layers": "5"}, {}, "fusion.layers = '5' names no layer of the 2"),
        ({"capacity_factor": 4.5}, {}, "experts.text = 4"),
        ({"routing": "threshold", "gumbel_noise": True}, {}, 'use routing = "choice"'),
    ],
)
def test_what_cannot_be_is_refused(fusion, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        MomaConfig(**fusion).decoder(text(**options))


def test_cut_sequences_are_refused():
    config = VisionLanguageConfig(decoder=text(), fusion=MomaConfig())
    for axes, said in (
        ((1, 2, False, "ulysses"), "mesh.cp = 1"),
        ((2, 1, True, "gather"), "sequence = false"),
    ):
        with pytest.raises(ValueError, match=said):
            config.require_axes(*axes)
    config.require_axes(2, 1, False, "gather")
