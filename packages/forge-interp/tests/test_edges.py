"""Edge attribution against single edges patched by hand, and a planted circuit that is found."""

import numpy as np
import pytest
import torch
from forge_interp import InterpError, capture
from forge_interp.circuits.edges import edge_attribution, faithfulness
from torch import Tensor, nn

WIDTH = 12


class Part(nn.Module):
    """norm, then a small map of two layers; what it gives is added to the stream."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Identity() if linear else nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class Model(nn.Module):
    def __init__(self, linear: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Part(linear) for _ in range(4))
        self.end, self.head = nn.Identity(), nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.end(x))


SENDERS, RECEIVERS = ["embed", "layers.*.body"], ["layers.*.norm:in", "end:in"]
CLEAN, CORRUPTED = torch.arange(6).view(2, 3), torch.arange(6, 12).view(2, 3)


def metric(output: Tensor) -> Tensor:
    return (output[..., 0] - output[..., 1]).sum()


def by_hand(model: Model, ids: Tensor, change: dict[tuple[int, int], Tensor]) -> float:
    """Run with change[s, r] added to what part r reads; s, r = 0 embed, 1.. the layers, r = 5 the end."""
    with torch.no_grad():
        stream = model.embed(ids)
        for number, layer in enumerate(model.layers, 1):
            read = stream + sum(x for (_, r), x in change.items() if r == number)
            stream = stream + layer.body(read)
        return metric(model.head(stream + sum(x for (_, r), x in change.items() if r == 5))).item()


def written(model: Model, ids: Tensor) -> list[Tensor]:
    with torch.no_grad(), capture(model, ["embed", "layers.*.body"]) as acts:
        model(ids)
    return list(acts.values())


def test_where_parts_are_linear_scores_are_the_effects_of_patched_edges():
    model = Model(linear=True)
    found = edge_attribution(model, CLEAN, CORRUPTED, SENDERS, RECEIVERS, metric)
    clean, corrupted = written(model, CLEAN), written(model, CORRUPTED)
    base = by_hand(model, CORRUPTED, {})
    assert found.corrupted == pytest.approx(base, abs=1e-5)
    for s in range(5):
        for r in range(1, 6):
            value = found.values[s, r - 1]
            if s >= r:
                assert np.isnan(value)
            else:
                effect = by_hand(model, CORRUPTED, {(s, r): clean[s] - corrupted[s]}) - base
                assert value == pytest.approx(effect, abs=1e-4)


def test_integrated_gradients_of_the_embedding_add_up_to_the_whole_difference():
    model = Model()
    found = edge_attribution(model, CLEAN, CORRUPTED, SENDERS, RECEIVERS, metric, steps=12)
    assert found.values[0].sum() == pytest.approx(found.clean - found.corrupted, rel=1e-4)
    plain = edge_attribution(model, CLEAN, CORRUPTED, SENDERS, RECEIVERS, metric)
    assert abs(plain.values[0].sum() - (found.clean - found.corrupted)) > 0.05


def test_faithfulness_is_that_of_runs_by_hand():
    model = Model()
    scores = edge_attribution(model, CLEAN, CORRUPTED, SENDERS, RECEIVERS, metric)
    everything = scores.edges()
    assert len(everything) == 15
    some = everything[:7]
    found = faithfulness(model, CLEAN, CORRUPTED, scores, metric, [everything, [], some])
    assert found[:2] == pytest.approx([1, 0], abs=1e-4)
    corrupted = written(model, CORRUPTED)
    with torch.no_grad():
        made = [model.embed(CLEAN)]
        for r in range(1, 6):
            name = scores.receivers[r - 1]
            read = sum(x if (scores.senders[s], name) in some else corrupted[s] for s, x in enumerate(made))
            made.append(model.layers[r - 1].body(read) if r < 5 else read)
        wanted = metric(model.head(made[-1])).item()
    assert found[2] == pytest.approx(
        (wanted - scores.corrupted) / (scores.clean - scores.corrupted), abs=1e-4
    )


def planted() -> Model:
    """Only part 1 reads the embedding's first number, writes the second, which part 3 moves to the third."""
    model = Model(linear=False)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            layer.body[0].weight.normal_(0, 0.01)
            layer.body[2].weight.normal_(0, 0.01)
            if number in (1, 3):
                source = 0 if number == 1 else 1
                layer.body[0].weight[0] = 0.0
                layer.body[0].weight[0, source] = 1.0
                layer.body[2].weight[:, 0] = 0.0
                layer.body[2].weight[source + 1, 0] = 1.0
        model.embed.weight[:, 1:3] = 0.0
        model.head.weight.zero_()
        model.head.weight[0, 2] = 1.0
    return model


@pytest.mark.parametrize("steps", [None, 5])
def test_a_planted_circuit_is_found(steps):
    model = planted()
    scores = edge_attribution(model, CLEAN, CORRUPTED, SENDERS, RECEIVERS, metric, steps=steps)
    path = {
        ("embed:out", "layers.1.norm:in"),
        ("layers.1.body:out", "layers.3.norm:in"),
        ("layers.3.body:out", "end:in"),
    }
    assert set(scores.circuit(3)) == path
    curve = faithfulness(model, CLEAN, CORRUPTED, scores, metric, [scores.circuit(n) for n in (0, 3, 15)])
    assert curve == pytest.approx([0, 1, 1], abs=0.05)


