"""Mixtures of experts against loops over tokens and experts that do what the published formulas say."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from forge_config import Config, ConfigError, load
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import (
    ExpertChoiceConfig,
    GroupedQueryConfig,
    LayerOverride,
    ModelConfig,
    MoEConfig,
    SigmoidRouterConfig,
    SoftmaxRouterConfig,
    SwiGLUConfig,
)
from forge_model.moe.experts import Experts, _runs_grouped, grouped_linear
from forge_model.moe.layer import expert_layers
from forge_model.moe.routing import Routing, one_per_slot, serve, within_capacity
from msgspec.structs import replace
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

DIM, HIDDEN, VOCAB, TOKENS = 8, 16, 31, 12


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def experts(count: int, gated: bool = True, bias: bool = False) -> Experts:
    made = Experts(count, DIM, HIDDEN, "silu", gated, bias).double()
    for parameter in made.parameters():
        parameter.data = drawn(*parameter.shape)
    return made


def one_expert(made: Experts, index: int, x: torch.Tensor) -> torch.Tensor:
    """[D] -> [D]."""

    def projected(letter: str, value: torch.Tensor) -> torch.Tensor:
        bias = getattr(made, f"b_{letter}")
        return getattr(made, f"w_{letter}")[index] @ value + (0 if bias is None else bias[index])

    up = projected("up", x)
    hidden = F.silu(up) if made.w_gate is None else F.silu(projected("gate", x)) * up
    return projected("down", hidden)


def brute_force(made: Experts, x: torch.Tensor, routing: Routing, capacity: int | None) -> torch.Tensor:
    out, used = [torch.zeros(DIM, dtype=x.dtype) for _ in x], dict[int, int]()
    for token, expert, weight in zip(*routing[:3], strict=True):
        index = int(expert)
        used[index] = used.get(index, 0) + 1
        if capacity is None or used[index] <= capacity:
            out[int(token)] = out[int(token)] + weight * one_expert(made, index, x[int(token)])
    return torch.stack(out)


def random_routing(seed: int, num_experts: int, tokens: int, weights: torch.Tensor) -> Routing:
    """All to one expert, to a few, or to any, by turns; now and then in the order of no token."""
    top_k = weights.shape[1]
    among = [1, max(1, num_experts // 3), num_experts, num_experts][seed % 4]
    offset = int(torch.randint(num_experts - among + 1, ()))
    pairs = one_per_slot(torch.randint(among, (tokens, top_k)) + offset, weights)
    if seed % 5:
        return pairs
    order = torch.randperm(tokens * top_k)
    return Routing(pairs.tokens[order], pairs.experts[order], pairs.weights[order])


@pytest.mark.parametrize("block", range(10))
def test_experts_serve_random_routings_as_a_loop_over_tokens_does(block):
    for seed in range(20 * block, 20 * block + 20):
        torch.manual_seed(seed)
        num_experts, tokens, top_k = (int(torch.randint(1, high, ())) for high in (9, 14, 4))
        made = experts(num_experts, gated=seed % 3 > 0, bias=seed % 2 > 0)
        x, weights = drawn(tokens, DIM).requires_grad_(), torch.rand(tokens, top_k).double().requires_grad_()
        routing = random_routing(seed, num_experts, tokens, weights)
        capacity = [None, 1, 2, 5][seed // 4 % 4]
        kept = routing if capacity is None else within_capacity(routing, num_experts, capacity)
        given, through = [x, weights, *made.parameters()], drawn(tokens, DIM)

        out, expected = serve(made, x, kept, num_experts), brute_force(made, x, routing, capacity)

        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(out, given, through, retain_graph=True)
        references = torch.autograd.grad(expected, given, through, allow_unused=True, materialize_grads=True)
        for mine, reference in zip(gradients, references, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_lightest_pairs_are_dropped_as_a_loop_over_experts_drops_them(seed):
    torch.manual_seed(seed)
    weights = (4 * torch.rand(13, 3)).round().double() / 4  # with equal ones
    routing, capacity = random_routing(seed, 5, 13, weights), 1 + seed % 4
    kept = within_capacity(routing, 5, capacity, by_weight=True)
    for expert in range(5):
        pairs = [pair for pair, chosen in enumerate(routing.experts.tolist()) if chosen == expert]
        best = sorted(pairs, key=lambda pair: (-routing.weights[pair], pair))[:capacity]
        assert [pair for pair, chosen in enumerate(kept.experts.tolist()) if chosen == expert] == sorted(best)
    served = kept.experts < 5
    assert torch.equal(kept.weights, routing.weights * served) and kept.drops


def test_layer_drops_the_lightest_pairs_where_it_is_asked_to():
    layers = [
        MoEConfig(num_experts=4, dim=HIDDEN, capacity_factor=0.5, drop=drop).build(DIM).double()
        for drop in ("last", "lightest")
    ]
    for parameter in layers[0].parameters():
        parameter.data = drawn(*parameter.shape)
    layers[1].load_state_dict(layers[0].state_dict())
    x = drawn(2, 5, DIM)
    routing = within_capacity(layers[0].router(x).routing, 4, 3, by_weight=True)
    expected = brute_force(layers[0].experts, x.flatten(0, 1), drop_none(routing), None).view_as(x)
    torch.testing.assert_close(layers[1](x), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layers[0](x), expected)


def drop_none(routing: Routing) -> Routing:
    """Pairs that were dropped as pairs with weight 0."""
    return routing._replace(experts=routing.experts.clamp(max=3))


@pytest.mark.parametrize("sizes", [(5, 0, 3, 8), (0, 0, 16, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_equal_those_of_each_group(sizes, dtype):
    rows = torch.randn(20, 32).to(dtype).requires_grad_()
    weight = torch.randn(4, 16, 32).to(dtype).requires_grad_()
    total = sum(sizes)
    out = grouped_linear(rows, weight, torch.tensor(sizes).cumsum(0).int())[:total]
    expected = torch.cat([x @ w.t() for x, w in zip(rows[:total].split(sizes), weight.unbind(), strict=True)])
    torch.testing.assert_close(out, expected)
    given = torch.randn_like(out)
    mine, reference = (torch.autograd.grad(made, [rows, weight], given) for made in (out, expected))
    torch.testing.assert_close(mine[0][:total], reference[0][:total])
    torch.testing.assert_close(mine[1], reference[1])


def decoder(router, **moe) -> DecoderConfig:
    ffn = MoEConfig(**{"num_experts": 6, "top_k": 2, "dim": HIDDEN} | moe, router=router)
    heads = GroupedQueryConfig(num_heads=2)
    return DecoderConfig(
        vocab_size=VOCAB, dim=DIM, num_layers=2, max_tokens=TOKENS, attention=heads, ffn=ffn, init_std=0.3
    )


def built(config: DecoderConfig):
    model = config.build().double()
    initialize(model, 0)
    return model


def train_on(model, tokens: torch.Tensor, step_tokens: int | None = None) -> None:
    model.before_micro_batches(step_tokens or tokens.numel())
    terms = model(tokens, labels=tokens.roll(-1, 1), loss_fn=LossConfig().build())
    (terms.total / (step_tokens or tokens.numel())).backward()


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def loop_losses(
    logits, affinities, chosen, sequences: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Balance over all tokens, mean of that over sequences, and z-loss, by loops."""

    def balance(affinities, chosen):
        tokens, count = affinities.shape
        total = 0
        for expert in range(count):
            share = sum(int(one == expert) for one in chosen.flatten()) / chosen.numel()
            affinity = sum(affinities[t, expert] / affinities[t].sum() for t in range(tokens)) / tokens
            total = total + count * share * affinity
        return total

    parts = zip(affinities.chunk(sequences), chosen.chunk(sequences), strict=True)
    by_sequence = sum(balance(a, c) for a, c in parts) / sequences
    squared = [torch.log(sum(torch.exp(one) for one in row)) ** 2 for row in logits]
    return balance(affinities, chosen), by_sequence, sum(squared) / len(squared)


