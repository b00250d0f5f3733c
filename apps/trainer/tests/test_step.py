"""One step against plain PyTorch: the gradient is that of the mean over all valid targets, clipped."""

import copy

import pytest
import torch
import torch.nn.functional as F
from forge_data.loading.loader import MicroBatch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import GroupedQueryConfig
from forge_parallel.mesh import Mesh
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update

LR = 0.5


def micro(tokens: torch.Tensor, labels: torch.Tensor) -> MicroBatch:
    return MicroBatch({"tokens": tokens, "labels": labels}, {"targets": (labels >= 0).sum()})


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_step_moves_by_the_clipped_gradient_of_the_mean_loss(clip_norm):
    config = DecoderConfig(
        vocab_size=19, dim=16, num_layers=1, attention=GroupedQueryConfig(num_heads=2), init_std=0.3
    )
    model = config.build()
    initialize(model, 0)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for group in optimizer.param_groups:
        group["initial_lr"] = LR
    mesh = Mesh(torch.device("cpu"))
    update = Update([model], optimizer, lambda step: 0.5, clip_norm, mesh)
    step = TextStep([model], LossConfig(chunk_tokens=3).build(), mesh, update=update)
    rows = torch.randint(19, (4, 9), generator=torch.Generator().manual_seed(0))
    labels = rows[:, 1:].clone()
    labels[0, :5] = -100
    out = step.train([micro(rows[i : i + 2, :-1], labels[i : i + 2]) for i in (0, 2)], 0)

    loss = F.cross_entropy(reference(rows[:, :-1]).flatten(0, 1), labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm or 1e9)
    torch.testing.assert_close(out.loss, loss.detach())
    torch.testing.assert_close(out.grad_norm, norm)
    assert (out.samples, out.tokens, out.lr) == (4, 32, LR * 0.5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - LR * 0.5 * theirs.grad)


def test_losses_by_source_are_those_of_each_source_alone():
    """In float64, over micro-batches of several sources; the one that is not in the batch has no loss."""
    config = DecoderConfig(
        vocab_size=19, dim=16, num_layers=1, attention=GroupedQueryConfig(num_heads=2), init_std=0.3
    )
    model = config.build().double()
    initialize(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.0
    mesh = Mesh(torch.device("cpu"))
    update = Update([model], optimizer, lambda step: 1.0, 0.0, mesh)
    step = TextStep([model], LossConfig(chunk_tokens=3).build(), mesh, update=update)
    rows = torch.randint(19, (6, 9), generator=torch.Generator().manual_seed(0))
    labels, source = rows[:, 1:].clone(), torch.tensor([0, 2, 2, 0, -1, 2])
    labels[0, :5] = labels[4] = -100
    batch = [
        MicroBatch(
            {"tokens": rows[i : i + 2, :-1], "labels": labels[i : i + 2]},
            {"targets": (labels[i : i + 2] >= 0).sum(), "source": source[i : i + 2]},
            ("code", "books", "web"),
        )
        for i in (0, 2, 4)
    ]
    means = step.train(batch, 0).metrics
    evaluated = step.evaluate([batch])
    with torch.no_grad():
        logits = model(rows[:, :-1])
    for number, name in ((0, "code"), (2, "web")):
        mine = source == number
        alone = F.cross_entropy(logits[mine].flatten(0, 1), labels[mine].flatten())
        torch.testing.assert_close(means[f"loss/{name}"], alone)
        assert evaluated[f"loss/{name}"] == pytest.approx(alone.item(), rel=1e-12)
    assert means["loss/books"].isnan() and not means["z_loss"].isnan()
    everything = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert evaluated["loss"] == pytest.approx(everything.item(), rel=1e-12)


def test_step_without_any_target_has_no_loss_and_no_effect():
    config = DecoderConfig(
        vocab_size=19, dim=16, num_layers=1, attention=GroupedQueryConfig(num_heads=2), init_std=0.3
    )
    model = config.build()
    initialize(model, 0)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.5)
    for group in optimizer.param_groups:
        group["initial_lr"] = LR
    mesh = Mesh(torch.device("cpu"))
    update = Update([model], optimizer, lambda step: 1.0, 0.0, mesh)
    step = TextStep([model], LossConfig(chunk_tokens=3).build(), mesh, update=update)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    out = step.train([micro(tokens, torch.full_like(tokens, -100))], 0)
    assert out.loss.isnan() and not out.finite
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