def test_edges_on_no_path_are_left_out():
    scores = edge_attribution(planted(), CLEAN, CORRUPTED, SENDERS, RECEIVERS, metric)
    scores.values[:] = np.where(np.isnan(scores.values), np.nan, 0.0)
    row = {name: i for i, name in enumerate(scores.senders)}
    column = {name: i for i, name in enumerate(scores.receivers)}
    for s, r in (("embed:out", "layers.0.norm:in"), ("layers.1.body:out", "end:in"), ("embed:out", "end:in")):
        scores.values[row[s], column[r]] = 1.0
    assert scores.circuit(3) == [("embed:out", "end:in")]


def test_heads_are_senders():
    transformers = pytest.importorskip("transformers")
    from forge_interp.circuits.weights import head_weights

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0)
    ).eval()
    weights = head_weights(model, CLEAN)
    heads = {f"model.layers.{n}.self_attn:attn.z": weights[f"blocks.{n}"].o for n in range(2)}
    ends = [
        "model.layers.*.input_layernorm:in",
        "model.layers.*.post_attention_layernorm:in",
        "model.norm:in",
    ]

    def difference(output):
        return (output.logits[:, -1, 3] - output.logits[:, -1, 4]).sum()

    common = (model, CLEAN, CORRUPTED)
    whole = edge_attribution(*common, ["model.embed_tokens", "**.self_attn", "**.mlp"], ends, difference)
    found = edge_attribution(*common, ["model.embed_tokens", *heads, "**.mlp"], ends, difference, heads=heads)
    assert found.senders[1:5] == tuple(f"model.layers.0.self_attn:attn.z[{n}]" for n in range(4))
    np.testing.assert_allclose(found.values[1:5, 1:].sum(0), whole.values[1, 1:], rtol=1e-4, atol=1e-6)
    curve = faithfulness(*common, found, difference, [found.edges(), found.edges(0)], heads=heads)
    assert curve == pytest.approx([1, 0], abs=1e-4)


def test_what_cannot_be_is_refused():
    model = Model()
    with pytest.raises(InterpError, match="without a gradient"):
        edge_attribution(model, CLEAN, CORRUPTED, SENDERS, RECEIVERS, lambda out: metric(out).item())
    with pytest.raises(InterpError, match="one run and"):
        edge_attribution(model, CLEAN, CORRUPTED[:, :2], SENDERS, RECEIVERS, metric)
    scores = edge_attribution(model, CLEAN, CLEAN, SENDERS, RECEIVERS, metric)
    with pytest.raises(InterpError, match="expected two values"):
        faithfulness(model, CLEAN, CLEAN, scores, metric, [[]])


class Parallel(nn.Module):
    """Two parts of a block read the same stream; what they give is added by a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        return x + 0.3 * self.a(first) + self.b(second)


def test_edges_that_are_not_there_have_no_score_and_factors_count():
    model = Model(linear=True)
    model.layers = nn.ModuleList(Parallel() for _ in range(2))
    receivers = ["layers.*.first:in", "layers.*.second:in", "end:in"]
    found = edge_attribution(
        model, CLEAN, CORRUPTED, ["embed", "layers.*.a", "layers.*.b"], receivers, metric
    )
    row = {name: i for i, name in enumerate(found.senders)}
    column = {name: i for i, name in enumerate(found.receivers)}
    assert np.isnan(found.values[row["layers.0.a:out"], column["layers.0.second:in"]])
    assert found.fed["layers.0.a:out"] == "layers.0.first:in"
    parts = ["layers.1.a", "layers.1.b"]
    with torch.no_grad(), capture(model, parts) as clean:
        model(CLEAN)
    with torch.no_grad(), capture(model, parts) as corrupted:
        model(CORRUPTED)
    for name, factor in (("layers.1.a:out", 0.3), ("layers.1.b:out", 1.0)):
        change = factor * (clean[name] - corrupted[name])
        wanted = (change @ (model.head.weight[0] - model.head.weight[1])).sum().item()
        assert found.values[row[name], column["end:in"]] == pytest.approx(wanted, abs=1e-5)
    curve = faithfulness(model, CLEAN, CORRUPTED, found, metric, [[], found.edges()])
    assert curve == pytest.approx([0, 1], abs=1e-5)


@pytest.mark.parametrize("family", ["Glm4", "Cohere2"])
def test_what_is_not_added_as_it_is_is_refused(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**sizes)
    ).eval()
    receivers = ["**.input_layernorm:in", "**.post_attention_layernorm:in", "model.norm:in"]
    receivers = receivers if family == "Glm4" else ["**.self_attn:in", "**.mlp:in", "model.norm:in"]
    senders = ["model.embed_tokens", "**.self_attn", "**.mlp"]
    with pytest.raises(InterpError, match="in other ways than as a term of a sum"):
        edge_attribution(model, CLEAN, CORRUPTED, senders, receivers, lambda out: out.logits[..., 3].sum())