def loop_choice(scores: torch.Tensor, config, top_k: int) -> list[int]:
    """The experts of a token by its scores, best groups first."""
    size = len(scores) // config.groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.groups)]
    best = 2 if isinstance(config, SigmoidRouterConfig) else 1
    worth = [sum(sorted((float(scores[e]) for e in group), reverse=True)[:best]) for group in groups]
    allowed = sorted(range(config.groups), key=lambda g: -worth[g])[: config.top_groups]
    return sorted((e for g in allowed for e in groups[g]), key=lambda e: -float(scores[e]))[:top_k]


COMMON = {"batch_balance_weight": 0.7, "sequence_balance_weight": 0.3, "z_loss_weight": 0.11}
ROUTERS = {
    "softmax": SoftmaxRouterConfig(**COMMON),
    "raw": SoftmaxRouterConfig(normalize=False, scale=1.7, bias=True, **COMMON),
    "groups": SoftmaxRouterConfig(groups=3, top_groups=2, **COMMON),
    "sigmoid": SigmoidRouterConfig(scale=2.5, **COMMON),
    "sigmoid-groups": SigmoidRouterConfig(groups=3, top_groups=1, normalize=False, **COMMON),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_does_what_the_formulas_say(name):
    torch.manual_seed(1)
    config = ROUTERS[name]
    router = config.build(DIM, 6, 2).double()
    for tensor in [*router.parameters(), *router.buffers()]:
        tensor.data = 0.3 * drawn(*tensor.shape)
    x = drawn(3, 4, DIM)
    logits = x.flatten(0, 1) @ router.weight.t() + (0 if router.bias is None else router.bias)
    sigmoid = isinstance(config, SigmoidRouterConfig)
    affinities = logits.sigmoid() if sigmoid else logits.softmax(-1)
    scores = affinities + router.selection_bias if sigmoid else affinities
    chosen = torch.tensor([loop_choice(row, config, 2) for row in scores.detach()])
    weights = affinities.gather(1, chosen)
    weights = config.scale * (weights / weights.sum(1, keepdim=True) if config.normalize else weights)
    batch, sequence, normalizers = loop_losses(logits, affinities, chosen, 3)
    expected = 0.7 * batch + 0.3 * sequence + 0.11 * normalizers

    routed = router(x)

    assert torch.equal(routed.routing.experts, chosen.flatten())
    torch.testing.assert_close(routed.routing.weights, weights.flatten(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(routed.loss, expected, rtol=1e-12, atol=1e-12)
    mine, reference = (
        torch.autograd.grad(of.square().sum() + loss, list(router.parameters()))
        for of, loss in ((routed.routing.weights, routed.loss), (weights, expected))
    )
    torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_experts_choose_the_tokens_with_the_highest_affinities():
    torch.manual_seed(2)
    router = ExpertChoiceConfig().build(DIM, 4, 2).double()
    router.weight.data = drawn(4, DIM)
    x = drawn(2, 6, DIM)
    affinities = (x.flatten(0, 1) @ router.weight.t()).softmax(-1)
    routing = router(x).routing
    for expert in range(4):
        mine = {int(t) for t, e in zip(routing.tokens, routing.experts, strict=True) if e == expert}
        assert mine == set(affinities[:, expert].argsort(descending=True)[:6].tolist())
    torch.testing.assert_close(routing.weights, affinities[routing.tokens, routing.experts])


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_layer_adds_shared_experts_to_those_that_were_chosen(capacity_factor):
    config = MoEConfig(
        num_experts=4,
        top_k=2,
        dim=HIDDEN,
        shared_experts=3,
        shared_gate=True,
        capacity_factor=capacity_factor,
    )
    layer = config.build(DIM).double()
    for parameter in layer.parameters():
        parameter.data = drawn(*parameter.shape)
    x = drawn(2, 5, DIM)
    capacity = None if capacity_factor is None else 3  # half of 2 * 5 * 2 / 4, rounded up
    expected = brute_force(layer.experts, x.flatten(0, 1), layer.router(x).routing, capacity).view_as(x)
    assert layer.shared.w_up.weight.shape == (3 * HIDDEN, DIM)
    hidden = F.silu(x @ layer.shared.w_gate.weight.t()) * (x @ layer.shared.w_up.weight.t())
    shared = hidden @ layer.shared.w_down.weight.t()
    expected = expected + torch.sigmoid((x * layer.shared_gate.weight[0]).sum(-1, keepdim=True)) * shared
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_losses_of_layers_reach_the_gradient_with_their_weights():
    router = SoftmaxRouterConfig(batch_balance_weight=0.2, z_loss_weight=0.05)
    model, plain = built(decoder(router)), built(decoder(SoftmaxRouterConfig()))
    tokens = torch.randint(VOCAB, (3, TOKENS))
    found = {}
    for layer in expert_layers(plain).values():
        layer.router.z_loss_weight, layer.router.config = 0.05, router
        layer.router.register_forward_hook(lambda module, _, out: found.update({id(module): out.loss}))
        layer.forward = lambda x, layer=layer: serve(
            layer.experts, x.flatten(0, 1), layer.router(x).routing, layer.num_experts
        ).view_as(x)
    terms = plain(tokens, labels=tokens.roll(-1, 1), loss_fn=LossConfig().build())
    (terms.total / tokens.numel() + sum(found.values())).backward()
    train_on(model, tokens)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("balance", [0.0, 0.1])
def test_affinities_that_vanish_leave_gradients_finite(balance):
    """Sigmoids of logits below -104 are 0 in float32, and so is their sum."""
    router = SigmoidRouterConfig(sequence_balance_weight=balance)
    layer = MoEConfig(num_experts=4, dim=HIDDEN, router=router).build(DIM)
    torch.nn.init.zeros_(layer.router.selection_bias)
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    x = torch.full((1, 3, DIM), -20.0).requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert all(torch.isfinite(one.grad).all() for one in [x, *layer.parameters()])


def test_losses_and_loads_do_not_depend_on_micro_batches():
    router = SigmoidRouterConfig(sequence_balance_weight=0.2, z_loss_weight=0.05)
    tokens = torch.randint(VOCAB, (6, TOKENS))
    model, parts = built(decoder(router)), built(decoder(router))
    train_on(model, tokens)
    for part in (tokens[:1], tokens[1:3], tokens[3:]):
        train_on(parts, part, tokens.numel())
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradients(parts)[name], gradient, rtol=1e-10, atol=1e-13)
    mine, reference = (made.before_optimizer_step(lambda sums: sums) for made in (parts, model))
    assert mine.keys() == reference.keys()
    assert all(torch.equal(parts.get_buffer(n), buffer) for n, buffer in model.named_buffers())
    changing = "balance_loss"  # of a micro-batch as a whole
    assert all(torch.allclose(mine[n], reference[n]) for n in mine if not n.endswith(changing))


def test_bias_follows_the_load_of_training_only_once_a_step():
    model = built(decoder(SigmoidRouterConfig(bias_rate=0.25)))
    tokens = torch.randint(VOCAB, (2, TOKENS))
    chosen: dict[str, list[torch.Tensor]] = {name: [] for name in expert_layers(model)}
    for name, layer in expert_layers(model).items():
        layer.router.register_forward_hook(lambda _, __, out, n=name: chosen[n].append(out.routing.experts))
    for block in model.layers.values():
        block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)
    with torch.no_grad():
        model(tokens)
    for part in tokens.chunk(2):
        train_on(model, part, tokens.numel())
    assert all(len(calls) == 5 for calls in chosen.values()), "an evaluation, two passes, two recomputed"

    found = model.before_optimizer_step(lambda sums: 3 * sums)

    for name, layer in expert_layers(model).items():
        counts = torch.cat([chosen[name][1], chosen[name][3]]).bincount(minlength=6)
        assert torch.equal(layer.router.selection_bias, 0.25 * (counts.float().mean() - counts).sign())
        assert found[f"{name}/load_max_over_mean"] == counts.max() / counts.float().mean()
        assert found[f"{name}/dead_experts"] == (counts == 0).sum()
        shares = counts[counts > 0] / counts.sum()
        entropy = -(shares * shares.log()).sum() / torch.tensor(6).log()
        assert found[f"{name}/load_entropy"].item() == pytest.approx(entropy.item(), rel=1e-6)
    before = [layer.router.selection_bias.clone() for layer in expert_layers(model).values()]
    model.before_optimizer_step(lambda sums: sums)
    after = [layer.router.selection_bias for layer in expert_layers(model).values()]
    assert all(map(torch.equal, before, after)), "no token, no change"


@pytest.mark.parametrize("scope", ["batch", "global"])
def test_frozen_layer_counts_its_load_and_keeps_its_bias(scope):
    """Also where all before it is frozen, so that no gradient passes it."""
    router = SigmoidRouterConfig(batch_balance_weight=0.7, balance_scope=scope, bias_rate=0.25)
    told, biases = [], []
    for frozen in ((), ("embed", "layers.0")):
        torch.manual_seed(5)
        model = built(decoder(router))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        for part in torch.randint(VOCAB, (4, TOKENS)).chunk(2):
            train_on(model, part, 4 * (TOKENS - 1))
        told.append(model.before_optimizer_step(lambda sums: sums))
        biases.append([layer.router.selection_bias for layer in expert_layers(model).values()])
    del told[0]["layers.0.ffn/bias_range"], told[1]["layers.0.ffn/bias_range"]
    for name, value in told[0].items():
        torch.testing.assert_close(told[1][name], value, rtol=1e-12, atol=1e-12, msg=name)
    (moved, *rest), (kept, *same) = biases
    assert moved.any() and not kept.any() and all(map(torch.equal, rest, same))


def test_drop_rate_counts_the_pairs_that_no_expert_serves():
    model = built(decoder(SoftmaxRouterConfig(), capacity_factor=0.5))
    train_on(model, torch.randint(VOCAB, (2, TOKENS)))
    layer = expert_layers(model)["layers.0.ffn"]
    counts = layer.tally.sums[:6]
    dropped = (counts - 4).clamp(min=0).sum() / counts.sum()  # half of 24 * 2 / 6
    assert model.before_optimizer_step(lambda sums: sums)["layers.0.ffn/drop_rate"] == dropped > 0


def test_experts_start_as_dense_matrices_do():
    config = decoder(SigmoidRouterConfig(), num_experts=8, dim=256)
    model = config.build()
    initialize(model, 0)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            expected = 0.3 / (4**0.5 if name.endswith("w_down") else 1)
            for expert in parameter:
                assert expert.std().item() == pytest.approx(expected, rel=0.1), name
    assert all(not layer.router.selection_bias.any() for layer in expert_layers(model).values())
    roles = model.parameter_roles()
    assert roles["layers.0.ffn.experts.w_up"] == "expert"
    assert roles["layers.0.ffn.router.weight"] == "router"


def test_flops_and_active_parameters_count_what_a_token_uses():
    shared = {"shared_experts": 1, "shared_gate": True, "shared_dim": 24}
    dense = LayerOverride(layers="0", ffn=SwiGLUConfig(dim=40))
    config = decoder(SoftmaxRouterConfig(), **shared)
    config = replace(config, overrides=[dense])
    model = config.build()
    initialize(model, 0)
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.double()(tokens).sum().backward()
    assert config.flops_per_token(TOKENS, causal=False) == pytest.approx(
        counter.get_total_flops() / tokens.numel(), rel=0.01
    )
    idle = 4 * 3 * DIM * HIDDEN
    assert model.active_parameters() == sum(p.numel() for p in model.parameters()) - idle


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_k = 9", "top_k = 9 of num_experts = 8"),
        ('router = {type = "softmax", groups = 3}', "groups must divide"),
        ('top_k = 3\nrouter = {type = "sigmoid", groups = 4, top_groups = 1}', "top_k = 3 of 2 experts"),
        ('router = {type = "sigmoid", groups = 8, top_groups = 4}', "best two experts"),
        ('router = {type = "expert_choice"}\ncapacity_factor = 1.0', "capacity_factor with an expert_choice"),
        ("shared_gate = true", "without shared_experts"),
        ("clamp = {}\ngated = false", "clamp with shared experts"),
        ("capacity_factor = inf", "given inf"),
        ('drop = "lightest"', "without capacity_factor"),
        ("router = {z_loss_weight = inf}", "given inf"),
        ("[model.mtp]\nnum_modules = 9999", "mtp.num_modules = 9999 of sequences of max_tokens"),
    ],
)
def test_mixture_that_cannot_be_is_refused(text, message, tmp_path):
    class Whole(Config):
        model: ModelConfig

    path = tmp_path / "model.toml"
    path.write_text(f'[model]\nvocab_size = 9\ndim = 8\nnum_layers = 1\n[model.ffn]\ntype = "moe"\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        load(Whole, path)


def test_whether_products_of_groups_run_is_no_product_of_what_is_computed_again():
    """The answer is asked once in a process, which may be in the first of two passes over the same layer."""

    def gradients(recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        made = Experts(4, 16, 32, "silu", gated=True, bias=False)
        made._fused = False
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter)
        rows, ends = torch.randn(24, 16, requires_grad=True), torch.tensor([5, 6, 6, 24]).int()
        kept = [torch.ops.aten._grouped_mm.default]
        options = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if recomputed else {}
        run = partial(checkpoint, made, use_reentrant=False, **options) if recomputed else made
        run(rows, ends).square().sum().backward()
        return [rows.grad, *(parameter.grad for parameter in made.parameters())]

    plain = gradients(False)
    _runs_grouped.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(gradients(True), plain, strict=True))


