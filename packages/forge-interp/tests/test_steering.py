"""Contrastive vectors and sweeps against sums written out, and a planted direction that is found."""

import numpy as np
import pytest
import torch
from forge_interp import InterpError, capture
from forge_interp.causal.steering import contrastive_vectors, strength_sweep
from torch import Tensor, nn

WIDTH = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = (
            nn.Embedding(20, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.embed(input_ids) + self.mix(self.embed(input_ids)).tanh())


def batches(low: int, seed: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    found = []
    for length in (4, 6):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[0, -2:] = 0
        found.append(
            {"input_ids": torch.randint(low, low + 10, (3, length), generator=random), "attention_mask": mask}
        )
    return found


@pytest.mark.parametrize("where", [None, (slice(1, None), -1), (slice(None), slice(0, 2))])
def test_vectors_are_differences_of_means(where):
    model, sides = Model(), (batches(0, 1), batches(10, 2))
    found = contrastive_vectors(model, *sides, ["mix", "embed"], where=where)
    means = []
    for side in sides:
        rows = []
        for batch in side:
            with torch.no_grad(), capture(model, "mix") as acts:
                model(**batch)
            value = acts["mix"].double()
            keep = batch["attention_mask"].bool()
            rows.append(value[keep] if where is None else value[where].reshape(-1, WIDTH))
        means.append(torch.cat(rows).mean(0))
    torch.testing.assert_close(found["mix:out"].double(), means[0] - means[1], rtol=1e-5, atol=1e-6)
    assert found["embed:out"].shape == (WIDTH,)


def test_a_planted_direction_is_found_and_steers():
    model, planted = Model(), torch.zeros(WIDTH)
    planted[3] = 5.0
    with torch.no_grad():
        model.embed.weight[:10] += planted
        model.head.weight[0] = planted
    vector = contrastive_vectors(model, batches(0, 1), batches(10, 2), "embed")["embed:out"]
    assert torch.cosine_similarity(vector, planted, dim=0) > 0.9
    inputs, strengths = batches(10, 3)[0], (-1.0, 0.0, 0.5, 1.0)
    curve = strength_sweep(model, inputs, "embed", vector, strengths, lambda out: out[..., 0].mean())[
        "metric"
    ]
    assert list(curve) == sorted(curve)
    with torch.no_grad():
        assert curve[1] == pytest.approx(model(**inputs)[..., 0].mean().item(), abs=1e-6)
        x = model.embed(inputs["input_ids"]) + 0.5 * vector
        wanted = model.head(x + model.mix(model.embed(inputs["input_ids"])).tanh())
    steered = strength_sweep(
        model, inputs, "embed#0", vector, [0.5], {"a": lambda out: out.sum(), "b": lambda out: out.max()}
    )
    assert steered["a"][0] == pytest.approx(wanted.sum().item(), rel=1e-4)
    assert steered["b"].shape == (1,) and isinstance(steered["b"], np.ndarray)


def test_what_cannot_be_is_refused():
    model = Model()
    with pytest.raises(InterpError, match="no batches"):
        contrastive_vectors(model, [], batches(0, 1), "mix")
    with pytest.raises(InterpError, match="no batches"):
        contrastive_vectors(model, batches(0, 1), [], "mix", where=(slice(1, None), -1))
    with pytest.raises(InterpError, match="where="):
        contrastive_vectors(model, batches(0, 1), batches(0, 1), "mix", where=(0, 0, 0, 0))
    with pytest.raises(InterpError, match="does not fit"):
        strength_sweep(model, batches(0, 1)[0], "mix", torch.ones(3), [1.0], lambda out: out.sum())


def test_an_index_that_takes_padding_or_not_all_numbers_is_refused():
    model, sides = Model(), (batches(0, 1), batches(10, 2))
    with pytest.raises(InterpError, match="takes padding at 'mix:out'"):
        contrastive_vectors(model, *sides, "mix", where=(slice(None), -1))
    with pytest.raises(InterpError, match="expected all 16 numbers"):
        contrastive_vectors(model, *sides, "mix", where=(..., 3))
