"""A series of checkpoints: layers and heads through training, beside loops by hand and planted heads."""

import numpy as np
import pytest
import torch
from forge_interp import InterpError, capture, head_scores, linear_cka, training_dynamics
from forge_interp.analysis.accumulate import Moments
from forge_interp.dynamics import repeated_ids
from torch import nn

VOCAB, DIM, HEADS = 20, 16, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(z.transpose(1, 2).flatten(-2))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


class Planted(nn.Module):
    """Attention whose patterns are given: the id behind the last occurrence, the id before, and all alike."""

    def __init__(self, period):
        super().__init__()
        self.period = period
        self.layers = nn.ModuleList([PlantedBlock(period)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.layers[0](nn.functional.one_hot(ids % DIM, DIM).float()))


class PlantedBlock(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.lags = (period - 1, 1)
        self.out = nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        place = torch.arange(x.shape[1])
        mask = torch.zeros(3, len(place), len(place))
        for head, lag in enumerate(self.lags):
            mask[head] += torch.where(place[:, None] - place == lag, 50.0, 0.0)
        mask = mask.masked_fill(place > place[:, None], -torch.inf)
        q = x[:, None].expand(-1, 3, -1, -1)
        z = nn.functional.scaled_dot_product_attention(q * 0, q * 0, q, attn_mask=mask[None])
        return x + self.out(z.transpose(1, 2).flatten(-2))


def trained(steps):
    """(step, the model at it), as it trains on repeated ids."""
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(max(steps) + 1):
        if step in steps:
            yield step, model
        ids = repeated_ids(VOCAB, 8, 16, seed=step)
        nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_repeated_ids_repeat():
    ids = repeated_ids(5, 4, 3)
    assert ids.shape == (3, 8) and ids[:, :4].equal(ids[:, 4:]) and ids.unique().numel() == 5


@pytest.mark.parametrize("period", [5, 12])
def test_planted_heads_have_their_scores(period):
    found = head_scores(Planted(period), VOCAB, period, sequences=3)
    assert list(found) == [f"layers.0[{head}]" for head in range(3)]
    np.testing.assert_allclose(found["layers.0[0]"], [1, 0], atol=1e-6)
    np.testing.assert_allclose(found["layers.0[1]"], [0, 1], atol=1e-6)
    alike = np.mean([1 / (place + 1) for place in range(period, 2 * period)])
    np.testing.assert_allclose(found["layers.0[2]"], [alike, alike], atol=1e-6)


def test_scores_are_those_of_whole_patterns():
    torch.manual_seed(1)
    model, ids = TinyLM(), repeated_ids(VOCAB, 6, 4)
    found = head_scores(model, VOCAB, 6, 4)
    with torch.no_grad(), capture(model, "layers.*:attn.pattern") as acts:
        model(ids)
    for layer in range(2):
        pattern = acts[f"layers.{layer}:attn.pattern"]
        for head in range(HEADS):
            weights = [
                [pattern[b, head, t, t - lag] for b in range(4) for t in range(6, 12)] for lag in (5, 1)
            ]
            np.testing.assert_allclose(found[f"layers.{layer}[{head}]"], np.mean(weights, 1), atol=1e-6)


def test_a_series_is_what_a_loop_by_hand_finds(tmp_path):
    steps, data = (0, 1, 5, 20), repeated_ids(VOCAB, 8, 12, seed=99)
    found = training_dynamics(trained(steps), data, "layers.*", tmp_path, vocabulary=VOCAB, period=6)
    rows, scores = {}, {}
    for step, model in trained(steps):
        scores[step] = head_scores(model, VOCAB, 6)
        with torch.no_grad(), capture(model, "layers.*") as acts:
            model(data)
        rows[step] = {site: value.flatten(0, 1) for site, value in acts.items()}
    assert found.steps == steps and found.layers == ("layers.0:out", "layers.1:out")
    for row, step in enumerate(steps):
        for column, site in enumerate(found.layers):
            pair = Moments.of({"a": rows[step][site], "b": rows[20][site]}, between=(["a"], ["b"]))
            assert abs(found.cka[row, column] - linear_cka(pair).values[0, 0]) < 1e-6
        expected = np.stack(list(scores[step].values()))
        np.testing.assert_allclose(found.induction[row], expected[:, 0], atol=1e-6)
        np.testing.assert_allclose(found.previous[row], expected[:, 1], atol=1e-6)
    assert np.allclose(found.cka[-1], 1) and found.cka[0, 1] < found.cka[2, 1] < 0.999
    table = found.table()
    assert [row["step"] for row in table] == list(steps) and table[0]["cka/layers.0:out"] == found.cka[0, 0]
    assert table[-1]["induction"] == found.induction[-1].max()
    assert table[-1]["induction head"] == found.heads[found.induction[-1].argmax()]


def test_the_same_call_goes_on_with_the_stores_that_are_there(tmp_path):
    data = repeated_ids(VOCAB, 8, 12)
    training_dynamics(trained((0, 3)), data, "layers.*", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    with pytest.warns(UserWarning, match="was there"):
        found = training_dynamics(trained((0, 3, 4)), data, "layers.*", tmp_path)
    assert found.steps == (0, 3, 4) and found.heads == () and found.induction.shape == (3, 0)
    assert before.items() <= {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}.items()


def test_what_is_no_series_is_refused(tmp_path):
    data, model = repeated_ids(VOCAB, 8, 4), TinyLM()
    with pytest.raises(InterpError, match="step 1 comes after step 2"):
        training_dynamics([(2, model), (1, model)], data, "layers.*", tmp_path / "a")
    with pytest.raises(InterpError, match="1 checkpoints"):
        training_dynamics([(2, model)], data, "layers.*", tmp_path / "b")
    with pytest.raises(InterpError, match="period=1"):
        head_scores(model, VOCAB, period=1)


def test_a_series_has_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from forge_interp.pictures import draw_dynamics

    data = repeated_ids(VOCAB, 8, 4)
    for vocabulary in (VOCAB, None):
        found = training_dynamics(
            trained((0, 1, 2)), data, "layers.*", tmp_path / str(vocabulary), vocabulary=vocabulary, period=4
        )
        axes = draw_dynamics(found).axes
        assert len(axes) == (2 if vocabulary else 1)
        lines = {line.get_label(): line.get_ydata() for line in axes[0].lines}
        np.testing.assert_array_equal(lines["layers.1"], found.cka[:, 1])
    assert len(axes[0].lines) == 2