@pytest.mark.parametrize("name", [*ROUTERS, "global"])
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_padding_changes_no_gradient_no_load_and_no_bias(name, capacity):
    torch.manual_seed(2)
    router = ROUTERS.get(name) or SigmoidRouterConfig(balance_scope="global", bias_rate=0.1, **COMMON)
    config = decoder(router, capacity_factor=capacity, shared_experts=1)
    tokens = torch.randint(VOCAB, (3, TOKENS))
    padded = torch.cat([tokens[:, :-3], torch.zeros(3, 3, dtype=torch.int64)], 1)
    doc_ids = torch.zeros_like(padded)
    doc_ids[:, -3:] = -1
    models, told = [built(config), built(config)], []
    for model, rows, ids in zip(models, (tokens[:, :-3], padded), (None, doc_ids), strict=True):
        model.before_micro_batches(3 * (TOKENS - 3))
        labels = tokens[:, 1:].clone()
        labels = torch.cat([labels, labels[:, :1]], 1)[:, : rows.shape[1]].clone()
        labels[:, TOKENS - 4 :] = -100
        terms = model(rows, labels=labels, doc_ids=ids, loss_fn=LossConfig().build())
        terms.total.backward()
        told.append(model.before_optimizer_step(lambda x: x))
    for key, value in gradients(models[0]).items():
        torch.testing.assert_close(models[1].get_parameter(key).grad, value, rtol=1e-10, atol=1e-12)
    for key, value in told[0].items():
        torch.testing.assert_close(told[1][key], value, rtol=1e-12, atol=1e-12)
    for key, buffer in models[0].named_buffers():
        assert torch.equal(models[1].get_buffer(key), buffer)


@pytest.mark.parametrize(("factor", "tokens"), [(0.6, 100), (1.2, 50), (1.2, 90), (1.1, 200)])
def test_capacity_does_not_depend_on_whether_padding_is_looked_for(factor, tokens):
    """Where factor N K / E is an integer, a float32 on the way would round it up by one."""
    layer = MoEConfig(num_experts=8, top_k=2, dim=HIDDEN, capacity_factor=factor).build(DIM).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = drawn(1, tokens, DIM)
    more, padding = torch.cat([x, drawn(1, 5, DIM)], 1), torch.arange(tokens + 5)[None] >= tokens
    plain, padded = layer(x), layer(more, padding)[:, :tokens]
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
    assert layer(x, torch.zeros(1, tokens, dtype=torch.bool)).equal(plain)


@pytest.mark.parametrize("name", ROUTERS)
def test_router_leaves_padding_of_any_length_out(name):
    """As if all tokens that are none were one row; the loss of sequences weighs each by its tokens."""
    torch.manual_seed(3)
    config = replace(ROUTERS[name], sequence_balance_weight=0.0)
    alone, both = config.build(DIM, 6, 2).double(), ROUTERS[name].build(DIM, 6, 2).double()
    for tensor in [*both.parameters(), *both.buffers()]:
        tensor.data = 0.3 * drawn(*tensor.shape)
    alone.load_state_dict(both.state_dict())
    x, lengths = drawn(4, 5, DIM), (5, 2, 0, 3)
    padding = torch.arange(5) >= torch.tensor(lengths)[:, None]

    routed = both(x, None, padding)

    reference = alone(x[~padding][None])
    torch.testing.assert_close(routed.counted, reference.counted, rtol=1e-12, atol=1e-12)
    sequences = [
        both(x[i : i + 1, :n]).loss - alone(x[i : i + 1, :n]).loss for i, n in enumerate(lengths) if n
    ]
    weighed = sum(n * loss for n, loss in zip((5, 2, 3), sequences, strict=True)) / 10
    torch.testing.assert_close(routed.loss, reference.loss + weighed, rtol=1e-12, atol=1e-12)


def test_experts_choose_padding_last():
    router = ExpertChoiceConfig(z_loss_weight=0.1).build(DIM, 2, 1).double()
    torch.nn.init.normal_(router.weight)
    x, padding = drawn(1, 6, DIM), torch.tensor([[False, True, False, True, True, True]])
    routed = router(x, None, padding)
    assert routed.counted[:2].tolist() == [2, 2]
    served = routed.routing.weights > 0
    assert set(routed.routing.tokens[served].tolist()) == {0, 2}
    torch.testing.assert_close(routed.loss, router(x[~padding][None]).loss)
